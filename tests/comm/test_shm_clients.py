"""Programs of torch itself on top of the shm backend: DDP and its hooks, FSDP2, tensor and pipeline parallel.

What is compared with is the same program on gloo, or one process.
"""

import copy
import functools
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from shm_jobs import assert_close, averaged, make_model, new_group, shm_group, train
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from rank_pool import RankPool


def torch_ddp(rank: int, world: int) -> None:
    with shm_group() as group:
        for arguments in (
            {},
            {"bucket_cap_mb": 1e-4},
            {"gradient_as_bucket_view": True},
            {"static_graph": True},
        ):
            model = TorchDDP(make_model(), process_group=group, **arguments)
            assert_close(train(model, rank), averaged(world))
        with_buffers = TorchDDP(nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 2)), process_group=group)
        train(with_buffers, rank)


def test_torch_ddp(ranks: RankPool, ranks3: RankPool) -> None:
    ranks(torch_ddp)
    ranks3(torch_ddp)


def torch_ddp_hooks(rank: int, world: int) -> None:
    with shm_group() as group:
        for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
            model = TorchDDP(make_model(), process_group=group, bucket_cap_mb=1e-4)
            model.register_comm_hook(group, hook)
            wanted = averaged(world)
            for one, other in zip(train(model, rank), wanted, strict=True):
                torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)
        model = TorchDDP(make_model(64), process_group=group)
        state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2, matrix_approximation_rank=2)
        # Its callbacks issue operations and wait for them. (With several buckets the order of these is left
        # to chance, on every backend but NCCL.)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        assert_equal_on_all_ranks(train(model, rank, steps=5), group)


def assert_equal_on_all_ranks(tensors: list[torch.Tensor], group: Any) -> None:
    for tensor in tensors:
        first = tensor.clone()
        dist.broadcast(first, 0, group)
        assert torch.equal(first, tensor)


def test_torch_ddp_with_communication_hooks(ranks: RankPool) -> None:
    ranks(torch_ddp_hooks)


@functools.cache
def shm_mesh() -> DeviceMesh:
    # Kept for all tests in these ranks: torch's tensor layouts are cached by mesh and outlive the group.
    return DeviceMesh.from_group(new_group(), "cpu")


def fsdp2(rank: int, world: int) -> None:
    for reshard in (True, False):
        model = make_model()
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=shm_mesh(), reshard_after_forward=reshard)
        fully_shard(model, mesh=shm_mesh(), reshard_after_forward=reshard)
        train(model, rank)
        full = [parameter.full_tensor() for parameter in model.parameters()]  # type: ignore[attr-defined]
        assert_close([each.detach() for each in full], averaged(world))


def test_fsdp2(ranks: RankPool, ranks3: RankPool) -> None:
    ranks(fsdp2)
    ranks3(fsdp2)


def tensor_parallel(rank: int, world: int) -> None:
    model, reference = make_model(), make_model()
    parallelize_module(model, shm_mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(model, 0)
    train(reference, 0)
    full = [
        parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter for parameter in model.parameters()
    ]
    assert_close([each.detach() for each in full], [each.detach() for each in reference.parameters()])


def test_tensor_parallel(ranks: RankPool, ranks4: RankPool) -> None:
    ranks(tensor_parallel)
    ranks4(tensor_parallel)


def pipeline(rank: int, world: int) -> None:
    with shm_group() as group:
        torch.manual_seed(0)
        layers = [nn.Linear(8, 8) for _ in range(world)]
        reference = nn.Sequential(*copy.deepcopy(layers))
        stage = PipelineStage(layers[rank], rank, world, torch.device("cpu"), group=group)
        schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        inputs, targets = torch.randn(8, 8), torch.randn(8, 8)
        losses: list[torch.Tensor] = []
        arguments = (inputs,) if rank == 0 else ()
        if rank == world - 1:
            schedule.step(*arguments, target=targets, losses=losses)
        else:
            schedule.step(*arguments)
        for part, target in zip(inputs.chunk(4), targets.chunk(4), strict=True):
            (nn.functional.mse_loss(reference(part), target) / 4).backward()
        wanted = reference[rank].weight.grad
        torch.testing.assert_close(layers[rank].weight.grad, wanted, rtol=1e-5, atol=1e-6)


def test_pipeline_parallel(ranks: RankPool, ranks3: RankPool) -> None:
    ranks(pipeline, warnings_as_errors=False)
    ranks3(pipeline, warnings_as_errors=False)


def functional_collectives(rank: int, world: int) -> None:
    with shm_group() as group:
        one = torch.full((world, 3), rank + 1.0)
        total = world * (world + 1) / 2
        assert collectives.all_reduce(one, "sum", group).eq(total).all()
        gathered = collectives.all_gather_tensor(one[:1], 0, group)
        assert torch.equal(gathered[:, 0], torch.arange(1.0, world + 1))
        assert collectives.reduce_scatter_tensor(one, "sum", 0, group).eq(total).all()
        assert collectives.broadcast(one, 1, group).eq(2).all()
        exchanged = collectives.all_to_all_single(one, None, None, group)
        assert torch.equal(exchanged[:, 0], torch.arange(1.0, world + 1))
        many = collectives.all_reduce_coalesced([one, one[0]], "avg", group)
        assert all(each.eq(total / world).all() for each in many)
        parts = collectives.reduce_scatter_tensor_coalesced([one, one], "sum", [0, 0], group)
        assert all(each.eq(total).all() for each in parts)
        wholes = collectives.all_gather_into_tensor_coalesced([one[:1], one[:1]], group)
        assert all(torch.equal(each[:, 0], torch.arange(1.0, world + 1)) for each in wholes)


def test_functional_collectives(ranks: RankPool, ranks4: RankPool) -> None:
    ranks(functional_collectives, warnings_as_errors=False)
    ranks4(functional_collectives, warnings_as_errors=False)


def device_mesh(rank: int, world: int) -> None:
    with shm_group() as group:
        assert dist.get_backend(group) == "shm"
        assert dist.get_world_size(group) == world and dist.get_rank(group) == rank
        assert dist.get_process_group_ranks(group) == list(range(world))
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"), backend_override={"a": "shm", "b": "shm"})
    for name in ("a", "b"):
        part = mesh[name].get_group()
        assert dist.get_backend(part) == "shm"
        tensor = torch.tensor([float(rank)])
        dist.all_reduce(tensor, group=part)
        assert tensor.item() == sum(dist.get_process_group_ranks(part))
        dist.destroy_process_group(part)


def test_device_mesh(ranks4: RankPool) -> None:
    ranks4(device_mesh)
