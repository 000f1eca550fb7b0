"""Parts of torch that look for torch's wrapper: pipelines, checkpoints, ``replicate``; and the replacement of it."""

import copy
import inspect
import pickle

import pytest
import torch
from reference import OneProcess, TwoLayers, assert_same_gradients, batch, digest, in_quarters, plain, whole_numbers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import gradsync
from gradsync import DistributedDataParallel
from rank_pool import RankPool

TorchDDP = nn.parallel.DistributedDataParallel


# ----------------------------------------------------------------- pipelines


class _Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
        in_quarters(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = torch.tanh(stage(x))
        return x


class _Stage(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = torch.tanh(self.layer(x))
        return output


_NUM_MICRO = 3


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def _x(replica: int, step: int) -> torch.Tensor:
    return whole_numbers(2 * _NUM_MICRO, 3, key=(replica, step))


def _pipeline(rank: int, world: int, schedule_name: str) -> None:
    """Two stages, two replicas of each; the reference is one process on the batches of both replicas."""
    from torch.distributed.pipelining import PipelineStage, schedules

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "stage"))
    replica, index = mesh["replica"].get_local_rank(), mesh["stage"].get_local_rank()
    layers = _Layers()
    ddp = DistributedDataParallel(_Stage(layers.stages[index]), process_group=mesh["replica"].get_group())
    stage = PipelineStage(ddp, index, 2, torch.device("cpu"), group=mesh["stage"].get_group())
    schedule = getattr(schedules, schedule_name)(stage, _NUM_MICRO, loss_fn=_loss)
    reference = OneProcess(_Layers(), 2)

    def program(model: nn.Module, replica: int, step: int) -> None:
        _loss(model(_x(replica, step)), _x(replica, step + 100)).backward()

    for step in range(3):
        reference.run(program, step)
        if index == 0:
            schedule.step(_x(replica, step))
        else:
            schedule.step(target=_x(replica, step + 100))
        assert_same_gradients(layers.stages[index], reference.module.stages[index], f"step {step}:")
        ddp.zero_grad()
        reference.module.zero_grad()
    assert len(ddp.reducer.unsynchronized()) == 0


@pytest.mark.parametrize("schedule_name", ["ScheduleGPipe", "Schedule1F1B"])
def test_a_pipeline_of_wrapped_stages(ranks4: RankPool, schedule_name: str) -> None:
    # torch's pipelines warn of their own shape inference
    ranks4(_pipeline, schedule_name, warnings_as_errors=False)


# ----------------------------------------------------------------- checkpoints


def _checkpoint_names(rank: int, world: int) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    ddp = DistributedDataParallel(TwoLayers())
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=0.1)
    plain(ddp, rank, 0)
    optimizer.step()
    model_state, optimizer_state = get_state_dict(ddp, optimizer)
    assert list(model_state) == ["a.weight", "a.bias", "b.weight", "b.bias"]
    assert set(optimizer_state["state"]) == set(model_state)
    other = DistributedDataParallel(in_quarters(TwoLayers(), seed=5))
    others_optimizer = torch.optim.AdamW(other.parameters(), lr=0.2)
    set_state_dict(other, others_optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert digest(other.module) == digest(ddp.module)


def test_names_in_checkpoints(ranks: RankPool) -> None:
    ranks(_checkpoint_names, warnings_as_errors=False)


# ----------------------------------------------------------------- the replacement


class _Mine(TorchDDP):  # a subclass of torch's class, made before anything was replaced
    pass


def _replaced(rank: int, world: int) -> None:
    with gradsync.replace_torch_ddp():
        ddp = TorchDDP(TwoLayers(), bucket_cap_mb=1)
        assert type(ddp) is DistributedDataParallel
        assert isinstance(ddp, nn.parallel.DistributedDataParallel)
        assert type(nn.parallel.DistributedDataParallel(module=TwoLayers())) is DistributedDataParallel
        assert type(DistributedDataParallel(TwoLayers())) is DistributedDataParallel
        assert type(copy.deepcopy(ddp)) is DistributedDataParallel
        assert type(pickle.loads(pickle.dumps(ddp))) is DistributedDataParallel
        assert type(_Mine(TwoLayers())) is _Mine
        reference = OneProcess(TwoLayers(), world)
        plain(ddp, rank, 0)
        reference.run(plain, 0)
        assert_same_gradients(ddp.module, reference.module, exact=True)
    torchs = TorchDDP(TwoLayers())
    assert type(torchs) is TorchDDP
    plain(torchs, rank, 0)
    assert_same_gradients(torchs.module, reference.module, exact=True)
    replacement = gradsync.replace_torch_ddp()
    assert type(TorchDDP(TwoLayers())) is DistributedDataParallel
    assert type(copy.deepcopy(torchs)) is TorchDDP
    replacement.restore()
    assert type(TorchDDP(TwoLayers())) is TorchDDP


def test_replacing_torchs_class(ranks: RankPool) -> None:
    ranks(_replaced)


def test_the_replacement_is_invisible() -> None:
    before = inspect.signature(TorchDDP)
    with gradsync.replace_torch_ddp():
        assert inspect.signature(TorchDDP) == before
    assert inspect.signature(TorchDDP) == before


def _composable(rank: int, world: int) -> None:
    """torch's ``replicate`` makes a wrapper around the parameters alone and drives it with hooks."""
    from torch.distributed._composable.replicate import replicate

    with gradsync.replace_torch_ddp():
        module = replicate(TwoLayers(), bucket_cap_mb=1e-6)
        reference = OneProcess(TwoLayers(), world)
        for step in range(3):
            plain(module, rank, step)
            reference.run(plain, step)
            assert_same_gradients(module, reference.module, f"step {step}:", exact=True)
            module.zero_grad()
            reference.module.zero_grad()
        assert type(replicate.state(module)._ddp) is DistributedDataParallel
        module.set_requires_gradient_sync(False)
        module(batch(rank, 0)).sum().backward()
        local = TwoLayers()
        local(batch(rank, 0)).sum().backward()
        assert_same_gradients(module, local, exact=True)
    assert TorchDDP._get_active_ddp_module() is None


def test_replicate(ranks: RankPool) -> None:
    ranks(_composable, warnings_as_errors=False)
