"""The right gradients, worked out by one process, and the small pieces that the engine's tests are made of.

A *program* is what a user does in one step: ``program(model, rank, step)`` runs forwards and backwards and
leaves gradients behind. It runs on the wrapped module of one rank, and on plain replicas, one a rank, in
``OneProcess``; so the same lines are judged by what they mean without any communication.

Values are whole numbers and quarters where possible, so that the arithmetic is exact.
"""

import contextlib
import copy
import hashlib
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from gradsync import DistributedDataParallel

Program = Callable[[nn.Module, int, int], object]
M = TypeVar("M", bound=nn.Module)
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]

# Sums of a few float32 numbers of about 1, in an order that the collective chooses.
RTOL, ATOL = 1e-5, 1e-6


# ----------------------------------------------------------------- data, weights, losses


def whole_numbers(*shape: int, key: tuple[int, ...]) -> torch.Tensor:
    """Small whole numbers between -3 and 3, others for every key, the same in every process."""
    seed = 0
    for part in key:
        seed = seed * 1009 + part + 1
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).float()


def batch(rank: int, step: int, rows: int = 2, columns: int = 3, which: int = 0) -> torch.Tensor:
    """The input of one rank in one step; ``which`` tells several in the same step apart."""
    return whole_numbers(rows, columns, key=(rank, step, which))


@torch.no_grad()
def in_quarters(module: M, seed: int = 0) -> M:
    """Give every parameter multiples of 1/4 between -1 and 1."""
    generator = torch.Generator().manual_seed(seed)
    for p in module.parameters():
        p.copy_(torch.randint(-4, 5, p.shape, generator=generator) / 4)
    return module


def sq(output: torch.Tensor) -> torch.Tensor:
    """The ordinary loss: sum of squares / 4."""
    return output.square().sum() / 4


def plain(model: nn.Module, rank: int, step: int) -> None:
    """The plainest program: one forward, one backward."""
    sq(model(batch(rank, step))).backward()


# ----------------------------------------------------------------- modules


class TwoLayers(nn.Module):
    """Linear, tanh, Linear: the layers are called a and b."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 2)
        in_quarters(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.a(x)))


class Branches(nn.Module):
    """Linear layers a, b, c, ... side by side; forward adds up those that it is told to use."""

    def __init__(self, names: str = "abc") -> None:
        super().__init__()
        self.names = names
        for name in names:
            setattr(self, name, nn.Linear(3, 2))
        in_quarters(self)

    def forward(self, x: torch.Tensor, use: str = "") -> torch.Tensor:
        return torch.stack([getattr(self, name)(x) for name in use or self.names]).sum(0)


class TwoHeads(nn.Module):
    """A trunk and two heads a and b; forward returns the outputs of both."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(3, 3)
        self.a = nn.Linear(3, 2)
        self.b = nn.Linear(3, 2)
        in_quarters(self)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.trunk(x))
        return self.a(hidden), self.b(hidden)


def bare_linear() -> nn.Linear:
    """Linear(2,2) without bias and with zero weights: each row of (rank + 1) gives gradients of rank + 1."""
    layer = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(layer.weight)
    return layer


def ones_row(rank: int) -> torch.Tensor:
    return torch.full((1, 2), rank + 1.0)


# ----------------------------------------------------------------- the same program, wrapped or not


def is_wrapped(model: nn.Module) -> bool:
    return isinstance(model, nn.parallel.DistributedDataParallel)


def unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def unsynced(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """``no_sync()`` of a wrapper; nothing for a plain module."""
    return model.no_sync() if isinstance(model, nn.parallel.DistributedDataParallel) else contextlib.nullcontext()


def sgd(lr: float = 0.5) -> MakeOptimizer:
    return lambda parameters: torch.optim.SGD(parameters, lr=lr)


def adamw(lr: float = 0.1, weight_decay: float = 0.5) -> MakeOptimizer:
    # A large eps keeps rounding noise in gradients that are zero in theory from becoming whole steps.
    return lambda parameters: torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay, eps=1e-4)


class OneProcess:
    """The reference: one process that runs every rank's program on a replica of its own and averages.

    Replicas start each step from rank 0's buffers. Gradients that are there before the step count on
    every rank of a mean; sums over ranks are added to them.
    """

    def __init__(self, module: nn.Module, world: int, make_optimizer: MakeOptimizer | None = None) -> None:
        self.module = module
        self.world = world
        self.optimizer = (make_optimizer or sgd())([p for p in module.parameters()])
        self.replicas: list[nn.Module] = []

    def run(self, program: Program, step: int, divisor: float | None = None) -> None:
        """Leave the gradients of one step on the module: the mean over ranks, or their sum by ``divisor``."""
        self.replicas = [self._replica(carries=divisor is None) for _ in range(self.world)]
        for rank, replica in enumerate(self.replicas):
            program(replica, rank, step)
        everyones = zip(*(r.parameters() for r in self.replicas), strict=True)
        for parameter, replicated in zip(self.module.parameters(), everyones, strict=True):
            total = _sum_by([p.grad for p in replicated], divisor or self.world)
            is_added = divisor is not None and parameter.grad is not None and total is not None
            parameter.grad = parameter.grad + total if is_added else (parameter.grad if total is None else total)
        for mine, first in zip(self.module.modules(), self.replicas[0].modules(), strict=True):
            mine._buffers = {name: None if b is None else b.detach().clone() for name, b in first._buffers.items()}

    def train(self, program: Program, step: int, divisor: float | None = None) -> None:
        """Run a step, apply it and clear the gradients."""
        self.run(program, step, divisor)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _replica(self, carries: bool) -> nn.Module:
        replica = copy.deepcopy(self.module)
        for mine, theirs in zip(self.module.parameters(), replica.parameters(), strict=True):
            theirs.grad = mine.grad.clone() if carries and mine.grad is not None else None
        return replica


