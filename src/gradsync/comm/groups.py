"""Small services over a process group: its time-out, and exchanging text, numbers and tensors as bytes."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from gradsync.comm.waits import wait_for

Group = dist.ProcessGroup

_FLAT_BYTES = 32 * 2**20


def group_timeout(group: Group, device: torch.device) -> timedelta:
    """Return how long a collective of this group may take."""
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None) or getattr(group, "timeout", None)
    return timeout if isinstance(timeout, timedelta) else default_pg_timeout


def reducing(op: Any) -> Any:
    """Return the options of an all-reduce, called on the group itself, that reduces so."""
    options = dist.AllreduceOptions()
    options.reduceOp = op
    return options


def exchange_text(group: Group, text: str, device: torch.device) -> list[str]:
    """Return every rank's text, in rank order."""
    data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8).to(device)
    size = torch.tensor([data.numel()], dtype=torch.int64, device=device)
    sizes = [torch.zeros_like(size) for _ in range(group.size())]
    _gather(group, sizes, size)
    lengths = [int(s.item()) for s in sizes]
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    padded[: data.numel()] = data
    parts = [torch.zeros_like(padded) for _ in range(group.size())]
    _gather(group, parts, padded)
    return [bytes(part[:n].cpu().numpy()).decode() for part, n in zip(parts, lengths, strict=True)]


def exchange_number(group: Group, number: int, device: torch.device) -> list[int]:
    """Return every rank's 63-bit number, in rank order."""
    mine = torch.tensor([number], dtype=torch.int64, device=device)
    all_of_them = [torch.zeros_like(mine) for _ in range(group.size())]
    _gather(group, all_of_them, mine)
    return [int(n.item()) for n in all_of_them]


def broadcast_tensors(group: Group, tensors: Sequence[torch.Tensor], source: int) -> list[torch.Tensor]:
    """Return rank ``source``'s values of the tensors as new contiguous tensors (``source`` counts inside the group).

    Values travel as bytes, many tensors in one message, so that every dtype goes the same way.
    """
    received: list[torch.Tensor] = []
    for chunk in _chunks(tensors):
        flat = torch.cat([_as_bytes(t) for t in chunk])
        if flat.numel():
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = source, 0
            wait_for(group, group.broadcast([flat], options))
        start = 0
        for t in chunk:
            num_bytes = t.numel() * t.element_size()
            part = flat[start : start + num_bytes]
            received.append(torch.empty(t.shape, dtype=t.dtype, device=t.device))
            _as_bytes(received[-1]).copy_(part)
            start += num_bytes
    return received


def _gather(group: Group, parts: list[torch.Tensor], mine: torch.Tensor) -> None:
    wait_for(group, dist.all_gather(parts, mine, group=group, async_op=True))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    whole = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return whole.reshape(-1).view(torch.uint8)


def _chunks(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Split the list, in order, where the device changes or a message would grow too large."""
    chunks: list[list[torch.Tensor]] = []
    size = 0
    for t in tensors:
        num_bytes = t.numel() * t.element_size()
        if not chunks or chunks[-1][0].device != t.device or size + num_bytes > _FLAT_BYTES:
            chunks.append([])
            size = 0
        chunks[-1].append(t)
        size += num_bytes
    return chunks


def describe(group: Any) -> str:
    """Return the group's ranks and backend in a few words, for messages."""
    return f"{dist.get_backend(group)} group of ranks {dist.get_process_group_ranks(group)}"
