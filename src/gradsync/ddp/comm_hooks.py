"""Communication hooks: the user's own way to reduce a bucket.

A hook has torch's signature, ``hook(state, bucket) -> Future[Tensor]``, and owns the whole reduction:
the engine divides nothing. ``GradBucket`` has the methods of ``torch.distributed.GradBucket``, so that
torch's own hooks run unchanged.
"""

import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from gradsync.comm.waits import FutureEnd, Waits
from gradsync.ddp.bucket import Bucket
from gradsync.errors import ReducerFailedError

CommHook = Callable[[Any, Any], Future[torch.Tensor]]


class GradBucket:
    """What a communication hook is given: one bucket's gradients, as torch's class of this name shows them."""

    def __init__(self, bucket: Bucket, is_last: bool) -> None:
        self._bucket = bucket
        self._is_last = is_last
        self._replacement: torch.Tensor | None = None

    def index(self) -> int:
        """Return the bucket's number; 0 is reduced first."""
        return self._bucket.number

    def buffer(self) -> torch.Tensor:
        """Return the flat one-dimensional buffer with all gradients of the bucket."""
        return self._bucket.buffer.gradients if self._replacement is None else self._replacement

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients as views of the buffer, shaped like their parameters."""
        if self._replacement is None:
            return list(self._bucket.views)
        flat, plan = self._replacement, self._bucket.plan
        return [
            flat[offset : offset + view.numel()].view(view.shape)
            for offset, view in zip(plan.offsets, self._bucket.views, strict=True)
        ]

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters in the order of the gradients."""
        return list(self._bucket.parameters)

    def is_last(self) -> bool:
        """Whether this is the last bucket of the pass."""
        return self._is_last

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Use another tensor of the same size in place of the buffer."""
        self._replacement = buffer


class HookedCollective:
    """Runs a communication hook for each bucket, and takes over what its future brings.

    ``divides`` says that the hook does the averaging too; one of ours may leave that to the engine.
    """

    def __init__(self, state: Any, hook: CommHook, timeout: timedelta, rank: int, divides: bool = True) -> None:
        self.state = state
        self.hook = hook
        self.divides = divides
        self._timeout = timeout
        self._rank = rank

    @property
    def name(self) -> str:
        """The hook's name, for messages and to compare between ranks."""
        return name_of(self.hook)

    def launch(self, bucket: Bucket, is_last: bool) -> None:
        """Call the hook.

        Raises:
            RuntimeError: the hook returned something else than a future.
        """
        future = self.hook(self.state, GradBucket(bucket, is_last))
        if not isinstance(future, Future | torch._C.Future):  # type: ignore[attr-defined]
            raise RuntimeError(
                f"rank {self._rank}: a communication hook must return a torch.futures.Future object, but "
                f"{name_of(self.hook)} returned {type(future).__name__}"
            )
        bucket.work = future

    def wait(self, bucket: Bucket, names: Sequence[str], waits: Waits) -> None:
        """Wait for the hook's future and put its value into the bucket; ``names`` are the bucket's parameters."""
        value = self._value_of(bucket, names, waits)
        if isinstance(value, list | tuple):
            value = value[0]
        target = bucket.buffer.gradients
        if value.data_ptr() != target.data_ptr() or value.dtype != target.dtype:
            target.copy_(value.reshape(-1))

    def _value_of(self, bucket: Bucket, names: Sequence[str], waits: Waits) -> Any:
        future: Any = bucket.work
        if not future.done():
            limit_s = self._timeout.total_seconds()
            waits.wait(FutureEnd(future, limit_s, lambda: self._is_late(names)), bucket.number)
        return future.wait()

    def _is_late(self, names: Sequence[str]) -> ReducerFailedError:
        return ReducerFailedError(
            f"rank {self._rank}: the communication hook {name_of(self.hook)} did not complete its future "
            f"within {self._timeout.total_seconds():g} s (the group's time-out), for the bucket with "
            f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}"
        )


def check_hook(hook: Any) -> None:
    """Raise torch's errors for something that cannot be a communication hook."""
    if not callable(hook):
        raise TypeError(f"Communication hook must be callable, but it is a {type(hook).__name__}")
    try:
        signature = inspect.signature(hook)
    except ValueError:
        return
    parameters = signature.parameters
    if "bucket" not in parameters and len(parameters) != 2:
        raise ValueError(
            f"Communication hook: expected a function of (state, bucket), but {name_of(hook)} takes {signature}"
        )
    annotation = parameters["bucket"].annotation if "bucket" in parameters else inspect.Parameter.empty
    allowed = (
        inspect.Parameter.empty,
        dist.GradBucket,  # type: ignore[attr-defined]
        GradBucket,
        "dist.GradBucket",
        "GradBucket",
        Any,
    )
    if annotation not in allowed:
        raise ValueError("Communication hook: bucket annotation should be dist.GradBucket.")
    returns = signature.return_annotation
    if returns is not inspect.Signature.empty and "Future" not in str(returns):
        raise ValueError(
            "Communication hook: return annotation should be torch.futures.Future[torch.Tensor] or torch._C.Future."
        )


def name_of(hook: Any) -> str:
    """Return the hook's name for messages."""
    return str(getattr(hook, "__qualname__", None) or type(hook).__qualname__)
