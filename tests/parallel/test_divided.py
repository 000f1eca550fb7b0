"""One process and every division of the model compute the same: gradients, norms, losses to evaluate, logits."""

import pytest
import torch
import torch.distributed as dist
from divided_jobs import (
    CONTEXT,
    SEQUENCES,
    Layout,
    divided,
    gathered,
    make_model,
    own_micro_batches,
    tokens,
    train,
    train_alone,
)

from gradsync.parallel.degrees import Degrees
from gradsync.parallel.pieces import Pieces
from gradsync.parallel.stage import split_blocks

LAYOUTS = {
    "ddp": Layout(Degrees(2)),
    "fsdp": Layout(Degrees(2), "fsdp"),
    "fsdp, checkpointing": Layout(Degrees(2), "fsdp", checkpointing=True),
    "tensor": Layout(Degrees(1, 2)),
    "tensor, checkpointing": Layout(Degrees(1, 2), checkpointing=True),
    "gpipe": Layout(Degrees(1, 1, 2), schedule="gpipe", micro_batches=1),
    "1f1b": Layout(Degrees(1, 1, 2), micro_batches=4, checkpointing=True),
    "interleaved": Layout(Degrees(1, 1, 2), schedule="interleaved", layers=4),
    "tensor on 3": Layout(Degrees(1, 3)),
    "pipeline on 3": Layout(Degrees(1, 1, 3), micro_batches=4, layers=4),
    "fsdp on 3": Layout(Degrees(3), "fsdp"),
    "ddp x tensor": Layout(Degrees(2, 2)),
    "ddp x pipeline": Layout(Degrees(2, 1, 2)),
    "fsdp x tensor": Layout(Degrees(2, 2), "fsdp"),
    "fsdp x pipeline": Layout(Degrees(2, 1, 2), "fsdp"),
    "tensor x pipeline": Layout(Degrees(1, 2, 2)),
    "sequence": Layout(Degrees(1, 2), cuts_sequences=True),
    "sequence, checkpointing": Layout(Degrees(1, 2), cuts_sequences=True, checkpointing=True),
    "ddp x sequence": Layout(Degrees(2, 2), cuts_sequences=True),
    "fsdp x sequence": Layout(Degrees(2, 2), "fsdp", cuts_sequences=True),
    "sequence x pipeline": Layout(Degrees(1, 2, 2), cuts_sequences=True),
}
FROZEN = ("h.1.mlp.c_fc.weight", "h.0.ln_1.weight", "wte.weight")


def _compare(rank, world, layout):
    model, expected = train_alone(layout)
    start = dict(divided_start(layout))
    replica = divided(layout)
    found = train(layout, replica)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-5, atol=1e-6)
    parameters = dict(model.named_parameters())
    got = gathered(replica)
    assert got.keys() == parameters.keys()
    for name, parameter in parameters.items():
        torch.testing.assert_close(
            got[name], parameter.detach(), rtol=1e-4, atol=1e-6, msg=lambda t, n=name: f"{n}: {t}"
        )
        if layout.frozen and name.endswith(layout.frozen):
            assert torch.equal(got[name], start[name]), name
    _evaluate(layout, replica, model)


def divided_start(layout):
    return [(name, parameter.detach().clone()) for name, parameter in make_model(layout).named_parameters()]


