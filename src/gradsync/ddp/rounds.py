"""Collectives that only some passes need: for parameters that are new, and for sparse gradients.

All ranks know from the control words that such a round is due, so all of them run it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from gradsync.comm.groups import Group
from gradsync.comm.waits import wait_for
from gradsync.ddp.bucket import Bucket, local_tensor
from gradsync.ddp.control import ControlWords
from gradsync.ddp.plan import default_caps, make_plan, parameter_spec
from gradsync.ddp.reduced import mark_reduced
from gradsync.ddp.replicas import verify

if TYPE_CHECKING:
    from gradsync.ddp.reducer import Reducer

_NONE, _SPARSE, _DENSE = 0, 1, 2


def reduce_newcomers(
    reducer: "Reducer", newcomers: Sequence[tuple[str, nn.Parameter]], words: ControlWords
) -> dict[int, torch.Tensor]:
    """Reduce the gradients of the parameters that the plan of this pass did not know yet, or not in their present form.

    Returns the reduced gradients by the parameter's id.

    Raises:
        ContractError: on all ranks, if a new parameter does not have the same values everywhere.
    """
    results: dict[int, torch.Tensor] = {}
    if not newcomers:
        return results
    verify(reducer.control_group, newcomers, reducer.rank, torch.device("cpu"))
    parameters = [p for _, p in newcomers]
    has_grad = torch.tensor([float(p.grad is not None) for p in parameters], dtype=torch.float32, device="cpu")
    wait_for(reducer.control_group, reducer.control_group.allreduce([has_grad]))
    specs = [parameter_spec(name, local_tensor(p)) for name, p in newcomers]
    plan = make_plan(specs, range(len(specs)), reducer.settings.caps_bytes or default_caps(specs))
    for number, bucket_plan in enumerate(plan.buckets, start=len(reducer.buckets)):
        bucket = Bucket(number, bucket_plan, specs, [parameters[i] for i in bucket_plan.indices])
        bucket.collect(bytearray(b"\1" * len(specs)), reducer.contribution_scale)
        reducer.reduce_extra(bucket, [specs[i].name for i in bucket_plan.indices])
        bucket.buffer.gradients.mul_(reducer.late_factor(words))
        _add_carried(reducer, bucket, has_grad)
        bucket.write_back([bool(has_grad[i] > 0) for i in bucket_plan.indices])
        results.update((id(p), view) for p, view in bucket.results())
    return results


def _add_carried(reducer: "Reducer", bucket: Bucket, has_grad: torch.Tensor) -> None:
    """Put sums of earlier passes, which all ranks have alike, back under what was added to them in this one."""
    for index, parameter in zip(bucket.plan.indices, bucket.parameters, strict=True):
        carried = reducer.carried.take(parameter)
        if carried is not None and has_grad[index] > 0:
            bucket.view_of(index).add_(local_tensor(carried))
        elif carried is not None:
            bucket.keep(index, carried.to_dense() if carried.is_sparse else carried)


def reduce_sparse(reducer: "Reducer", words: ControlWords) -> None:
    """Reduce the gradients of the parameters whose module declares them sparse.

    A gradient that is dense on some rank (its table is used by a dense layer too) is dense on all. A communication
    hook is not asked: it knows flat buffers only.
    """
    used = [i for i in reducer.plan.sparse if words.used[i] > 0]
    for index in set(reducer.plan.sparse).difference(used):
        untouched = reducer.carried.take(reducer.parameters[index])
        if untouched is not None:
            reducer.parameters[index].grad = untouched
    factor = reducer.mean_scale * reducer.late_factor(words)
    for index in used:
        parameter = reducer.parameters[index]
        grad = parameter.grad
        if grad is not None and grad.is_sparse:
            grad = grad.coalesce()
        kinds, lengths = _exchange_kinds(reducer.control_group, grad)
        if _DENSE in kinds:
            parameter.grad = _reduce_dense(reducer.group, parameter, grad, factor)
        else:
            parameter.grad = _gather_sparse(reducer.group, parameter, grad, lengths, factor)
        carried = reducer.carried.take(parameter)
        if carried is not None:
            # a dense one comes first: torch adds nothing dense to a sparse tensor
            pair = (parameter.grad, carried) if carried.is_sparse else (carried, parameter.grad)
            parameter.grad = pair[0] + pair[1]
        mark_reduced([parameter.grad])


def _exchange_kinds(group: Group, grad: torch.Tensor | None) -> tuple[list[int], list[int]]:
    kind = _NONE if grad is None else _SPARSE if grad.is_sparse else _DENSE
    length = grad._nnz() if grad is not None and grad.is_sparse else 0
    own = torch.tensor([kind, length], dtype=torch.int64, device="cpu")
    everyone = [torch.zeros_like(own) for _ in range(group.size())]
    wait_for(group, group.allgather([everyone], [own]))
    return [int(e[0]) for e in everyone], [int(e[1]) for e in everyone]


def _reduce_dense(group: Group, parameter: torch.Tensor, grad: torch.Tensor | None, factor: float) -> torch.Tensor:
    dense = torch.zeros_like(parameter) if grad is None else (grad.to_dense() if grad.is_sparse else grad.clone())
    dense.mul_(factor)
    wait_for(group, group.allreduce([dense]))
    return dense


def _gather_sparse(
    group: Group, parameter: torch.Tensor, grad: torch.Tensor | None, lengths: Sequence[int], factor: float
) -> torch.Tensor:
    """Concatenate all ranks' rows; a row that several ranks have is summed by ``coalesce``."""
    longest = max(lengths)
    row_shape = parameter.shape[1:]
    indices = torch.zeros(longest, dtype=torch.int64, device=parameter.device)
    values = torch.zeros(longest, *row_shape, dtype=parameter.dtype, device=parameter.device)
    if grad is not None and longest:
        indices[: grad._nnz()] = grad.indices()[0]
        values[: grad._nnz()] = grad.values() * factor
    all_indices = [torch.zeros_like(indices) for _ in lengths]
    all_values = [torch.zeros_like(values) for _ in lengths]
    if longest:
        wait_for(group, group.allgather([all_indices], [indices]))
        wait_for(group, group.allgather([all_values], [values]))
    rows = torch.cat([part[:n] for part, n in zip(all_indices, lengths, strict=True)])
    entries = torch.cat([part[:n] for part, n in zip(all_values, lengths, strict=True)])
    return torch.sparse_coo_tensor(rows.unsqueeze(0), entries, parameter.shape, check_invariants=False).coalesce()
