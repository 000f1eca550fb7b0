"""Models as a user would hand them to ``gradsync prove --model``."""

import numpy as np
import torch
from torch import nn


def _net():
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.LayerNorm(12), nn.Linear(12, 3))


def _batch():
    # Not seeded, as users do: every rank must get the same all the same.
    return {"x": torch.randn(32, 6), "y": torch.from_numpy(np.random.rand(32, 3).astype("float32"))}


def mean_of_rows():
    return _net(), _batch(), lambda module, batch: (module(batch["x"]) - batch["y"]).square().mean()


def sum_of_rows():
    return _net(), _batch(), lambda module, batch: (module(batch["x"]) - batch["y"]).square().sum()


def odd_batch():
    return _net(), torch.zeros(10, 6)


def no_model():
    return "nothing"
