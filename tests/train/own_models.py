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


class _Scaled(nn.Module):
    """Has buffers: one that a rank could be thought to hold a part of, and one without dimensions."""

    def __init__(self):
        super().__init__()
        self.net = _net()
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("calls", torch.tensor(1.5))

    def forward(self, x):
        return self.net(x) * self.scale * self.calls


def with_buffers():
    return _Scaled(), torch.randn(16, 6)


def loss_of_rows():
    return _net(), torch.randn(16, 6), lambda module, batch: module(batch).square()


def loss_of_nothing():
    return _net(), torch.randn(16, 6), lambda module, batch: torch.zeros(())


def never_finite():
    return _net(), torch.randn(16, 6), lambda module, batch: module(batch).mean() * float("nan")


def all_frozen():
    return _net().requires_grad_(False), torch.randn(16, 6)


def no_rows():
    return _net(), {"rows": 16}
