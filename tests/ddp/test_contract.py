"""The plain contract of a wrapper: what is whose, what is passed on, and several wrappers side by side."""

from typing import Any, NamedTuple

import pytest
import torch
from reference import (
    OneProcess,
    TwoLayers,
    assert_equal_replicas,
    assert_same_gradients,
    assert_same_state,
    batch,
    digest,
    in_quarters,
    is_wrapped,
    plain,
    sgd,
    sq,
    train_alike,
    unwrapped,
)
from torch import nn

from gradsync import DistributedDataParallel
from rank_pool import RankPool


def _from_rank_0(rank: int, world: int) -> None:
    module = in_quarters(TwoLayers(), seed=rank)
    before = list(module.parameters())
    ddp = DistributedDataParallel(module)
    assert ddp.module is module
    assert all(now is then for now, then in zip(module.parameters(), before, strict=True))
    assert_same_state(module, in_quarters(TwoLayers(), seed=0), exact=True)


def test_parameters_follow_rank_0_at_construction(ranks: RankPool) -> None:
    ranks(_from_rank_0)


def _left_as_they_are(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(in_quarters(TwoLayers(), seed=rank), init_sync=False)
    assert_same_state(ddp.module, in_quarters(TwoLayers(), seed=rank), exact=True)


def test_init_sync_can_be_left_out(ranks: RankPool) -> None:
    ranks(_left_as_they_are)


class _Returned(NamedTuple):
    output: torch.Tensor
    got: tuple[Any, ...]


class _TakesAnything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        in_quarters(self)

    def forward(self, x: torch.Tensor, *rest: Any, scale: float, flag: Any = None, **kw: Any) -> _Returned:
        return _Returned(self.linear(x) * scale, (rest, flag, kw))


def _call_it(model: nn.Module, rank: int, step: int) -> None:
    returned = model(batch(rank, step), "w", 3, scale=2, flag={"k": [1]}, other=None)
    assert type(returned) is _Returned
    assert returned.got == (("w", 3), {"k": [1]}, {"other": None})
    sq(returned.output).backward()


def test_arguments_and_outputs_pass_through(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(train_alike, _TakesAnything, _call_it, lr=0.0625, exact=True))


def _modes(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(TwoLayers())
    assert isinstance(ddp, nn.parallel.DistributedDataParallel)
    assert ddp.training
    ddp.eval()
    assert not ddp.module.a.training
    ddp.train()
    assert ddp.module.a.training


def test_modes_reach_the_module(ranks: RankPool) -> None:
    ranks(_modes)


def _adversaries(rank: int, world: int) -> str:
    """A generator and a discriminator, each wrapped, trained in turn; the second loss reaches both."""
    names = ("g", "d")
    modules = {"g": lambda: in_quarters(nn.Linear(3, 3)), "d": lambda: in_quarters(nn.Linear(3, 2), seed=1)}
    wrapped = {name: DistributedDataParallel(modules[name]()) for name in names}
    pairs = [{name: modules[name]() for name in names} for _ in range(world)]
    for step in range(3):
        for backward in (_discriminate, _generate):
            for r, pair in [(rank, wrapped), *enumerate(pairs)]:
                for module in pair.values():
                    module.zero_grad()
                backward(pair, r, step)
            for name in names:
                replicas = [pair[name] for pair in pairs]
                for p, *others in zip(wrapped[name].parameters(), *(m.parameters() for m in replicas), strict=True):
                    grads = [q.grad for q in others]
                    if None in grads:
                        assert p.grad is None
                    else:
                        assert torch.equal(p.grad, sum(grads) / world)  # halves of whole numbers are exact
    return digest(wrapped["g"]) + digest(wrapped["d"])


def _discriminate(pair: Any, rank: int, step: int) -> None:
    sq(pair["d"](pair["g"](batch(rank, step)).detach())).backward()


def _generate(pair: Any, rank: int, step: int) -> None:
    sq(pair["d"](torch.tanh(pair["g"](batch(rank, step))))).backward()


def test_two_wrapped_models_trained_in_turn(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(_adversaries))


# ----------------------------------------------------------------- a wrapper inside a wrapper


class _Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner: nn.Module = TwoLayers()
        self.head = nn.Linear(2, 2)
        in_quarters(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.inner(x)))


def _nested(rank: int, world: int, arguments: dict[str, Any]) -> str:
    module = _Outer()
    module.inner = DistributedDataParallel(module.inner)
    ddp = DistributedDataParallel(module, **arguments)
    reference = OneProcess(_Outer(), world, sgd(0.25))
    optimizer = sgd(0.25)(ddp.parameters())
    for step in range(3):
        plain(ddp, rank, step)
        reference.run(plain, step)
        got = [p.grad for p in ddp.parameters()]
        want = [p.grad for p in reference.module.parameters()]
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-6)
        for each in (optimizer, reference.optimizer):
            each.step()
            each.zero_grad()
    return digest(ddp)


