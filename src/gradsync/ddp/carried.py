"""Sums over all ranks that lie under what has been accumulated since, and must not be summed again.

A mean of equal values is the value, so an average may stay where it is. With ``reduction="sum"`` and ``"weighted"`` the
gradient that a pass has left is put aside before anything is added to it: ``param.grad`` begins anew with this rank's
part alone, and the end of the next pass adds the sum again. Inside ``join()`` that goes for averages, too: a rank
without batches has no part in what the others still hold.

[Note: In the user's hands] Without synchronisation the user sees ``param.grad`` while its sum is aside. If he clears
it, the sum is cleared, too. What another change would mean for the sum nobody can know, so that is an error.

[Note: Raised in between] A backward without synchronisation may raise after a sum was put aside and before anything
came on top of it. Autograd then drops the callback that waits for the end of that backward, which puts the sum back.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.autograd import Variable
from torch.utils.weak import WeakIdKeyDictionary

from gradsync.errors import ContractError


@dataclass
class _Aside:
    total: torch.Tensor
    left: Callable[[], torch.Tensor | None] | None = None
    """The gradient on top, as the last contribution outside of a pass has left it; None while backward is at work."""
    version: int = 0
    task: int = -1
    """The last backward that has added to the gradient on top, if it may raise without anybody else noticing."""


_aside: "WeakIdKeyDictionary" = WeakIdKeyDictionary()
"""By parameter; one for all wrappers, since a parameter may pass from one to another meanwhile."""
_watched: dict[int, weakref.ref["_EndOfBackward"]] = {}


class CarriedSums:
    """The sums that are aside, in the hands of one wrapper's reducer on this rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __bool__(self) -> bool:
        """Whether there is any."""
        return bool(_aside.data)

    def put_aside(self, parameter: torch.Tensor) -> None:
        """Take a parameter's gradient, which is a sum over all ranks, off it."""
        assert parameter.grad is not None
        _aside[parameter] = _Aside(parameter.grad)
        parameter.grad = None

    def watch(self, parameter: torch.Tensor) -> None:
        """Have the sum of this parameter, if it has one, back if the running backward raises.

        See [Note: Raised in between].
        """
        aside = _aside_of(parameter)
        task = torch._C._current_graph_task_id()
        if aside is not None and task != -1:
            aside.task = task
            _watch(task)

    def take(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the sum that was put aside for this parameter, if any; it is the caller's from now on."""
        aside: _Aside | None = _aside.pop(parameter, None)  # type: ignore[no-untyped-call]
        return None if aside is None else aside.total

    def leave(self, parameter: torch.Tensor) -> None:
        """Take note of a gradient that is the user's until the next backward."""
        _leave(_aside_of(parameter), parameter)

    def review(self, parameter: torch.Tensor, name: str) -> None:
        """See what the user has done with a gradient meanwhile; see [Note: In the user's hands].

        Raises:
            ContractError: he has changed it.
        """
        aside = _aside_of(parameter)
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
        del _aside[parameter]

    def forget(self, parameters: Iterable[torch.Tensor]) -> None:
        """Forget the sums of these parameters: the gradients on top of them are worth nothing."""
        for parameter in parameters:
            _aside.pop(parameter, None)  # type: ignore[no-untyped-call]


def _aside_of(parameter: torch.Tensor) -> _Aside | None:
    """Asked for with every gradient, while mostly nothing is aside: then without a look into the dictionary."""
    return _aside.get(parameter) if _aside.data else None  # type: ignore[no-untyped-call, no-any-return]


def _leave(aside: _Aside | None, parameter: torch.Tensor) -> None:
    if aside is not None and parameter.grad is not None:
        aside.left, aside.version = weakref.ref(parameter.grad), parameter.grad._version


class _EndOfBackward:
    """A callback that autograd holds until a backward is over, or has raised."""

    def __call__(self) -> None:
        """Do nothing: what counts is that it is gone afterwards."""


def _watch(task: int) -> None:
    if task not in _watched:
        end = _EndOfBackward()
        Variable._execution_engine.queue_callback(end)  # type: ignore[attr-defined]
        _watched[task] = weakref.ref(end, lambda _: _put_back(task))


def _put_back(task: int) -> None:
    """Put back the sums that this backward has put aside without adding anything on top."""
    _watched.pop(task, None)
    for parameter, aside in list(_aside.items()):  # type: ignore[no-untyped-call]
        if aside.task != task or aside.left is not None:
            continue
        if parameter.grad is None:
            parameter.grad = aside.total
            del _aside[parameter]
        else:
            _leave(aside, parameter)  # what was to run after the contribution has raised


@torch.no_grad()
def _is_any(grad: torch.Tensor) -> bool:
    local = getattr(grad, "_local_tensor", grad)
    return bool((local.coalesce().values() if local.is_sparse else local).any())
