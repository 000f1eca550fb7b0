"""Programs that run forward or backward in less common ways: each must train like one process."""

import copy
import threading
from typing import Any

import pytest
import torch
from reference import (
    Branches,
    OneProcess,
    TwoHeads,
    TwoLayers,
    assert_equal_replicas,
    assert_near,
    assert_same_gradients,
    assert_same_state,
    batch,
    digest,
    impatient_group,
    in_quarters,
    is_wrapped,
    plain,
    sgd,
    sq,
    train_alike,
    unwrapped,
)
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from gradsync import DistributedDataParallel
from rank_pool import RankFailure, RankPool


def _in_a_thread(model: nn.Module, rank: int, step: int) -> None:
    loss = sq(model(batch(rank, step)))
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


def _by_hand(model: nn.Module, rank: int, step: int) -> None:
    """The user carries the gradient over a cut in the graph."""
    output = model(batch(rank, step))
    leaf = output.detach().requires_grad_()
    sq(leaf).backward()
    output.backward(leaf.grad)


def _several_roots(model: nn.Module, rank: int, step: int) -> None:
    first, second = (sq(model(batch(rank, step, which=which))) for which in (0, 1))
    torch.autograd.backward([first, second], [torch.tensor(2.0), torch.tensor(0.5)])


def _into_some_parameters(model: nn.Module, rank: int, step: int) -> None:
    sq(model(batch(rank, step))).backward(inputs=list(unwrapped(model).a.parameters()))


def _in_eval_mode(model: nn.Module, rank: int, step: int) -> None:
    model.eval()
    plain(model, rank, step)
    model.train()


def _penalised(model: nn.Module, rank: int, step: int) -> None:
    """The loss uses the parameters themselves, too."""
    loss = sq(model(batch(rank, step)))
    (loss + sum(p.square().sum() for p in model.parameters()) / 64).backward()


def _only_penalties(model: nn.Module, rank: int, step: int) -> None:
    """No forward at all."""
    (sum(p.square().sum() for p in model.parameters()) * (rank + 1)).backward()


def _other_numbers_of_forwards(model: nn.Module, rank: int, step: int) -> None:
    sum(sq(model(batch(rank, step, which=which))) for which in range(1 + (rank + step) % 3)).backward()


def _in_mixed_precision(model: nn.Module, rank: int, step: int) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        output = model(batch(rank, step))
    sq(output.float()).backward()


def _under_a_checkpoint(model: nn.Module, rank: int, step: int) -> None:
    sq(checkpoint(model, batch(rank, step).requires_grad_(), use_reentrant=False)).backward()


def _under_a_reentrant_checkpoint(model: nn.Module, rank: int, step: int) -> None:
    sq(checkpoint(model, batch(rank, step).requires_grad_(), use_reentrant=True)).backward()


@pytest.mark.parametrize("cap", [None, 1e-6])
@pytest.mark.parametrize(
    "program",
    [
        _in_a_thread,
        _by_hand,
        _several_roots,
        _into_some_parameters,
        _in_eval_mode,
        _penalised,
        _only_penalties,
        _other_numbers_of_forwards,
        _in_mixed_precision,
        _under_a_checkpoint,
        _under_a_reentrant_checkpoint,
    ],
)
def test_less_common_programs(ranks: RankPool, program: Any, cap: float | None) -> None:
    assert_equal_replicas(ranks(train_alike, TwoLayers, program, lr=1 / 64, steps=4, exact=True, bucket_cap_mb=cap))


def _wrapper_twice_under_checkpoints(model: nn.Module, rank: int, step: int) -> None:
    x = batch(rank, step).requires_grad_()
    for _ in range(2):
        x = torch.tanh(checkpoint(model, x, use_reentrant=True))
    sq(x).backward()


def _square() -> nn.Module:
    return in_quarters(nn.Linear(3, 3))


# Each of the two nested backwards is a pass of its own, so the average of the first is averaged again.
@pytest.mark.parametrize("cap", [None, 1e-6])
def test_the_wrapper_itself_twice_under_reentrant_checkpoints(ranks: RankPool, cap: float | None) -> None:
    assert_equal_replicas(ranks(train_alike, _square, _wrapper_twice_under_checkpoints, bucket_cap_mb=cap))


# ----------------------------------------------------------------- modules that do things of their own


