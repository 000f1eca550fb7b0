"""Sums over all ranks that lie under what has been accumulated since, and must not be summed again.

A mean of equal values is the value, so an average may stay where it is. With ``reduction="sum"`` and ``"weighted"`` the
gradient that a pass has left is put aside before anything is added to it: ``param.grad`` begins anew with this rank's
part alone, and the end of the next pass adds the sum again.

[Note: In the user's hands] Without synchronisation the user sees ``param.grad`` while its sum is aside. If he clears
it, the sum is cleared, too. What another change would mean for the sum nobody can know, so that is an error.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from gradsync.errors import ContractError


@dataclass
class _Aside:
    total: torch.Tensor
    left: Callable[[], torch.Tensor | None] | None = None
    """The gradient on top, as the last contribution outside of a pass has left it; None while backward is at work."""
    version: int = 0


class CarriedSums:
    """The sums that one rank has put aside, by parameter."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._aside: dict[int, _Aside] = {}

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(self._aside)

    def put_aside(self, parameter: torch.Tensor) -> None:
        """Take a parameter's gradient, which is a sum over all ranks, off it."""
        assert parameter.grad is not None
        self._aside[id(parameter)] = _Aside(parameter.grad)
        parameter.grad = None

    def take(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the sum that was put aside for this parameter, if any; it is the caller's from now on."""
        aside = self._aside.pop(id(parameter), None)
        return None if aside is None else aside.total

    def leave(self, parameter: torch.Tensor) -> None:
        """Take note of a gradient that is the user's until the next backward."""
        aside = self._aside.get(id(parameter))
        if aside is not None and parameter.grad is not None:
            aside.left, aside.version = weakref.ref(parameter.grad), parameter.grad._version

    def review(self, parameter: torch.Tensor, name: str) -> None:
        """See what the user has done with a gradient meanwhile; see [Note: In the user's hands].

        Raises:
            ContractError: he has changed it.
        """
        aside = self._aside.get(id(parameter))
        if aside is None or aside.left is None:
            return
        grad = parameter.grad
        is_as_left = grad is not None and grad is aside.left() and grad._version == aside.version
        aside.left = None
        if is_as_left:
            return
        if grad is not None and _is_any(grad):
            raise ContractError(
                f"rank {self._rank}: the gradient of {name} was changed under no_sync(), on top of a gradient that was "
                f"already reduced, and what that part should be now is not known; change gradients after a backward "
                f"that synchronises, or after sync_gradients(), or clear them"
            )
        del self._aside[id(parameter)]

    def forget(self) -> None:
        """Forget all sums: the gradients on top of them are worth nothing."""
        self._aside.clear()


@torch.no_grad()
def _is_any(grad: torch.Tensor) -> bool:
    local = getattr(grad, "_local_tensor", grad)
    return bool((local.coalesce().values() if local.is_sparse else local).any())
