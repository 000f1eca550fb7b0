"""Fully sharded data parallelism: torch's ``fully_shard`` over the data axis, block by block.

Gradients are summed over the ranks and not divided: what a loss stands for is divided out where it is taken. The sum
is asked for as such, since not every backend can take a mean.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard


def shard_parameters(module: nn.Module, units: list[nn.Module], mesh: DeviceMesh) -> None:
    """Shard a module in place, over a mesh of one axis; collective. ``units`` are gathered one at a time."""
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    # The root as well: parameters are shards whenever no forward or backward runs.
    fully_shard(module, mesh=mesh, reshard_after_forward=True)
    # It warns of changing a view that a forward returns (the logits, of a cut head) in place, and nobody does.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
    for part in _sharded(module):
        part.set_force_sum_reduction_for_comms(True)
        part.set_gradient_divide_factor(1.0)


@contextmanager
def without_reduction(module: nn.Module) -> Iterator[None]:
    """Have backward accumulate whole gradients on each rank; the next one outside reduces them."""
    assert isinstance(module, FSDPModule)
    module.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        module.set_requires_gradient_sync(True)


def _sharded(module: nn.Module) -> Iterator[FSDPModule]:
    return (part for part in module.modules() if isinstance(part, FSDPModule))
