"""What the control words of a pass say about whether the ranks are still in step; errors are the same on all ranks."""

import json
import zlib
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import nn

from gradsync.comm.groups import Group, exchange_number, exchange_text
from gradsync.ddp.control import WORD_LIMIT, RankState, Slot
from gradsync.ddp.plan import Plan
from gradsync.ddp.replicas import describe_parameters, first_difference
from gradsync.errors import ContractError, ReducerFailedError

NamedParameter = tuple[str, nn.Parameter]

_CPU = torch.device("cpu")


def plan_digest(plan: Plan) -> int:
    """Return a number that is equal for equal plans, and fits into a control word."""
    return zlib.crc32(repr([(b.indices, str(b.dtype)) for b in plan.buckets] + [plan.sparse]).encode()) % WORD_LIMIT


def change_digest(change: Sequence[NamedParameter] | None) -> int:
    """Return 0 for no change, and a number that is equal for equal changes."""
    if change is None:
        return 0
    facts = [(name, tuple(p.shape), str(p.dtype)) for name, p in change]
    return zlib.crc32(repr(facts).encode()) % (WORD_LIMIT - 1) + 1


def check_abandoned(slots: Sequence[Slot], rank: int, pass_number: int) -> None:
    """Raise if the backward of some ranks, but not of all, raised an exception."""
    abandoned = [r for r, slot in enumerate(slots) if slot.state == RankState.ABANDONED]
    if not abandoned or len(abandoned) == len(slots):
        return
    if rank in abandoned:
        others = [r for r in range(len(slots)) if r not in abandoned]
        raise ContractError(
            f"rank {rank}: the backward of pass {pass_number} raised an exception here but not on rank(s) "
            f"{_numbers(others)}; its gradients were dropped on all ranks, and all of them raise"
        )
    raise ContractError(
        f"rank {rank}: the backward of rank(s) {_numbers(abandoned)} raised an exception in pass {pass_number}, so the "
        f"gradients of this pass are incomplete and were dropped on all ranks; the exception on that rank says why"
    )


def is_same_change(slots: Sequence[Slot]) -> bool:
    """Whether the trainable parameters have changed in the same way on all ranks, or on none."""
    return len({slot.change_digest for slot in slots}) == 1


def raise_other_change(mine: Sequence[NamedParameter], group: Group) -> NoReturn:
    """Raise what the ranks' trainable parameters, of which ``mine`` are this rank's, differ in; collective."""
    everyone = exchange_text(group, json.dumps(describe_parameters(mine)), _CPU)
    raise ContractError(
        f"rank {group.rank()}: the ranks no longer train the same parameters: {first_difference(everyone)}; freeze, "
        f"unfreeze, replace, convert or add parameters on all ranks alike, before the same step"
    )


def check_same_pass(slots: Sequence[Slot], rank: int) -> None:
    """Raise if the ranks are in different passes, or have different plans."""
    for what, values in (
        ("pass number", [slot.pass_number for slot in slots]),
        ("bucket plan", [slot.plan_digest for slot in slots]),
    ):
        if len(set(values)) > 1:
            raise ReducerFailedError(
                f"rank {rank}: the ranks are not in the same pass: {what} {values} by rank; every rank must run the "
                f"same number of synchronised backwards (see join for uneven inputs)"
            )


def check_same_hook(group: Group, name: str | None, device: torch.device) -> None:
    """Raise on all ranks if not all of them have the same communication hook; collective."""
    digest = 0 if name is None else zlib.crc32(name.encode()) + 1
    if len(set(exchange_number(group, digest, device))) == 1:
        return
    names = exchange_text(group, name or "none", device)
    raise ContractError(
        f"rank {group.rank()}: the ranks have different communication hooks: {names} by rank; register the same hook "
        f"on all ranks, before the same step"
    )


def _numbers(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
