"""What the application needs of the other ranks, behind one small seam with a null object.

``Alone`` is one process without any group; ``Group`` is the default process group. The gradients are
not here: they are the engine's. Two groups are kept apart: the *default* group carries tensors of
the training device, the *host* group (gloo) carries what the hosts say to each other, so that
neither waits for the device nor disturbs the order of the gradients' collectives.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor

from gradsync.comm.waits import wait_for
from gradsync.errors import GradsyncError

T = TypeVar("T")


class Ranks(Protocol):
    """The ranks of a run, as seen from one of them."""

    rank: int
    world: int

    def start_sum(self, tensor: Tensor) -> Callable[[], None]:
        """Start summing ``tensor`` over the ranks, in place; the returned function waits for it."""

    def from_first(self, value: T) -> T:
        """Return rank 0's value on all ranks."""

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in rank order, on all ranks."""

    def twin(self) -> "Ranks":
        """Return the same ranks with groups of their own, for another thread; all ranks call it together."""

    @property
    def host_group(self) -> Any:
        """The group of the hosts, or None for a lone process."""


class Alone:
    """One process, no group: every exchange is with itself."""

    rank = 0
    world = 1
    host_group: Any = None

    def start_sum(self, tensor: Tensor) -> Callable[[], None]:
        """Do nothing: the sum over one rank is the tensor."""
        return _done

    def from_first(self, value: T) -> T:
        """Return the value."""
        return value

    def gather(self, value: T) -> list[T]:
        """Return the value in a list."""
        return [value]

    def twin(self) -> Ranks:
        """Return itself: there is nothing to keep apart."""
        return self


class Group:
    """The ranks of the default process group."""

    def __init__(self, is_watched: bool = True) -> None:
        self._is_watched = is_watched
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.host_group = dist.new_group(backend="gloo")

    def start_sum(self, tensor: Tensor) -> Callable[[], None]:
        """Start an all-reduce on the default group."""
        work: Any = dist.all_reduce(tensor, async_op=True)

        def wait() -> None:
            wait_for(dist.group.WORLD, work)

        return wait

    def from_first(self, value: T) -> T:
        """Broadcast over the host group."""
        self._meet()
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.host_group)
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Gather over the host group."""
        self._meet()
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.host_group)
        return values

    def twin(self) -> Ranks:
        """Return the ranks with another host group, for a thread in the background: nobody minds its waiting."""
        return Group(is_watched=False)

    def _meet(self) -> None:
        """Wait for the others where the wait is watched; what follows takes no time."""
        if self._is_watched:
            wait_for(self.host_group, dist.barrier(self.host_group, async_op=True))


def together(ranks: Ranks, action: Callable[[], T]) -> T:
    """Run an action on every rank; if it fails on any, raise on all instead of leaving some waiting.

    Raises:
        GradsyncError: of the failing rank's class, naming the rank where not all failed alike.
    """
    result: Any = None
    error: Exception | None = None
    try:
        result = action()
    except Exception as caught:  # noqa: BLE001 - whatever it is, the other ranks must learn of it
        error = caught
    failures = ranks.gather(None if error is None else _portable(error))
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        if failure is not None:
            kind, message = failure
            raise kind(f"rank {rank}: {message}")
    return result  # type: ignore[no-any-return]


def _portable(error: Exception) -> tuple[type[GradsyncError], str]:
    if isinstance(error, GradsyncError):
        return type(error), str(error)
    return GradsyncError, f"{type(error).__name__}: {error}"


def _done() -> None:
    pass
