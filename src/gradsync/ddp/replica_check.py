"""Equal replicas, checked every so often inside the control words: one word a rank, and a look at the parameters.

Each rank writes a digest of its parameters into its slot. If they differ, and only then, the ranks tell each other
one digest a parameter, and all raise the same error in the same pass.
"""

import json
import struct
import zlib
from collections.abc import Sequence

import torch

from gradsync.comm.groups import Group, exchange_text
from gradsync.ddp.bucket import local_tensor
from gradsync.ddp.control import WORD_LIMIT, Slot
from gradsync.errors import ContractError

DEFAULT_EVERY = 100
_CPU = torch.device("cpu")


class ReplicaCheck:
    """Looks at the parameters in every ``every``-th pass, beginning with the second; never if that is 0."""

    def __init__(self, every: int) -> None:
        self.every = every
        self._last_equal: int | None = None

    def is_due(self, pass_number: int) -> bool:
        """Whether this pass is one of those; the same on all ranks that are in the same pass."""
        # the first pass follows the first broadcast
        return self.every > 0 and pass_number > 0 and pass_number % self.every == 0

    def word(self, parameters: Sequence[torch.Tensor]) -> int:
        """Return the digest of these parameters, which is not 0."""
        return _combined(digests(parameters)) % (WORD_LIMIT - 1) + 1

    def check(
        self,
        slots: Sequence[Slot],
        pass_number: int,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        group: Group,
    ) -> None:
        """Compare what the ranks have written; a rank that wrote 0 did not look.

        Raises:
            ContractError: on all ranks, naming the first parameter that differs, the ranks and the pass.
        """
        words = {slot.replica_digest for slot in slots}
        if 0 in words:
            return
        if len(words) == 1:
            self._last_equal = pass_number
            return
        everyone: list[list[int]] = [json.loads(t) for t in exchange_text(group, json.dumps(digests(parameters)), _CPU)]
        raise ContractError(f"rank {group.rank()}: {self._difference(everyone, names, pass_number)}")

    def _difference(self, everyone: Sequence[Sequence[int]], names: Sequence[str], pass_number: int) -> str:
        last = "" if self._last_equal is None else f"; they were still equal in pass {self._last_equal}"
        for position, name in enumerate(names):
            values = [theirs[position] for theirs in everyone]
            different = [str(rank) for rank, value in enumerate(values) if value != values[0]]
            if different:
                return (
                    f"the replicas differ: {name!r} has other values on rank(s) {', '.join(different)} than on rank 0 "
                    f"in pass {pass_number}{last}. Something changed it on one rank alone: an optimizer that steps "
                    f"there only or with other settings, a write into a parameter, broken memory. sync_parameters() "
                    f"on all ranks gives them rank 0's values; DistributedDataParallel(..., check_replicas_every=0) if "
                    f"replicas are meant to differ"
                )
        return f"the replicas differed in pass {pass_number}{last}, and are equal now: something writes into them"


@torch.no_grad()
def digests(parameters: Sequence[torch.Tensor]) -> list[int]:
    """Return a number a parameter: the sum of its bits, taken as whole numbers, which any single change changes."""
    by_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    found = [0] * len(parameters)
    for position, parameter in enumerate(parameters):
        bits = _sum_of_bits(local_tensor(parameter.detach()))
        by_device.setdefault(bits.device, []).append((position, bits))
    for sums in by_device.values():  # one transfer a device
        for (position, _), value in zip(sums, torch.stack([bits for _, bits in sums]).tolist(), strict=True):
            found[position] = value
    return found


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    raw = tensor.resolve_conj().resolve_neg()
    if not raw.is_contiguous():
        strides = raw.stride()
        raw = raw.permute(sorted(range(raw.dim()), key=lambda dim: -strides[dim])).contiguous()
    flat = raw.reshape(-1).view(torch.uint8)
    if flat.data_ptr() % 8:
        flat = flat.clone()
    # words of 8 bytes are summed ten times as fast as shorter ones
    end = flat.numel() // 8 * 8
    return flat[:end].view(torch.int64).sum() + flat[end:].sum(dtype=torch.int64)


def _combined(numbers: Sequence[int]) -> int:
    return zlib.crc32(struct.pack(f"{len(numbers)}q", *numbers))
