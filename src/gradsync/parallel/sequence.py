"""Sequences that the ranks of a tensor axis divide: which slice is whose, and how any length is made to divide.

Which activations are cut, and what their gradients then are, is in ``tensor``.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from gradsync.parallel.division import Flow
from gradsync.parallel.mesh import Mesh


@dataclass(frozen=True)
class Slices:
    """The equal slices that every sequence is cut into between matrices, and which of them this rank has."""

    count: int = 1
    own: int = 0

    def padded(self, tokens: Tensor) -> Tensor:
        """Return tokens (B, T) with as many behind them as make T divide; no token sees one behind it."""
        missing = -tokens.shape[1] % self.count
        return F.pad(tokens, (0, missing)) if missing else tokens

    def length(self, length: int) -> int:
        """Return the tokens of one slice of a sequence that divides."""
        return length // self.count


def slices_of(flow: Flow, mesh: Mesh) -> Slices:
    """Return the slices of a run's sequences; one, if they are not cut."""
    return Slices(mesh.degrees.tensor, mesh.tensor_rank) if flow.cuts_sequences else Slices()
