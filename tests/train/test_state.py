"""What a checkpoint holds: names of the bare model whatever wraps it, optimizer and random state put back."""

import pytest
import torch
from torch import nn

from gradsync.errors import CheckpointError
from gradsync.parallel.held import bare_name
from gradsync.train.state import Standing, TrainingState, match_names, model_tensors, state_of


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))


def make_state(seed: int = 0) -> TrainingState:
    torch.manual_seed(seed)
    model = make_model()
    return state_of(model, torch.optim.AdamW(model.parameters(), lr=0.1), torch.device("cpu"))


def train(state: TrainingState, steps: int) -> None:
    model = make_model()
    for name in list(dict(model.named_parameters())):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, state.held[name].tensor)
    for _ in range(steps):
        model(torch.ones(2, 3)).square().sum().backward()
        state.optimizer.step()
        state.optimizer.zero_grad()


def snapshot(state: TrainingState) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in state.tensors().items()}


def load_from(stored):
    def load(tensors):
        for name, tensor in tensors.items():
            tensor.copy_(stored[name])

    return load


def restore(state, stored):
    state.restore({name: tuple(tensor.shape) for name, tensor in stored.items()}, load_from(stored))


def test_a_restored_state_goes_on_as_the_one_that_was_saved():
    straight, resumed = make_state(0), make_state(1)
    train(straight, 3)
    stored = snapshot(straight)
    train(straight, 3)
    restore(resumed, stored)
    train(resumed, 3)
    expected, got = straight.tensors(), resumed.tensors()
    assert expected.keys() == got.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


def test_a_state_before_the_first_step_has_no_moments_and_loads():
    stored = snapshot(make_state(0))
    assert not any(name.startswith("optimizer.") for name in stored)
    fresh = make_state(1)
    restore(fresh, stored)
    train(fresh, 1)


def test_a_new_rank_keeps_its_own_random_state():
    stored = snapshot(make_state(0))
    fresh = make_state(1)
    torch.manual_seed(123)
    before = torch.get_rng_state()
    late = TrainingState(fresh.held, fresh.optimizer, Standing(data_rank=7, data_world=8), torch.device("cpu"))
    restore(late, stored)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_any_mix_of_wrapper_prefixes_is_understood(prefix):
    assert bare_name(f"{prefix}h.0._orig_mod.attn.weight") == "h.0.attn.weight"
    tensors = {"model.a": torch.zeros(1)}
    assert list(match_names(tensors, [f"model.{prefix}a"])) == [f"model.{prefix}a"]


def test_tied_weights_are_held_once():
    model = nn.ModuleDict({"head": nn.Linear(2, 2, bias=False), "table": nn.Embedding(2, 2)})
    model["head"].weight = model["table"].weight
    assert list(model_tensors(model)) == ["model.head.weight"]


def test_a_file_of_another_model_is_refused():
    tensors = {"model.a": torch.zeros(1), "model.b": torch.zeros(1)}
    with pytest.raises(CheckpointError, match="none of the model's 2 tensors"):
        match_names(tensors, ["model.x"])
    with pytest.raises(CheckpointError, match=r"1 of the model's 2 tensors .* first is model\.b"):
        match_names(tensors, ["model.a"])
