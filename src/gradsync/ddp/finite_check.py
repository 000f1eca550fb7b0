"""Gradients that are infinite or not a number, found on the rank where they appear, before they are averaged.

After the average every rank has them, and nobody knows where they came from. The check looks at each bucket before it
leaves and tells the others in the control words, so all ranks raise the same error in the same pass.
"""

from collections.abc import Sequence

import torch

from gradsync.ddp.bucket import local_grad
from gradsync.ddp.control import Slot
from gradsync.errors import NonFiniteError


class FiniteCheck:
    """Collects what it sees in one pass of one rank; does nothing unless it is wanted."""

    def __init__(self, is_wanted: bool) -> None:
        self.is_wanted = is_wanted
        self._seen: list[tuple[int, torch.Tensor]] = []

    def start_pass(self) -> None:
        """Forget the pass before."""
        self._seen = []

    @torch.no_grad()
    def look(self, indices: Sequence[int], parameters: Sequence[torch.Tensor]) -> None:
        """Look at the gradients of these parameters (by their index in the model) before they are collected.

        On a GPU nothing is waited for here.
        """
        if not self.is_wanted:
            return
        for index, parameter in zip(indices, parameters, strict=True):
            grad = local_grad(parameter)
            if grad is not None and grad.numel():
                values = grad.coalesce().values() if grad.is_sparse else grad
                self._seen.append((index, _is_finite(values)))

    def word(self) -> int:
        """Return the first parameter, in the order of the launches, with such a gradient: its index + 1; 0 if none."""
        by_device: dict[torch.device, list[int]] = {}
        for position, (_, is_finite) in enumerate(self._seen):
            by_device.setdefault(is_finite.device, []).append(position)
        bad = [
            position
            for positions in by_device.values()
            for position, good in zip(
                positions, torch.stack([self._seen[p][1] for p in positions]).tolist(), strict=True
            )
            if not good
        ]
        return self._seen[min(bad)][0] + 1 if bad else 0


def _is_finite(values: torch.Tensor) -> torch.Tensor:
    if values.device.type == "cpu" and values.dtype not in (torch.float16, torch.bfloat16):
        # a sum is many times as fast; one that overflows says nothing
        is_finite = torch.isfinite(values.sum())
        if is_finite:
            return is_finite
    return torch.isfinite(values).all()


def check_finite(
    slots: Sequence[Slot], rank: int, pass_number: int, names: Sequence[str], bucket_of: Sequence[int]
) -> None:
    """Raise on all ranks if some rank has found a gradient that is not finite."""
    found = {r: int(slot.non_finite) - 1 for r, slot in enumerate(slots) if slot.non_finite}
    if not found:
        return
    places = "; ".join(f"rank {r}: {names[index]!r} ({_bucket(bucket_of[index])})" for r, index in found.items())
    raise NonFiniteError(
        f"rank {rank}: gradients are infinite or not a number in pass {pass_number}, before they were averaged; first "
        f"in backward: {places}. The gradients of this pass were dropped on all ranks; look at the batch and the "
        f"layers after that parameter on the rank named, lower the learning rate, or catch this error and skip the step"
    )


def _bucket(number: int) -> str:
    return "sparse, in no bucket" if number < 0 else f"bucket {number}"