@pytest.mark.parametrize("arguments", [{}, {"bucket_cap_mb": 1e-6}])
def test_a_wrapper_inside_a_wrapper(ranks: RankPool, arguments: dict[str, Any]) -> None:
    assert_equal_replicas(ranks(_nested, arguments))


# ----------------------------------------------------------------- ways around the wrapper's forward


def _through_the_module(model: nn.Module, rank: int, step: int) -> None:
    """Every other step the user calls the module itself."""
    called = unwrapped(model) if is_wrapped(model) and step % 2 else model
    sq(called(batch(rank, step))).backward()


def _through_a_submodule(model: Any, rank: int, step: int) -> None:
    sq(unwrapped(model).a(batch(rank, step))).backward()


def _through_the_module_on_one_rank(model: nn.Module, rank: int, step: int) -> None:
    called = unwrapped(model) if rank == 1 else model
    sq(called(batch(rank, step))).backward()


@pytest.mark.parametrize("cap", [None, 1e-6])
@pytest.mark.parametrize("program", [_through_the_module, _through_a_submodule, _through_the_module_on_one_rank])
def test_forward_around_the_wrapper(ranks: RankPool, program: Any, cap: float | None) -> None:
    assert_equal_replicas(ranks(train_alike, TwoLayers, program, steps=4, exact=True, bucket_cap_mb=cap))


class _StoresALoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.side = nn.Linear(3, 2), nn.Linear(3, 2)
        in_quarters(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.extra = sq(self.side(x))
        return self.a(x)


def _with_the_stored_loss(model: Any, rank: int, step: int) -> None:
    output = model(batch(rank, step))
    (sq(output) + unwrapped(model).extra).backward()


def _only_the_stored_loss(model: Any, rank: int, step: int) -> None:
    model(batch(rank, step))
    unwrapped(model).extra.backward()


@pytest.mark.parametrize("program", [_with_the_stored_loss, _only_the_stored_loss])
def test_a_loss_taken_from_an_attribute(ranks: RankPool, program: Any) -> None:
    assert_equal_replicas(ranks(train_alike, _StoresALoss, program, exact=True))


def _in_place_on_output(model: nn.Module, rank: int, step: int) -> None:
    output = model(batch(rank, step))
    output *= 2
    output[0] = 0
    sq(output).backward()


def test_outputs_may_be_changed_in_place(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(train_alike, TwoLayers, _in_place_on_output, lr=0.0625, exact=True))


def _check_input_grad(rank: int, world: int) -> None:
    """The gradient of the input is the local one."""
    ddp, alone = DistributedDataParallel(TwoLayers()), TwoLayers()
    inputs = [batch(rank, 0).requires_grad_() for _ in range(2)]
    for model, x in zip((ddp, alone), inputs, strict=True):
        sq(model(x)).backward()
    assert torch.equal(inputs[0].grad, inputs[1].grad)


def test_the_gradient_of_the_input_is_local(ranks: RankPool) -> None:
    ranks(_check_input_grad)


def _with_input_grad(model: nn.Module, rank: int, step: int) -> None:
    sq(model(batch(rank, step).requires_grad_())).backward()


def _same_hooks(rank: int, world: int) -> None:
    """The user's own hooks on parameters see local gradients before and none of them is lost."""
    ddp = DistributedDataParallel(TwoLayers())
    seen: list[str] = []
    ddp.module.a.weight.register_hook(lambda grad: seen.append("tensor"))
    ddp.module.a.weight.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    ddp.module.a.register_full_backward_hook(lambda *_: seen.append("module"))
    reference = OneProcess(TwoLayers(), world)
    _with_input_grad(ddp, rank, 0)
    reference.run(_with_input_grad, 0)
    assert_same_gradients(ddp.module, reference.module, exact=True)
    assert sorted(seen) == ["accumulated", "module", "tensor"]


def test_hooks_of_the_user_are_left_alone(ranks: RankPool) -> None:
    ranks(_same_hooks)
