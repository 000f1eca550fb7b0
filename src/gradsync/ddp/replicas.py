"""Equal replicas: the contract checked at construction, the first broadcast, and the check on demand."""

import json
import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradsync.comm.groups import Group, broadcast_tensors, exchange_number, exchange_text, reducing
from gradsync.comm.notices import exchange_notices
from gradsync.comm.waits import wait_for
from gradsync.ddp.bucket import local_tensor
from gradsync.errors import ContractError

Description = list[list[Any]]
"""Ordered facts, each ``[name, what, value]``; equal on all ranks that hold the same model."""


def describe_parameters(named: Sequence[tuple[str, torch.Tensor]]) -> Description:
    """Return what must be equal on all ranks of these parameters."""
    facts: Description = []
    for name, parameter in named:
        local = local_tensor(parameter)
        facts.append(
            [
                name,
                "parameter",
                {
                    "shape": str(tuple(local.shape)),
                    "dtype": str(local.dtype),
                    "strides": str(tuple(st for st, size in zip(local.stride(), local.shape, strict=True) if size > 1)),
                    "requires_grad": str(parameter.requires_grad),
                },
            ]
        )
    return facts


def describe_buffers(buffers: dict[str, torch.Tensor]) -> Description:
    """Return what must be equal on all ranks of these buffers."""
    return [[name, "buffer", {"shape": str(tuple(b.shape)), "dtype": str(b.dtype)}] for name, b in buffers.items()]


def check_contract(group: Group, description: Description, device: torch.device, rank: int) -> None:
    """Compare the description with that of the other ranks; collective.

    Raises:
        ContractError: on every rank, with the first difference, if any two ranks differ.
    """
    text = json.dumps(description)
    data = text.encode()
    digest = zlib.crc32(data) << 31 | zlib.adler32(data) >> 1
    digests: Sequence[object] = exchange_notices(group, "digest", str(digest)) or exchange_number(group, digest, device)
    if len(set(digests)) == 1:
        return
    everyone = exchange_notices(group, "model", text) or exchange_text(group, text, device)
    raise ContractError(
        f"rank {rank}: DDP expects same model across all ranks, but {first_difference(everyone)}; build the model with "
        f"the same code and the same arguments on every rank"
    )


def first_difference(texts: Sequence[str]) -> str:
    """Say in words where the description of some rank first differs from rank 0's; they are JSON texts."""
    descriptions: list[Description] = [json.loads(text) for text in texts]
    first = descriptions[0]
    for other_rank, other in enumerate(descriptions[1:], start=1):
        if other != first:
            return _difference(first, other, other_rank)
    return "all ranks agree"


def _difference(first: Description, other: Description, other_rank: int) -> str:
    for mine, theirs in zip(first, other, strict=False):
        if mine[:2] == theirs[:2]:
            if mine[2] != theirs[2]:
                return _value_difference(mine, theirs, other_rank)
            continue
        for present, absent, rank_with, rank_without in (
            (mine, other, 0, other_rank),
            (theirs, first, other_rank, 0),
        ):
            if all(present[:2] != fact[:2] for fact in absent):
                return _only_on(present, rank_with, rank_without)
        return f"rank 0 has {mine[1]} {mine[0]!r} where rank {other_rank} has {theirs[0]!r} (another order)"
    if len(first) > len(other):
        return _only_on(first[len(other)], 0, other_rank)
    return _only_on(other[len(first)], other_rank, 0)


def _value_difference(mine: list[Any], theirs: list[Any], other_rank: int) -> str:
    if not isinstance(mine[2], dict):
        return f"{mine[0]} is {mine[2]} on rank 0 and {theirs[2]} on rank {other_rank}"
    for what, value in mine[2].items():
        if theirs[2][what] != value:
            return f"{mine[1]} {mine[0]!r} has {what} {value} on rank 0 and {theirs[2][what]} on rank {other_rank}"
    raise AssertionError("no difference in facts that differ")


def _only_on(fact: list[Any], rank_with: int, rank_without: int) -> str:
    details = "" if not isinstance(fact[2], dict) else f" ({', '.join(f'{k} {v}' for k, v in fact[2].items())})"
    return f"rank {rank_with} has {fact[1]} {fact[0]!r}{details}, which rank {rank_without} does not have"


@torch.no_grad()
def broadcast_state(group: Group, tensors: Sequence[torch.Tensor], source: int, rank: int) -> None:
    """Overwrite the tensors with rank ``source``'s values, in place; collective."""
    local = [local_tensor(t.detach()) for t in tensors]
    received = broadcast_tensors(group, local, source)
    if rank != source:
        for mine, new in zip(local, received, strict=True):
            mine.copy_(new)


