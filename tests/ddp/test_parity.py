"""Ten steps of a small GPT against one process on the whole batch, and against torch's own class.

Tolerances. Two ranks give torch's very bits: halves are exact and a sum of two numbers has no order. With
three ranks thirds are rounded and the collective's order of adding depends on where a value sits in its
bucket. One process on the whole batch multiplies longer matrices, so its sums are rounded differently.
"""

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import adamw, assert_equal_replicas, digest, is_wrapped
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradsync import DistributedDataParallel
from rank_pool import RankPool

_TOKENS, _WIDTH, _LENGTH, _ROWS = 11, 8, 6, 3
_STEPS = 10


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 2 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class _SmallGPT(nn.Module):
    """Two blocks, an output layer tied to the embedding, three experts to choose from, a layer never used."""

    def __init__(self, checkpointing: str = "none") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.checkpointing = checkpointing
        self.tokens, self.places = nn.Embedding(_TOKENS, _WIDTH), nn.Embedding(_LENGTH, _WIDTH)
        self.blocks = nn.ModuleList([_Block(), _Block()])
        self.head = nn.Linear(_WIDTH, _TOKENS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor, expert: int | None = None) -> torch.Tensor:
        x = self.tokens(tokens) + self.places.weight
        for block in self.blocks:
            x = self._run(block, x)
        if expert is not None:
            x = self.experts[expert](x)  # type: ignore[index,operator]
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())

    def _run(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointing == "none":
            return block(x)
        return checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")


def _with_experts() -> nn.Module:
    model = _SmallGPT()
    model.experts = nn.ModuleList([_Block() for _ in range(3)])
    return model


def _with_a_spare_layer() -> nn.Module:
    model = _SmallGPT()
    model.spare = nn.Linear(_WIDTH, _WIDTH)
    return model


@dataclass(frozen=True)
class _Case:
    """A model, what torch's class needs to train it, and which expert a rank uses in a step."""

    build: Callable[[], nn.Module]
    torch_flags: dict[str, bool] = field(default_factory=dict)
    expert: Callable[[int, int], int | None] = lambda rank, step: None
    has_branches: bool = False


def _other_expert_each(rank: int, step: int) -> int:
    return (rank + step) % 3


_CASES = {
    "tied": _Case(_SmallGPT),
    "branches": _Case(_with_experts, {"find_unused_parameters": True}, _other_expert_each, True),
    "never used": _Case(_with_a_spare_layer, {"find_unused_parameters": True}),
    "reentrant": _Case(functools.partial(_SmallGPT, "reentrant")),
    "checkpointed": _Case(functools.partial(_SmallGPT, "plain")),
}


def _momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _batch(step: int, micro: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of all ranks, the rows of rank r in a row."""
    generator = torch.Generator().manual_seed(100 * step + micro)
    both = torch.randint(_TOKENS, (2, world * _ROWS, _LENGTH), generator=generator)
    return both[0], both[1]


def _train(model: nn.Module, case: _Case, rank: int | None, step: int, world: int, num_micro: int) -> torch.Tensor:
    """Backward over one step's batch: of a rank, or of all of them where ``rank`` is None. Returns the last loss."""
    loss = torch.zeros(())
    for micro in range(num_micro):
        is_last = micro == num_micro - 1
        inputs, targets = _batch(step, micro, world)
        skips = model.no_sync() if is_wrapped(model) and not is_last else contextlib.nullcontext()  # type: ignore[operator]
        with skips:
            loss = _loss(model, case, rank, step, world, inputs, targets) / num_micro
            loss.backward()
    return loss


def _loss(
    model: nn.Module, case: _Case, rank: int | None, step: int, world: int, inputs: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    if rank is not None:
        mine = slice(rank * _ROWS, (rank + 1) * _ROWS)
        result: torch.Tensor = model(inputs[mine], targets[mine], case.expert(rank, step))
        return result
    if not case.has_branches:
        whole: torch.Tensor = model(inputs, targets)
        return whole
    parts = [_loss(model, case, r, step, world, inputs, targets) for r in range(world)]
    return torch.stack(parts).mean()


def _ten_steps(rank: int, world: int, name: str, cap: float | None, optimizer: str, num_micro: int) -> str:
    case = _CASES[name]
    flags = {} if cap is None else {"bucket_cap_mb": cap}
    ours = DistributedDataParallel(case.build(), **flags)
    theirs = nn.parallel.DistributedDataParallel(case.build(), **flags, **case.torch_flags)
    whole = case.build()
    make = {"sgd": _momentum, "adamw": adamw(lr=0.01)}[optimizer]
    optimizers = [make(m.parameters()) for m in (ours, theirs, whole)]
    exact = {"rtol": 0, "atol": 0} if world == 2 else {"rtol": 1e-5, "atol": 1e-6}
    for step in range(_STEPS):
        for each in optimizers:
            each.zero_grad()
        losses = [
            _train(ours, case, rank, step, world, num_micro),
            _train(theirs, case, rank, step, world, num_micro),
        ]
        _train(whole, case, None, step, world, num_micro)
        torch.testing.assert_close(*losses, **exact)
        _compare_gradients(ours.module, theirs.module, f"step {step}, torch:", **exact)
        _compare_gradients(ours.module, whole, f"step {step}, whole batch:", rtol=1e-4, atol=1e-5)
        for each in optimizers:
            each.step()
    for (key, mine), expected in zip(ours.module.state_dict().items(), whole.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4, msg=lambda text, key=key: f"{key}: {text}")
    return digest(ours.module)


def _compare_gradients(got: nn.Module, want: nn.Module, when: str, rtol: float, atol: float) -> None:
    for (name, p), q in zip(got.named_parameters(), want.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), f"{when} {name}: {p.grad} and {q.grad}"
        if p.grad is not None:
            torch.testing.assert_close(
                p.grad, q.grad, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{when} {name}: {text}"
            )


_PLAN = [(0.001, optimizer, num_micro) for optimizer in ("sgd", "adamw") for num_micro in (1, 3)]


@pytest.mark.parametrize(("cap", "optimizer", "num_micro"), [*_PLAN, (None, "adamw", 1)])
@pytest.mark.parametrize("name", _CASES)
def test_two_ranks(ranks: RankPool, name: str, cap: float | None, optimizer: str, num_micro: int) -> None:
    assert_equal_replicas(ranks(_ten_steps, name, cap, optimizer, num_micro))


@pytest.mark.parametrize("name", _CASES)
def test_three_ranks(ranks3: RankPool, name: str) -> None:
    assert_equal_replicas(ranks3(_ten_steps, name, 0.001, "adamw", 3))


def test_three_ranks_in_one_bucket(ranks3: RankPool) -> None:
    assert_equal_replicas(ranks3(_ten_steps, "branches", None, "sgd", 1))
