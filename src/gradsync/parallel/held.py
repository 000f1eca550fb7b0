"""What a rank holds of a model: each parameter, where it lies in the whole one, and who counts it in a norm."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gradsync.model.layout import Layout
from gradsync.parallel.mesh import Mesh
from gradsync.parallel.pieces import Cut, chunk_of, cut_rectangle, local_part
from gradsync.parallel.tensor import tensor_dim

_WRAPPERS = ("module", "_orig_mod")


@dataclass(frozen=True)
class Held:
    """A parameter or buffer on this rank; of all ranks that hold the same part of it, one counts it."""

    tensor: Tensor
    cut: Cut
    is_counted: bool = True


def held_whole(module: nn.Module) -> dict[str, Held]:
    """Return what a module holds, by bare name, tied parameters once; all of it is here."""
    return {name: Held(tensor, Cut(tuple(tensor.shape))) for name, tensor in named_tensors(module).items()}


def tensor_dims(module: nn.Module) -> dict[str, int | None]:
    """Return along which dimension each parameter is cut; to be taken after the tensors, before FSDP."""
    return {name: tensor_dim(tensor) for name, tensor in named_tensors(module).items()}


def held_in_mesh(
    module: nn.Module, dims: dict[str, int | None], layout: Layout, mesh: Mesh, is_fully_sharded: bool
) -> dict[str, Held]:
    """Return what a module, or a stage of one, holds by bare name of the whole model."""
    held = {}
    tied_name, name_of_tied = layout.tied
    for name, tensor in named_tensors(module).items():
        is_sharded = is_fully_sharded and isinstance(tensor, DTensor)  # buffers are not
        cut = _cut(name, tensor, dims[name], layout, mesh, is_sharded)
        is_copy = name == tied_name  # its other end has the embedding
        is_first = dims[name] is not None or mesh.tensor_rank == 0
        is_first_replica = is_sharded or mesh.data_rank == 0
        held[name_of_tied if is_copy else name] = Held(tensor, cut, is_first and is_first_replica and not is_copy)
    return held


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by bare name, tied ones once."""
    seen: set[int] = set()
    tensors = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[bare_name(name)] = tensor
    return tensors


def bare_name(name: str) -> str:
    """Return a parameter's name without what data parallelism and compilation put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


@torch.no_grad()
def clip_global_norm(held: Iterable[Held], limit: float, device: torch.device) -> float:
    """Scale the gradients so that their norm is at most ``limit``, and return the norm before; all ranks together.

    Every element is counted by one rank of the world, and all read the same sum: so the norm does not depend on how
    tensors are cut, and replicas scale by exactly the same number.
    """
    held = list(held)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for each in held:
        if each.is_counted and each.tensor.grad is not None:
            total += torch.linalg.vector_norm(_local_gradient(each.tensor), dtype=torch.float64).square()
    dist.all_reduce(total)
    norm = math.sqrt(float(total)) if float(total) >= 0 else math.nan  # a NaN is no number to take a root of
    factor = limit / (norm + 1e-6)
    if not factor >= 1.0:
        for each in held:
            if each.tensor.grad is not None:
                _local_gradient(each.tensor).mul_(factor)
    return norm


def local_shape(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of what this rank holds."""
    return tuple(local_part(tensor).shape)


def _local_gradient(parameter: Tensor) -> Tensor:
    grad = parameter.grad
    assert grad is not None
    if not isinstance(grad, DTensor):
        return grad
    assert not any(placement.is_partial() for placement in grad.placements), "a sum over ranks is still to be taken"
    return grad.to_local()


def _cut(name: str, tensor: Tensor, dim: int | None, layout: Layout, mesh: Mesh, is_sharded: bool) -> Cut:
    shape = tuple(tensor.shape)
    tp = mesh.degrees.tensor
    held: dict[int, range] = {}
    if dim is not None:
        held[dim] = chunk_of(shape[dim], tp, mesh.tensor_rank)
    if is_sharded:
        rows = held.get(0, range(shape[0]))
        part = chunk_of(len(rows), mesh.degrees.data, mesh.data_rank)
        held[0] = rows[part.start : part.stop]
    stacked = next((count for suffix, count in layout.columns.items() if f".{suffix}." in name), 1)
    return cut_rectangle(shape, held, stacked if tp > 1 else 1, tp)
