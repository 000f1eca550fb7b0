"""Uneven inputs: a rank without batches shadows the collectives of those that still have some.

Works through torch's ``Join`` context. In every iteration the training ranks first tell the joined ones,
in one small collective, whether buffers and gradients will be synchronised, and who speaks for the group.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, JoinHook, _JoinConfig

from gradsync.comm.groups import reducing
from gradsync.comm.waits import Waits
from gradsync.comm.watches import watch_of_world
from gradsync.ddp.replicas import broadcast_state

if TYPE_CHECKING:
    from gradsync.ddp.module import DistributedDataParallel


@dataclass(frozen=True)
class Announcement:
    """What the next iteration will do; ``source`` is the highest rank that still trains, -1 if none does."""

    source: int
    synchronizes: bool
    sends_buffers: bool
    is_anyone_joined: bool = False


def announce(ddp: "DistributedDataParallel", mine: Announcement) -> Announcement:
    """Tell the other ranks what this one will do, and return what the group will do; collective."""
    flags = [mine.synchronizes, mine.sends_buffers, mine.source < 0]
    words = torch.tensor([mine.source, *map(int, flags)], dtype=torch.int64, device="cpu")
    ddp.reducer.groups.wait_for_words(ddp.reducer.control_group.allreduce([words], reducing(dist.ReduceOp.MAX)))
    source, *told = words.tolist()
    return Announcement(source, *map(bool, told))


class WatchedJoin(Join):
    """torch's context, in which a rank without batches does not wait for ever for those that have some."""

    def __init__(self, ddp: "DistributedDataParallel", joinables: Sequence[Any], *args: Any, **kwargs: Any) -> None:
        super().__init__([ddp, *joinables], *args, **kwargs)
        self._waits = Waits(ddp.join_process_group, watch_of_world(), ddp.reducer.groups.waits.limit_s)

    def _get_num_nonjoined_procs(self) -> float:
        num_training = torch.zeros(1, device=self._device)
        self._waits.wait(dist.all_reduce(num_training, group=self._process_group, async_op=True))
        return num_training.item()


class DDPJoinHook(JoinHook):
    """What a rank that has run out of batches does instead of training."""

    def __init__(self, ddp: "DistributedDataParallel", divide_by_initial_world_size: bool) -> None:
        ddp.reducer.divides_by_active_ranks = not divide_by_initial_world_size
        self._ddp = ddp
        self._grads_before: list[tuple[torch.Tensor, torch.Tensor | None]] | None = None

    def main_hook(self) -> None:
        """Shadow one iteration of the training ranks."""
        coming = announce(self._ddp, Announcement(-1, False, False))
        if coming.sends_buffers:
            self._ddp._synchronize_buffers(coming.source)
        if coming.synchronizes:
            if self._grads_before is None:
                self._grads_before = self._finished_gradients()
            self._ddp.reducer.shadow_pass()

    def _finished_gradients(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        reducer = self._ddp.reducer
        return [(p, p.grad) for p, touched in zip(reducer.parameters, reducer.touched, strict=True) if not touched]

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give all ranks the parameters and buffers of one that trained to the end."""
        ddp = self._ddp
        coming = announce(ddp, Announcement(ddp.reducer.rank if is_last_joiner else -1, False, False))
        ddp._authoritative_rank = coming.source
        broadcast_state(ddp._state_group, ddp._synchronized_state(), coming.source, ddp.reducer.rank)
        ddp.reducer.divides_by_active_ranks = False
        if ddp.reducer.sharding is None:
            # results of the others' passes were there for other joinables; a later pass must not count them again
            for parameter, grad in self._grads_before or ():
                parameter.grad = grad
        ddp._join_config = _JoinConfig.construct_disabled_join_config()  # type: ignore[no-untyped-call]


def hook_arguments(kwargs: dict[str, Any]) -> bool:
    """Read ``divide_by_initial_world_size`` out of the arguments of a ``Join`` context."""
    return bool(kwargs.get("divide_by_initial_world_size", True))
