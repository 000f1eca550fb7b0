"""The state of a sharded optimizer: complete, by name, loaded at other numbers of ranks and by plain optimizers."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from reference import Branches, assert_equal_replicas, assert_near, batch, digest, plain, raised, sq
from sharded_pair import ADAMW, MOMENTUM, Uneven, assert_alike, in_two_groups, pair
from torch import nn

from gradsync import plain_optimizer_state
from rank_pool import RankPool


def _save(rank: int, world: int, path: Path, steps: int) -> None:
    ddp, sharded, _ = pair(world, Uneven, groups=in_two_groups)
    for step in range(steps):
        _step_on_fixed_gradients(ddp, rank, step)
        sharded.step()
        sharded.zero_grad()
    state = sharded.state_dict(to=0)
    assert bool(state["state"]) == (rank == 0)
    if rank == 0:
        torch.save({"model": ddp.module.state_dict(), "optimizer": state}, path)
    dist.barrier()


def _step_on_fixed_gradients(model: nn.Module, rank: int, step: int) -> None:
    """The same batch on every rank, so that the number of ranks does not matter."""
    sq(model(batch(0, step))).backward()


def _resume(rank: int, world: int, path: Path, start: int, steps: int, is_late: bool) -> str:
    saved = torch.load(path, weights_only=True)
    ddp, sharded, reference = pair(world, Uneven, groups=in_two_groups)
    if is_late:  # the buckets have been planned anew by then
        _step_on_fixed_gradients(ddp, rank, 50)
        sharded.step()
        sharded.zero_grad()
    ddp.module.load_state_dict(saved["model"])
    sharded.load_state_dict(saved["optimizer"])
    for step in range(start + steps):
        _step_on_fixed_gradients(reference.module, rank, step)
        reference.optimizer.step()
        reference.optimizer.zero_grad()
    for step in range(start, start + steps):
        _step_on_fixed_gradients(ddp, rank, step)
        sharded.step()
        sharded.zero_grad()
    assert_alike(ddp, reference, "resumed")
    return digest(ddp.module)


@pytest.mark.parametrize("is_late", [False, True])
def test_state_loads_at_another_number_of_ranks(
    ranks: RankPool, ranks3: RankPool, tmp_path: Path, is_late: bool
) -> None:
    ranks(_save, tmp_path / "two", 3)
    assert_equal_replicas(ranks3(_resume, tmp_path / "two", 3, 3, is_late))
    ranks3(_save, tmp_path / "three", 3)
    assert_equal_replicas(ranks(_resume, tmp_path / "three", 3, 3, is_late))


def test_state_loads_into_a_plain_optimizer(ranks: RankPool, tmp_path: Path) -> None:
    ranks(_save, tmp_path / "two", 3)
    saved = torch.load(tmp_path / "two", weights_only=True)
    resumed, straight = Uneven(), Uneven()
    resumed.load_state_dict(saved["model"])
    # the same groups, in another order
    optimizer = ADAMW[0](list(reversed(in_two_groups(resumed))), **ADAMW[1])
    optimizer.load_state_dict(plain_optimizer_state(saved["optimizer"], optimizer, resumed))
    whole = ADAMW[0](in_two_groups(straight), **ADAMW[1])
    for step in range(6):
        for model, each in ((straight, whole), (resumed, optimizer))[: 1 if step < 3 else 2]:
            _step_on_fixed_gradients(model, 0, step)
            each.step()
            each.zero_grad()
    for (name, p), q in zip(resumed.named_parameters(), straight.parameters(), strict=True):
        assert_near(p, q, name, rtol=1e-4)


def test_state_of_a_plain_optimizer_loads(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(_from_plain))


def _from_plain(rank: int, world: int) -> str:
    ddp, sharded, reference = pair(world, Uneven, MOMENTUM)
    for step in range(2):
        reference.train(plain, step)
    ddp.module.load_state_dict(reference.module.state_dict())
    sharded.load_state_dict(copy.deepcopy(reference.optimizer.state_dict()))
    for step in range(2, 5):
        plain(ddp, rank, step)
        sharded.step()
        sharded.zero_grad()
        reference.train(plain, step)
    assert_alike(ddp, reference, "in the end")
    return digest(ddp.module)


def test_state_of_another_model_is_refused(ranks: RankPool) -> None:
    for texts in ranks(_foreign_states):
        assert "parameter groups of [6] parameters, and the optimizer of [4]" in texts[0]
        assert "are only in one of the two" in texts[1]
        assert "'exp_avg' of shape (1, 2) for 'a.weight', whose shape is (3, 3)" in texts[2]


def _foreign_states(rank: int, world: int) -> list[str]:
    ddp, sharded, _ = pair(world)
    other = torch.optim.AdamW(Branches().parameters(), lr=0.1)
    saved = sharded.state_dict()
    renamed, reshaped = copy.deepcopy(saved), copy.deepcopy(saved)
    renamed["param_groups"][0]["params"][0] = "z.weight"
    reshaped["state"] = {name: {"exp_avg": torch.zeros(1, 2)} for name in saved["param_groups"][0]["params"]}
    # which rank owns a.weight is the layout's affair; one of them finds out
    third = "the other rank: 'exp_avg' of shape (1, 2) for 'a.weight', whose shape is (3, 3)"
    if any(piece.name == "a.weight" for piece in sharded._sharding.pieces):
        third = raised(lambda: sharded.load_state_dict(reshaped))
    return [
        raised(lambda: sharded.load_state_dict(other.state_dict())),
        raised(lambda: sharded.load_state_dict(renamed)),
        third,
    ]


def test_what_was_loaded_stays_as_it_was(ranks: RankPool) -> None:
    ranks(_train_on_what_was_loaded)


def _train_on_what_was_loaded(rank: int, world: int) -> None:
    ddp, sharded, _ = pair(world, optimizer=ADAMW)
    plain(ddp, rank, 0)
    sharded.step()
    saved = sharded.state_dict()
    before = copy.deepcopy(saved)
    sharded.load_state_dict(saved)
    plain(ddp, rank, 1)
    sharded.step()
    for name, values in before["state"].items():
        for key, value in values.items():
            assert torch.equal(saved["state"][name][key], value), f"{name} {key}"