class _ReturnsAParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.w = nn.Linear(3, 2), nn.Parameter(torch.ones(2))
        in_quarters(self)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.a(x), self.w


def _uses_the_parameter(model: nn.Module, rank: int, step: int) -> None:
    output, w = model(batch(rank, step))
    (sq(output * w) if (rank + step) % 2 else sq(w)).backward()


def test_an_output_that_is_a_parameter(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(train_alike, _ReturnsAParameter, _uses_the_parameter, lr=1 / 64, exact=True))


def _weight_normed() -> nn.Module:
    module = TwoLayers()
    parametrizations.weight_norm(module.a)
    return module


def _spectral_normed() -> nn.Module:
    torch.manual_seed(1)
    module = TwoLayers()
    parametrizations.spectral_norm(module.a)
    return module


def test_weight_norm(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(train_alike, _weight_normed, plain, lr=1 / 16, exact=True))


def _two_forwards(model: nn.Module, rank: int, step: int) -> None:
    (sq(model(batch(rank, step, which=0))) + sq(model(batch(rank, step, which=1)))).backward()


def test_spectral_norm_changes_its_buffers_in_forward(ranks: RankPool) -> None:
    """Its buffers do not depend on the data, so all ranks make the same ones."""
    for program in (plain, _two_forwards):
        assert_equal_replicas(ranks(train_alike, _spectral_normed, program, lr=1 / 16, exact=True))


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.lstm, self.head = nn.LSTM(3, 4, num_layers=2, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> Any:
        hidden, (last, cell) = self.lstm(x.unsqueeze(0))
        return {"output": self.head(hidden), "state": [last, cell]}


def _recurrent(model: nn.Module, rank: int, step: int) -> None:
    output = model(batch(rank, step, rows=2 + rank + step))
    (sq(output["output"]) + sq(output["state"][rank])).backward()


def test_a_recurrent_model_with_sequences_of_other_lengths(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(train_alike, _Recurrent, _recurrent, lr=1 / 16, exact=True))


# ----------------------------------------------------------------- on one rank only


def _copies_on_rank_0(rank: int, world: int) -> str:
    """Rank 0 keeps a moving average in a copy, saves its state and looks at it, all alone."""
    ddp = DistributedDataParallel(TwoLayers())
    reference = OneProcess(TwoLayers(), world)
    optimizer = sgd()(ddp.parameters())
    for step in range(3):
        if rank == 0:
            average = copy.deepcopy(ddp)
            with torch.no_grad():
                average(batch(0, step))
            average.state_dict()
            del average
        plain(ddp, rank, step)
        optimizer.step()
        optimizer.zero_grad()
        reference.train(plain, step)
    assert_same_state(ddp.module, reference.module, exact=True)
    return digest(ddp.module)


def test_a_copy_on_one_rank_only(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(_copies_on_rank_0))


def _local_backward_on_rank_0(rank: int, world: int) -> str:
    """Rank 0 looks at gradients of its own, inside no_sync or through autograd.grad, between any two calls."""
    ddp = DistributedDataParallel(TwoLayers())
    reference = OneProcess(TwoLayers(), world)
    for step in range(3):
        if rank == 0:
            torch.autograd.grad(sq(ddp(batch(0, 50))), list(ddp.parameters()))
            with ddp.no_sync():
                plain(ddp, rank, 60)
            ddp.zero_grad()
        loss = sq(ddp(batch(rank, step)))
        if rank == 0:
            torch.autograd.grad(loss, list(ddp.parameters()), retain_graph=True)
        loss.backward()
        reference.run(plain, step)
        assert_same_gradients(ddp.module, reference.module, f"step {step}", exact=True)
        ddp.zero_grad()
        reference.module.zero_grad()
    return digest(ddp.module)


def test_local_gradients_on_one_rank_only(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(_local_backward_on_rank_0))


# --------------------------------------------------------- wrapped again, everything frozen, gradients set by hand


def _wrapped_again(rank: int, world: int, keeps_first: bool) -> str:
    module = TwoLayers()
    first = DistributedDataParallel(module)
    plain(first, rank, 0)
    module.zero_grad()
    if not keeps_first:
        del first
    ddp = DistributedDataParallel(module)
    reference = OneProcess(TwoLayers(), world)
    for step in range(2):
        plain(ddp, rank, step)
        reference.run(plain, step)
        assert_same_gradients(module, reference.module, f"step {step}")
        module.zero_grad()
        reference.module.zero_grad()
    return digest(module)


@pytest.mark.parametrize("keeps_first", [False, True])
def test_a_module_wrapped_again(ranks: RankPool, keeps_first: bool) -> None:
    assert_equal_replicas(ranks(_wrapped_again, keeps_first))


def _all_frozen_for_a_while(model: nn.Module, rank: int, step: int) -> None:
    for p in unwrapped(model).parameters():
        p.requires_grad_(step not in (1, 2))
    x = batch(rank, step).requires_grad_()
    sq(model(x)).backward()
    assert x.grad is not None


class _FrozenLater(Branches):
    pass


def test_everything_frozen_for_a_while(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(train_alike, _FrozenLater, _frozen_program, steps=5, exact=True))


def _frozen_program(model: nn.Module, rank: int, step: int) -> None:
    _all_frozen_for_a_while(model, rank, step)
    if not is_wrapped(model):  # the reference keeps its own flags for the next step's replicas
        for p in model.parameters():
            p.requires_grad_(True)


def _set_by_hand(rank: int, world: int) -> list[float]:
    """What the user has put into .grad counts as much as what backward has put there."""
    ddp = DistributedDataParallel(TwoLayers())
    parameters = list(ddp.parameters())
    grads = torch.autograd.grad(sq(ddp(batch(rank, 0))), parameters)
    for p, g in zip(parameters, grads, strict=True):
        p.grad = g
    ddp.sync_gradients()
    reference = OneProcess(TwoLayers(), world)
    reference.run(plain, 0)
    assert_same_gradients(ddp.module, reference.module, exact=True)
    return ddp.module.b.bias.grad.tolist()


def test_gradients_set_by_hand_are_synchronised_on_demand(ranks: RankPool) -> None:
    first, second = ranks(_set_by_hand)
    assert first == second


# ----------------------------------------------------------------- buffers that do not fit


class _Growing(nn.Module):
    """A buffer that grows by one entry per forward, or by one more on rank 1."""

    seen: torch.Tensor

    def __init__(self, more: int) -> None:
        super().__init__()
        self.a, self.more = nn.Linear(3, 2), more
        self.register_buffer("seen", torch.zeros(1))
        in_quarters(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = torch.cat([self.seen, x.new_ones(1 + self.more)])
        return self.a(x)


def _growing() -> nn.Module:
    return _Growing(0)


def test_a_buffer_that_grows_alike(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(train_alike, _growing, plain, exact=True))


def _growing_unlike(rank: int, world: int) -> list[list[float]]:
    ddp = DistributedDataParallel(_Growing(rank), process_group=impatient_group(world))
    sizes = []
    for step in range(3):
        plain(ddp, rank, step)
        sizes.append(ddp.module.seen.tolist())
    return sizes


def test_a_buffer_of_another_size_on_one_rank_is_taken_over_or_told(ranks: RankPool) -> None:
    for rank, outcome in enumerate(ranks.run_expecting(_growing_unlike, timeout_s=90.0)):
        if isinstance(outcome, RankFailure):
            assert outcome.type_name != "Died"
            assert "seen" in outcome.text
        else:  # every forward starts from rank 0's buffer
            assert [len(sizes) for sizes in outcome] == [2 + step + rank for step in range(3)]


class _Normalised(TwoHeads):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(self.norm(x))


def _forwards_that_differ_in_number(rank: int, world: int) -> str:
    """Each rank runs another number of forwards before one backward, and every forward would send buffers."""
    ddp = DistributedDataParallel(_Normalised(), process_group=impatient_group(world))
    for step in range(4):
        loss = torch.zeros(())
        for which in range(1 + (rank + step) % 2):
            loss = loss + sq(ddp(batch(rank, step, rows=4, which=which))[0])
        loss.backward()
        assert_near(ddp.module.norm.num_batches_tracked.float(), ddp.module.norm.num_batches_tracked.float(), "")
    return digest(ddp.module)


def test_another_number_of_forwards_with_buffers(ranks: RankPool) -> None:
    """No hang: right gradients on both ranks, or an error on both."""
    outcomes = ranks.run_expecting(_forwards_that_differ_in_number, timeout_s=90.0)
    assert len({isinstance(outcome, RankFailure) for outcome in outcomes}) == 1
    assert all(not isinstance(o, RankFailure) or o.type_name != "Died" for o in outcomes)
