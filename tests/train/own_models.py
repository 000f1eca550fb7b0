"""Models as a user would hand them to ``gradsync prove --model``."""

import torch
from torch import nn


def _net():
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.LayerNorm(12), nn.Linear(12, 3))


def _batch():
    generator = torch.Generator().manual_seed(0)
    return {"x": torch.randn(32, 6, generator=generator), "y": torch.randn(32, 3, generator=generator)}


def mean_of_rows():
    return _net(), _batch(), lambda module, batch: (module(batch["x"]) - batch["y"]).square().mean()


def sum_of_rows():
    return _net(), _batch(), lambda module, batch: (module(batch["x"]) - batch["y"]).square().sum()


def odd_batch():
    return _net(), torch.zeros(10, 6)


def no_model():
    return "nothing"
