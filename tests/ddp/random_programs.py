"""Small training programs as plain data, and how they run: wrapped on the ranks, or in one process.

A program says which blocks a model has, and for every step and rank which forwards it runs, through which
blocks, how its backwards are cut and which of them synchronise. Nothing here communicates by itself, and
nothing here draws random programs (see the test of the same name).
"""

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from reference import OneProcess, adamw, digest, in_quarters, is_wrapped, sgd, unsynced, unwrapped, whole_numbers
from torch import nn
from torch.utils.checkpoint import checkpoint

from gradsync import DistributedDataParallel, ZeroRedundancyOptimizer

WIDTH = 4
HEADS = 2
_NUM_TOKENS = 6
_BLOWN = "blown on purpose"


@dataclass(frozen=True)
class Block:
    """One block of the model; ``shares`` is the earlier block whose weight it has, for two linear ones."""

    kind: str
    shares: int | None = None


@dataclass(frozen=True)
class Visit:
    """A block on the way through the model, and whether it runs under a checkpoint."""

    block: int
    how: str = "plain"


@dataclass(frozen=True)
class Forward:
    """One forward: the way through the blocks, and what of its outputs enters the loss."""

    path: tuple[Visit, ...]
    heads: tuple[int, ...]
    uses_side: bool = False
    has_penalty: bool = False


@dataclass(frozen=True)
class Window:
    """What one rank does in one step: forwards that only accumulate, then those that end the window."""

    unsynced: tuple[Forward, ...]
    last: tuple[Forward, ...]


@dataclass(frozen=True)
class Step:
    """One step of all ranks.

    ``ending``: "one" backward of all last forwards together, "each" its own, "twice" through one graph, or
    "on demand" by ``sync_gradients()``. ``clears``: how gradients of the step before were cleared; ``discards``: how
    those of its own unsynchronised backwards are, if they are.
    """

    windows: tuple[Window, ...]
    ending: str = "one"
    clears: str = "none"
    frozen: frozenset[int] = frozenset()
    evaluates: str = "never"
    blows: bool = False
    discards: str = "never"


@dataclass(frozen=True)
class Program:
    """A model and how it is trained."""

    blocks: tuple[Block, ...]
    steps: tuple[Step, ...]
    stem: str = "floats"
    output: str = "tuple"
    optimizer: str = "sgd"
    cap: float | None = None
    reduction: str = "mean"
    starts_apart: bool = False
    skips_by: str = "context"


# ----------------------------------------------------------------- the model


class _Doubled(nn.Module):
    """A block whose parameters are float64."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.double()).float()


class _Odd(nn.Module):
    """A scalar, an empty, a transposed and a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.zeros(0, WIDTH))
        self.turned = nn.Parameter(torch.zeros(WIDTH + 1, WIDTH).t()[:, :WIDTH])
        self.phase = nn.Parameter(torch.ones(WIDTH, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x @ self.turned) * self.gain * self.phase).real + self.nothing.sum()


_KINDS: dict[str, Any] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    # a large eps: two equal rows have no variance, and dividing by almost nothing blows up rounding errors
    "layer norm": lambda: nn.LayerNorm(WIDTH, eps=0.1),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH, eps=0.1),
    "double": _Doubled,
    "odd": _Odd,
    "two": lambda: nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, WIDTH, bias=False)),
}
KINDS = tuple(_KINDS)


class Outputs:
    """A plain object to return outputs in."""

    def __init__(self, heads: list[torch.Tensor]) -> None:
        self.heads = heads


class Model(nn.Module):
    """A stem, blocks to be visited in any order, two heads, a side loss in an attribute, and a layer never used."""

    side_loss: torch.Tensor | None = None

    def __init__(self, program: Program, seed: int = 0) -> None:
        super().__init__()
        self.output = program.output
        if program.stem != "floats":
            self.stem = nn.Embedding(_NUM_TOKENS, WIDTH, sparse=program.stem == "sparse tokens")
        self.blocks = nn.ModuleList(_KINDS[block.kind]() for block in program.blocks)
        for module, block in zip(self.blocks, program.blocks, strict=True):
            if block.shares is not None:
                module.weight = self.blocks[block.shares].weight
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(HEADS))
        self.side = nn.Linear(WIDTH, 1)
        self.spare = nn.Linear(2, 2)
        self.is_fused = False
        in_quarters(self, seed)

    def forward(self, x: torch.Tensor, way: Forward) -> Any:
        y = x if x.is_floating_point() else self.stem(x)
        for visit in way.path:
            y = torch.tanh(y + self._visit(visit, y))
        if self.is_fused:
            y.register_hook(_blow)
        self.side_loss = self.side(y).square().sum()
        heads = [head(y) for head in self.heads]
        return {"tuple": tuple, "dict": _as_dict, "object": Outputs}[self.output](heads)

    def _visit(self, visit: Visit, y: torch.Tensor) -> torch.Tensor:
        block = self.blocks[visit.block]
        if visit.how == "plain" or not torch.is_grad_enabled():
            result: torch.Tensor = block(y)
            return result
        again: torch.Tensor = checkpoint(block, y, use_reentrant=visit.how == "reentrant")
        return again

    def freeze(self, frozen: frozenset[int]) -> None:
        for p in self.parameters():
            p.requires_grad_(True)
        for number in frozen:
            self.blocks[number].requires_grad_(False)


