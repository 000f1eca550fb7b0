"""Communication in fewer bits: gradients are cast for the wire and cast back.

The hooks have torch's signature and do what torch's of the same names do, on any device and backend.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.futures import Future

from gradsync.comm.groups import Group

_Hook = Callable[[Any, Any], Future[torch.Tensor]]


def fp16_compress_hook(state: Group | None, bucket: Any) -> Future[torch.Tensor]:
    """Average a bucket in float16: ``ddp.register_comm_hook(group_or_None, fp16_compress_hook)``.

    Each rank divides before it casts, so that the sum does not overflow where the average does not.
    """
    return _average(torch.float16, state, bucket)


def bf16_compress_hook(state: Group | None, bucket: Any) -> Future[torch.Tensor]:
    """Average a bucket in bfloat16: ``ddp.register_comm_hook(group_or_None, bf16_compress_hook)``."""
    return _average(torch.bfloat16, state, bucket)


def sum_in(dtype: torch.dtype) -> _Hook:
    """Return a hook that sums buckets in ``dtype`` and divides nothing; its state is the group."""

    def compressed_sum(state: Group, bucket: Any) -> Future[torch.Tensor]:
        return _reduce(bucket.buffer().to(dtype), state)

    return compressed_sum


def _average(dtype: torch.dtype, group: Group | None, bucket: Any) -> Future[torch.Tensor]:
    group = group if group is not None else cast("Group", dist.group.WORLD)
    return _reduce((bucket.buffer() / group.size()).to(dtype), group)


def _reduce(wire: torch.Tensor, group: Group) -> Future[torch.Tensor]:
    future = group.allreduce([wire]).get_future()
    return cast("Future[torch.Tensor]", future.then(lambda done: done.value()[0]))