def _sum_by(grads: list[torch.Tensor | None], divisor: float) -> torch.Tensor | None:
    present = [g for g in grads if g is not None]
    if not present:
        return None
    total = present[0].clone()
    for g in present[1:]:
        total = total + g
    return total / divisor


# ----------------------------------------------------------------- comparing


def assert_near(got: torch.Tensor, want: torch.Tensor, what: str, exact: bool = False, rtol: float = RTOL) -> None:
    dense = [t.detach().to_dense() if t.is_sparse else t.detach() for t in (got, want)]
    tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": rtol, "atol": ATOL}
    torch.testing.assert_close(*dense, **tolerance, msg=lambda text: f"{what}: {text}")


def assert_same_gradients(got: nn.Module, want: nn.Module, when: str = "", exact: bool = False) -> None:
    """Compare all gradients, and whether there is one."""
    wanted = dict(want.named_parameters())
    for name, p in got.named_parameters():
        expected = wanted[name].grad
        assert (p.grad is None) == (expected is None), f"{when} {name}: grad is {p.grad}, expected {expected}"
        if p.grad is not None and expected is not None:
            assert p.grad.dtype == p.dtype
            assert_near(p.grad, expected, f"{when} gradient of {name}", exact)


def assert_same_state(got: nn.Module, want: nn.Module, when: str = "", exact: bool = False) -> None:
    """Compare parameters and buffers."""
    expected = want.state_dict()
    for name, value in got.state_dict().items():
        assert_near(value, expected[name], f"{when} {name}", exact)


def assert_same_buffers(got: nn.Module, want: nn.Module, when: str = "", exact: bool = False) -> None:
    expected = dict(want.named_buffers())
    for name, value in got.named_buffers():
        assert_near(value, expected[name], f"{when} buffer {name}", exact)


def digest(module: nn.Module) -> str:
    """A fingerprint of the bits of all parameters, to compare ranks by."""
    bits = hashlib.sha256()
    for p in module.parameters():
        local = getattr(p.detach(), "_local_tensor", p.detach())
        bits.update(local.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return bits.hexdigest()


def assert_equal_replicas(digests: list[str]) -> None:
    assert len(set(digests)) == 1, f"the ranks hold different parameters: {digests}"


# ----------------------------------------------------------------- jobs for the ranks


def train_alike(
    rank: int,
    world: int,
    build: Callable[[], nn.Module],
    program: Program,
    steps: int = 3,
    make_optimizer: MakeOptimizer | str = "sgd",
    lr: float = 0.5,
    set_to_none: bool = True,
    exact: bool = False,
    checks_buffers: bool = True,
    **arguments: Any,
) -> str:
    """Train a wrapped module and the reference side by side and compare them in every step.

    ``exact`` asks for equal bits, which two ranks can give: halves are exact, and a sum of two numbers has no order.
    """
    choose = (
        {"sgd": sgd, "adamw": adamw}[make_optimizer] if isinstance(make_optimizer, str) else lambda _: make_optimizer
    )
    reference = OneProcess(build(), world, choose(lr))
    ddp = DistributedDataParallel(build(), **arguments)
    optimizer = choose(lr)([p for p in ddp.parameters()])
    for step in range(steps):
        program(ddp, rank, step)
        reference.run(program, step)
        assert_same_gradients(ddp.module, reference.module, f"step {step}:", exact)
        if checks_buffers:
            assert_same_buffers(ddp.module, reference.replicas[rank], f"step {step}:", exact)
        for each in (optimizer, reference.optimizer):
            each.step()
            each.zero_grad(set_to_none)
        wanted = dict(reference.module.named_parameters())
        for name, p in ddp.module.named_parameters():
            assert_near(p, wanted[name], f"step {step}: {name}", exact)
    return digest(ddp.module)


def raised(action: Callable[[], object]) -> str:
    """The class and text of what the action raises, and of what led to it."""
    try:
        action()
    except Exception as error:
        return chain_text(error)
    raise AssertionError("nothing was raised")


def chain_text(error: BaseException | None) -> str:
    lines = []
    while error is not None:
        lines.append(f"{type(error).__name__}: {error}")
        error = error.__cause__ or error.__context__
    return "\n".join(lines)


def impatient_group(world: int, seconds: float = 3.0) -> dist.ProcessGroup:
    """A group of all ranks that gives up waiting soon."""
    group = dist.new_group(list(range(world)), timeout=timedelta(seconds=seconds))
    assert isinstance(group, dist.ProcessGroup)
    return group


def num_collectives() -> int:
    """How many operations this process has issued so far, on all its groups."""
    groups = dist.distributed_c10d._world.pg_map
    counted = [group for group in groups if dist.get_backend(group) == "gloo"]
    return sum(int(group._get_sequence_number_for_group()) for group in counted)