def _evaluate(layout, replica, model):
    replica.eval()
    with torch.no_grad():
        total = torch.zeros(())
        for inputs, targets in own_micro_batches(layout, replica, 0):
            total += replica.summed_loss(inputs, targets)
        dist.all_reduce(total)
        batch = tokens(layout, 0)
        torch.testing.assert_close(total, model(batch[:, :-1], batch[:, 1:], reduction="sum")[1], rtol=1e-5, atol=1e-5)
        some = batch[:2, : CONTEXT - 3]
        torch.testing.assert_close(replica(some)[0], model(some)[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(replica.next_token_logits(some), model.next_token_logits(some), rtol=1e-4, atol=1e-5)
    replica.train()


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_few_steps_are_those_of_one_process(request, name):
    layout = LAYOUTS[name]
    pool = request.getfixturevalue({2: "ranks", 3: "ranks3", 4: "ranks4"}[layout.degrees.world])
    pool(_compare, layout, timeout_s=150)


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_frozen_stays_frozen(request, name):
    layout = Layout(**{**vars(LAYOUTS[name]), "frozen": FROZEN})
    pool = request.getfixturevalue({2: "ranks", 3: "ranks3", 4: "ranks4"}[layout.degrees.world])
    pool(_compare, layout, timeout_s=150)


def test_blocks_are_divided_as_equally_as_can_be():
    assert split_blocks(5, 2) == [range(3), range(3, 5)]
    assert [len(part) for part in split_blocks(10, 4)] == [3, 3, 2, 2]


def _norm(rank, world, layout, poisoned):
    """A gradient that is not finite on one rank is seen by all, and the norm counts every parameter once."""
    replica = divided(layout)
    for held in replica.held.values():
        held.tensor.grad = torch.ones_like(held.tensor)
    whole = sum(torch.Size(held.cut.shape).numel() for held in replica_of_all(layout))
    expected = whole**0.5
    if poisoned:
        local = next(iter(replica.held.values())).tensor.grad
        if rank == 0:
            (local.to_local() if hasattr(local, "to_local") else local).view(-1)[0] = float("inf")
        expected = float("inf")
    return replica.clip_gradients(float("inf")), expected


def replica_of_all(layout):
    from gradsync.parallel.held import held_whole

    return held_whole(make_model(layout)).values()


@pytest.mark.parametrize("poisoned", [False, True])
@pytest.mark.parametrize(
    "name", ["ddp x tensor", "fsdp x tensor", "tensor x pipeline", "ddp x sequence", "fsdp x sequence"]
)
def test_the_norm_counts_each_element_once(ranks4, name, poisoned):
    found = ranks4(_norm, LAYOUTS[name], poisoned)
    assert len({norm for norm, _ in found}) == 1
    norm, expected = found[0]
    assert norm == pytest.approx(expected)


def _gradients_of_norms(rank, world, layout):
    """Each rank's own numbers, before anything clips, gathers or averages them."""
    model = make_model(layout)
    batch = tokens(layout, 0)
    model(batch[:, :-1], batch[:, 1:])[1].backward()
    replica = divided(layout)
    replica.forward_backward(own_micro_batches(layout, replica, 0), batch[:, 1:].numel(), lambda loss: None)
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if ".ln_" in name}
    found = {name: held for name, held in replica.held.items() if name in expected}
    for name, held in found.items():
        pieces = held.cut.of(held.tensor.grad)
        parts = pieces.parts if isinstance(pieces, Pieces) else [((0,), pieces)]
        for (start,), part in parts:
            whole = expected[name][start : start + len(part)]
            torch.testing.assert_close(part, whole, rtol=1e-4, atol=1e-7, msg=lambda text, n=name: f"{n}: {text}")
    return len(found)


@pytest.mark.parametrize("name", ["sequence", "ddp x sequence", "fsdp x sequence", "sequence x pipeline"])
def test_gradients_of_norms_are_summed_once_over_the_slices(request, name):
    layout = LAYOUTS[name]
    pool = request.getfixturevalue({2: "ranks", 4: "ranks4"}[layout.degrees.world])
    assert min(pool(_gradients_of_norms, layout)) >= 4


def _hidden_states(rank, world, layout):
    """The shape of what a block gives and of what its norm does."""
    replica = divided(layout)
    block = replica.modules()[0].blocks[0]
    seen = {}
    block.register_forward_hook(lambda _, inputs, output: seen.update(block=output))
    block.ln_2.register_forward_hook(lambda _, inputs, output: seen.update(norm=output.to_local()))
    replica.forward_backward(own_micro_batches(layout, replica, 0), 1, lambda loss: None)
    return tuple(seen["block"].shape), tuple(seen["norm"].shape)


def test_a_rank_has_its_slice_of_the_sequences_between_matrices(ranks):
    shape = (SEQUENCES // 2, CONTEXT // 2, 24)
    assert ranks(_hidden_states, LAYOUTS["sequence"]) == [(shape, shape)] * 2