def _as_dict(heads: list[torch.Tensor]) -> dict[str, Any]:
    return {"first": heads[0], "rest": [tuple(heads[1:]), None], "count": len(heads)}


def _heads(output: Any) -> list[torch.Tensor]:
    if isinstance(output, Outputs):
        return output.heads
    if isinstance(output, dict):
        return [output["first"], *output["rest"][0]]
    return list(output)


def _blow(_: torch.Tensor) -> None:
    raise KeyError(_BLOWN)


# ----------------------------------------------------------------- one rank's part of a step


def num_rows(rank: int, number: int) -> int:
    """How many rows the forward has; also its gradient weight."""
    return 2 + (rank + number) % 2


def _input(program: Program, step: int, rank: int, number: int) -> torch.Tensor:
    rows = num_rows(rank, number)
    if program.stem == "floats":
        return whole_numbers(rows, WIDTH, key=(rank, step, number)).requires_grad_()
    return whole_numbers(rows, key=(rank, step, number)).abs().long()


def _loss_parts(model: nn.Module, program: Program, step: int, rank: int, number: int, way: Forward) -> list[Any]:
    """Run a forward; the parts of its loss, one a head that is used."""
    x = _input(program, step, rank, number)
    if is_wrapped(model) and program.reduction == "weighted":
        model.add_gradient_weight(num_rows(rank, number))  # type: ignore[operator]
    outputs = _heads(model(x, way))
    parts = [(outputs[head] - head).square().sum() / 8 for head in way.heads]
    if way.uses_side:
        parts[-1] = parts[-1] + unwrapped(model).side_loss / 8
    if way.has_penalty:
        (slope,) = torch.autograd.grad(outputs[way.heads[0]].sum(), x, create_graph=True)
        parts[-1] = parts[-1] + slope.square().sum() / 8
    return parts


def run_window(model: nn.Module, program: Program, step: int, rank: int) -> None:
    """Run one rank's part of a step, up to the gradients."""
    plan = program.steps[step]
    window = plan.windows[rank]
    for number, way in enumerate(window.unsynced):
        with _without_synchronisation(model, program):
            sum(_loss_parts(model, program, step, rank, number, way)).backward()  # type: ignore[union-attr]
    if plan.discards != "never":
        model.zero_grad(set_to_none=plan.discards == "none")
    if plan.ending == "on demand":
        if is_wrapped(model):
            model.sync_gradients()  # type: ignore[operator]
        return
    parts = []
    for number, way in enumerate(window.last, start=len(window.unsynced)):
        parts.append(_loss_parts(model, program, step, rank, number, way))
        if plan.ending == "each":
            sum(parts[-1]).backward()  # type: ignore[union-attr]
    if plan.ending == "twice":
        sum(parts[0]).backward(retain_graph=True)  # type: ignore[union-attr]
    if plan.ending != "each":
        sum(sum(parts, start=[])).backward()  # type: ignore[union-attr]


@contextlib.contextmanager
def _without_synchronisation(model: Any, program: Program) -> Any:
    if program.skips_by == "context" or not is_wrapped(model):
        with unsynced(model):
            yield
        return
    model.require_backward_grad_sync = False
    yield
    model.require_backward_grad_sync = True


# ----------------------------------------------------------------- the job


def _optimizer(program: Program) -> Any:
    if program.optimizer == "sgd" or program.stem == "sparse tokens":
        return sgd(1 / 16)
    if program.optimizer == "adamw":
        return adamw(lr=0.02)
    return lambda parameters: torch.optim.SGD(parameters, lr=1 / 16, momentum=0.9)