def describe_values(named: dict[str, torch.Tensor]) -> Description:
    """Return what must be equal on all ranks of tensors that are not dense: all of it."""
    facts = []
    for name, tensor in named.items():
        dense = tensor.detach().to_dense()
        facts.append(
            [name, "sparse buffer", {"shape": str(tuple(tensor.shape)), "values' digest": str(_digest(dense))}]
        )
    return facts


def have_equal_shapes(group: Group, named: dict[str, torch.Tensor]) -> bool:
    """Whether tensors have the same names, shapes and dtypes on all ranks; collective.

    Asked before tensors are sent that may have changed on one rank alone: a message of another size than expected
    would be mixed up, or end the process.
    """
    facts = [(name, tuple(t.shape), str(t.dtype)) for name, t in named.items()]
    digest = zlib.crc32(repr(facts).encode())
    words = torch.tensor([digest, -digest], dtype=torch.int64, device="cpu")
    wait_for(group, group.allreduce([words], reducing(dist.ReduceOp.MAX)))
    highest, negative_lowest = words.tolist()
    return bool(highest == -negative_lowest)


def shapes_of_rank(group: Group, buffers: dict[str, torch.Tensor], source: int) -> list[torch.Tensor]:
    """Return tensors of the shapes and dtypes that the buffers have on rank ``source``; collective.

    Raises:
        ContractError: on all ranks, if some rank has buffers of other names.
    """
    facts = [[name, "buffer", [list(b.shape), str(b.dtype).removeprefix("torch.")]] for name, b in buffers.items()]
    everyone = exchange_text(group, json.dumps(facts), torch.device("cpu"))
    described: list[Description] = [json.loads(text) for text in everyone]
    if any([f[0] for f in theirs] != [f[0] for f in described[source]] for theirs in described):
        names = [json.dumps([[name, "buffer", None] for name, *_ in theirs]) for theirs in described]
        raise ContractError(
            f"rank {group.rank()}: the ranks no longer have the same buffers: {first_difference(names)}; "
            f"add and remove buffers on all ranks alike"
        )
    mine = list(buffers.values())
    if group.rank() == source:
        return mine
    return [
        torch.empty(shape, dtype=getattr(torch, dtype), device=b.device)
        for (_, _, (shape, dtype)), b in zip(described[source], mine, strict=True)
    ]


def verify(group: Group, named: Sequence[tuple[str, torch.Tensor]], rank: int, device: torch.device) -> None:
    """Compare the values of the tensors bit by bit with those of the other ranks; collective.

    Raises:
        ContractError: on every rank, naming the first tensor that differs and the ranks that have other values than
            rank 0.
    """
    digests = [_digest(t) for _, t in named]
    everyone: list[list[int]] = [json.loads(text) for text in exchange_text(group, json.dumps(digests), device)]
    for position, (name, _) in enumerate(named):
        values = [theirs[position] for theirs in everyone]
        different = [other for other, value in enumerate(values) if value != values[0]]
        if different:
            raise ContractError(
                f"rank {rank}: the replicas differ: {name!r} has other values on rank(s) "
                f"{', '.join(map(str, different))} than on rank 0; "
                f"something changed it on one rank alone (an unsynchronised step, a parameter added with random "
                f"values, or a broken memory); sync_parameters() on all ranks gives them rank 0's values"
            )


def _digest(tensor: torch.Tensor) -> int:
    local = local_tensor(tensor.detach()).resolve_conj().resolve_neg().cpu().contiguous()
    return zlib.crc32(local.reshape(-1).view(torch.uint8).numpy().tobytes())


def check_parameters(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Raise for parameters that cannot be synchronised at all.

    Raises:
        RuntimeError: a parameter is not initialised yet, or several of its elements share one memory cell.
    """
    for name, parameter in named:
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise RuntimeError(
                f"parameter {name!r} is lazy: modules with uninitialized parameters can't be used with "
                f"DistributedDataParallel; run a dummy forward pass to initialise the module first"
            )
        local = local_tensor(parameter)
        if any(size > 1 and stride == 0 for size, stride in zip(local.shape, local.stride(), strict=True)):
            raise RuntimeError(
                f"parameter {name!r} is an expanded tensor: several of its elements share one memory location, so no "
                f"rank could receive another's values; clone it before making it a parameter"
            )
