"""Which ranks hold the replicas: groups, meshes, and groups that are surely a mistake."""

import torch
import torch.distributed as dist
from reference import (
    OneProcess,
    TwoLayers,
    assert_equal_replicas,
    assert_same_gradients,
    bare_linear,
    digest,
    ones_row,
    plain,
    raised,
)
from torch.distributed.device_mesh import init_device_mesh

from gradsync import DistributedDataParallel
from rank_pool import RankPool


def _alone_in_a_group(rank: int, world: int) -> float:
    groups = [dist.new_group([r]) for r in range(world)]
    ddp = DistributedDataParallel(bare_linear(), process_group=groups[rank])
    ddp(ones_row(rank)).sum().backward()
    return ddp.module.weight.grad[0, 0].item()


def test_a_group_of_one_in_a_larger_world_warns(ranks: RankPool) -> None:
    replies = ranks.run_with_warnings(_alone_in_a_group)
    assert [entry for entry, _ in replies] == [1.0, 2.0]
    for rank, (_, warned) in enumerate(replies):
        (text,) = warned
        assert "group" in text
        assert f"rank {rank}" in text


def _in_pairs(rank: int, world: int) -> float:
    """Ranks 0, 2 and ranks 1, 3 hold a model each; groups are made in another order than they are used."""
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    ddp = DistributedDataParallel(bare_linear(), process_group=groups[rank % 2])
    for _ in range(3):
        ddp.zero_grad()
        ddp(ones_row(rank)).sum().backward()
    return ddp.module.weight.grad[0, 0].item()


def test_two_models_on_halves_of_the_world(ranks4: RankPool) -> None:
    assert ranks4(_in_pairs) == [2.0, 3.0, 2.0, 3.0]


def _no_member(rank: int, world: int) -> str:
    group = dist.new_group([0, 1])
    if rank < 2:
        DistributedDataParallel(bare_linear(), process_group=group)
        return ""
    return raised(lambda: DistributedDataParallel(bare_linear(), process_group=group))


def test_a_rank_outside_the_group_is_told(ranks3: RankPool) -> None:
    *inside, outside = ranks3(_no_member)
    assert inside == ["", ""]
    assert outside.startswith("ValueError")
    assert "rank 2" in outside


def _on_a_mesh(rank: int, world: int) -> str:
    mesh = init_device_mesh("cpu", (world,))
    ddp = DistributedDataParallel(TwoLayers(), device_mesh=mesh)
    reference = OneProcess(TwoLayers(), world)
    plain(ddp, rank, 0)
    reference.run(plain, 0)
    assert_same_gradients(ddp.module, reference.module, exact=True)
    return digest(ddp.module)


def test_a_device_mesh_in_place_of_a_group(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(_on_a_mesh))


def _mesh_and_group(rank: int, world: int) -> list[str]:
    mesh = init_device_mesh("cpu", (world,))
    square = init_device_mesh("cpu", (1, world))
    return [
        raised(lambda: DistributedDataParallel(TwoLayers(), device_mesh=mesh, process_group=dist.group.WORLD)),
        raised(lambda: DistributedDataParallel(TwoLayers(), device_mesh=square)),
    ]


def test_meshes_that_cannot_be_used(ranks: RankPool) -> None:
    for both, two_axes in ranks(_mesh_and_group):
        assert "Cannot specify both" in both
        assert "Only 1D device mesh" in two_axes


def _many_wrappers(rank: int, world: int) -> int:
    """Wrapping again and again reuses connections in place of making new ones."""
    for _ in range(3):
        ddp = DistributedDataParallel(TwoLayers())
        plain(ddp, rank, 0)
        del ddp
    before = len(dist.distributed_c10d._world.pg_map)
    for _ in range(5):
        ddp = DistributedDataParallel(TwoLayers())
        plain(ddp, rank, 0)
        del ddp
    return len(dist.distributed_c10d._world.pg_map) - before


def test_groups_are_reused(ranks: RankPool) -> None:
    assert ranks(_many_wrappers) == [0, 0]


def _differing_states_of_the_world(rank: int, world: int) -> torch.Tensor:
    """One rank has made more wrappers than the other when both wrap over all ranks."""
    if rank == 1:
        mine = dist.new_group([1], use_local_synchronization=True)
        DistributedDataParallel(bare_linear(), process_group=mine)
    ddp = DistributedDataParallel(bare_linear())
    ddp(ones_row(rank)).sum().backward()
    return ddp.module.weight.grad


def test_ranks_with_other_histories_agree(ranks: RankPool) -> None:
    for grad, _ in ranks.run_with_warnings(_differing_states_of_the_world):
        assert torch.equal(grad, torch.full((2, 2), 1.5))