def train(rank: int, world: int, program: Program, is_sharded: bool = False) -> str:
    """Train on the ranks and in one process, and compare them after every step; collective gradients if sharded."""
    ddp = DistributedDataParallel(
        Model(program, rank if program.starts_apart else 0), bucket_cap_mb=program.cap, reduction=program.reduction
    )
    reference = OneProcess(Model(program), world, _optimizer(program))
    optimizer = _sharded(program, ddp) if is_sharded else _optimizer(program)(list(ddp.parameters()))
    for number, step in enumerate(program.steps):
        _clear(step, optimizer, reference.optimizer)
        for module in (ddp.module, reference.module):
            module.freeze(step.frozen)
        if step.blows:
            _blow_up(ddp, program, number, rank)
            optimizer.zero_grad()
        _evaluate(ddp, program, step, rank)
        if step.discards != "never":
            reference.optimizer.zero_grad(set_to_none=step.discards == "none")
        run_window(ddp, program, number, rank)
        reference.run(lambda model, r, s: run_window(model, program, s, r), number, _divisor(program, number))
        _compare(ddp.module, reference.module, rank, number, optimizer.full_gradient if is_sharded else _gradient)
        optimizer.step()
        reference.optimizer.step()
        for (name, p), q in zip(ddp.module.named_parameters(), reference.module.parameters(), strict=True):
            _assert_near(p.detach(), q.detach(), f"after step {number}: {name}")
            q.data.copy_(p.data)  # so that rounding in one step does not grow in the next
    return digest(ddp.module)


def _sharded(program: Program, ddp: Any) -> Any:
    plain = _optimizer(program)([nn.Parameter(torch.zeros(1))])
    options = {"lr": plain.defaults["lr"]}
    options |= {key: plain.defaults[key] for key in ("momentum", "weight_decay", "eps") if key in plain.defaults}
    return ZeroRedundancyOptimizer(ddp.parameters(), type(plain), ddp=ddp, **options)


def _gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    return parameter.grad


def _divisor(program: Program, step: int) -> float | None:
    if program.reduction == "mean":
        return None
    if program.reduction == "sum":
        return 1
    plan = program.steps[step]
    total = 0
    for rank, window in enumerate(plan.windows):
        forwards = len(window.unsynced) + (0 if plan.ending == "on demand" else len(window.last))
        total += sum(num_rows(rank, number) for number in range(forwards))
    return total


def _clear(step: Step, *optimizers: torch.optim.Optimizer) -> None:
    for each in optimizers:
        if step.clears != "never":
            each.zero_grad(set_to_none=step.clears == "none")


def _blow_up(ddp: Any, program: Program, step: int, rank: int) -> None:
    """A backward that raises on every rank; in eval mode, since the reference does not run its forward."""
    window = program.steps[step].windows[rank]
    ddp.eval()
    ddp.module.is_fused = True
    try:
        sum(_loss_parts(ddp, program, step, rank, 77, window.last[0])).backward()  # type: ignore[union-attr]
    except KeyError as error:
        assert _BLOWN in str(error)
    ddp.module.is_fused = False
    ddp.train()


def _evaluate(ddp: Any, program: Program, step: Step, rank: int) -> None:
    if step.evaluates == "never" or (step.evaluates == "on rank 0" and rank != 0):
        return
    ddp.eval()
    with torch.set_grad_enabled(step.evaluates == "with grad"):
        ddp(_input(program, 0, rank, 0), step.windows[rank].last[0])
    ddp.train()


def _compare(got: nn.Module, want: nn.Module, rank: int, step: int, gradient: Any) -> None:
    for (name, p), q in zip(got.named_parameters(), want.parameters(), strict=True):
        grad = gradient(p)
        assert (grad is None) == (q.grad is None), f"step {step}: {name}: grad {grad}, expected {q.grad}"
        if grad is not None and q.grad is not None:
            _assert_near(grad.to_dense(), q.grad.to_dense(), f"step {step}: gradient of {name}")
    if rank == 0:  # the other ranks' buffers are overwritten by these before the next training forward
        for (name, b), c in zip(got.named_buffers(), want.buffers(), strict=True):
            _assert_near(b, c, f"step {step}: {name}")


def _assert_near(got: torch.Tensor, want: torch.Tensor, what: str) -> None:
    """Both start a step from equal bits, so they differ by the order of a few additions."""
    largest = max(1.0, want.abs().max().item()) if want.numel() else 1.0
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * largest, msg=lambda text: f"{what}: {text}")
