"""Parameters that are not plain float32 matrices, or that change after wrapping."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import (
    Branches,
    OneProcess,
    TwoLayers,
    assert_equal_replicas,
    assert_near,
    assert_same_gradients,
    assert_same_state,
    batch,
    digest,
    in_quarters,
    plain,
    raised,
    sgd,
    sq,
    train_alike,
    whole_numbers,
)
from torch import nn

from gradsync import DistributedDataParallel
from rank_pool import RankPool

# ----------------------------------------------------------------- sparse


class _SparseTable(nn.Module):
    def __init__(self, padding: int | None = None, is_tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 3, sparse=True, padding_idx=padding)
        self.a = nn.Linear(3, 6 if is_tied else 2, bias=False)
        in_quarters(self)
        if is_tied:
            self.a.weight = self.table.weight

    def forward(self, rows: list[int] | None) -> torch.Tensor:
        """Without rows only the dense layer is used."""
        return self.a(torch.ones(1, 3) if rows is None else self.table(torch.tensor(rows, dtype=torch.int64)))


def _with_padding() -> nn.Module:
    return _SparseTable(padding=0)


def _tied_to_dense() -> nn.Module:
    return _SparseTable(is_tied=True)


def _other_rows(model: nn.Module, rank: int, step: int) -> None:
    rows = ([0, 1, 1], [1, 5, 2, 2])[rank]
    (model([(row + step) % 6 for row in rows]).sum() / 2).backward()


def _only_padding_on_rank_0(model: nn.Module, rank: int, step: int) -> None:
    (model(([0, 0], [1, 2, 1])[rank]).sum() / 2).backward()


def _no_rows_on_rank_1(model: nn.Module, rank: int, step: int) -> None:
    (model([] if rank == 1 else [3, 3, 4]).sum() / 2).backward()


def _table_unused_on_rank_0(model: nn.Module, rank: int, step: int) -> None:
    (model((None, [1, 2])[rank]).sum() / 2).backward()


def _table_unused(model: nn.Module, rank: int, step: int) -> None:
    (model(None).sum() * (rank + 1)).backward()


def _accumulated_rows(model: nn.Module, rank: int, step: int) -> None:
    """Two synchronised backwards without clearing, of which only the first uses the table on rank 0."""
    _other_rows(model, rank, step)
    _table_unused_on_rank_0(model, rank, step)


@pytest.mark.parametrize("build", [_SparseTable, _with_padding])
@pytest.mark.parametrize(
    "program",
    [
        _other_rows,
        _only_padding_on_rank_0,
        _no_rows_on_rank_1,
        _table_unused_on_rank_0,
        _table_unused,
        _accumulated_rows,
    ],
)
def test_sparse_embedding_gradients(ranks: RankPool, build: Any, program: Any) -> None:
    assert_equal_replicas(ranks(train_alike, build, program, exact=True))


@pytest.mark.parametrize("program", [_other_rows, _table_unused_on_rank_0])
def test_a_sparse_table_that_is_also_a_dense_layer(ranks: RankPool, program: Any) -> None:
    assert_equal_replicas(ranks(train_alike, _tied_to_dense, program, lr=0.125))


def _keeps_sparse(rank: int, world: int) -> bool:
    ddp = DistributedDataParallel(_SparseTable())
    _other_rows(ddp, rank, 0)
    return bool(ddp.module.table.weight.grad.is_sparse)


def test_a_sparse_gradient_stays_sparse(ranks: RankPool) -> None:
    assert ranks(_keeps_sparse) == [True, True]


# ----------------------------------------------------------------- dtypes


class _WithComplex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.z = nn.Parameter(torch.zeros(3, 2, dtype=torch.complex64))
        in_quarters(self)
        with torch.no_grad():
            self.z += 0.25j * torch.arange(6).reshape(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((1 + 0.5j) * self.a(x)) @ self.z


def _real_and_imaginary(model: nn.Module, rank: int, step: int) -> None:
    output = model(batch(rank, step))
    (sq(output.real) + sq(output.imag) / 2).backward()


@pytest.mark.parametrize("arguments", [{}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1e-6}])
def test_complex_parameters(ranks: RankPool, arguments: dict[str, Any]) -> None:
    assert_equal_replicas(ranks(train_alike, _WithComplex, _real_and_imaginary, lr=0.125, exact=True, **arguments))


class _MixedDtypes(nn.Module):
    """Parameters of three dtypes, interleaved."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.brief, self.other_brief = (nn.Parameter(torch.ones(3, dtype=torch.bfloat16)) for _ in range(2))
        self.precise = nn.Parameter(torch.ones(3, dtype=torch.float64))
        in_quarters(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.a(x)) * self.brief.float()
        return torch.tanh(self.b(y)).double() * self.precise + self.other_brief.double()


@pytest.mark.parametrize("cap", [None, 25, 1e-6])
def test_mixed_dtypes(ranks: RankPool, cap: float | None) -> None:
    # halving is exact in bfloat16 too, so even its gradients have equal bits
    assert_equal_replicas(ranks(train_alike, _MixedDtypes, plain, lr=0.125, exact=True, bucket_cap_mb=cap))


class _NoFloat32(nn.Module):
    """There is no float32 bucket for the engine's own numbers to ride on."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3).double()
        self.brief = nn.Parameter(torch.ones(3, dtype=torch.float16))
        in_quarters(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x.double()) * self.brief.double()


@pytest.mark.parametrize("cap", [None, 1e-6])
def test_no_float32_parameter(ranks: RankPool, cap: float | None) -> None:
    assert_equal_replicas(ranks(train_alike, _NoFloat32, plain, lr=0.0625, exact=True, bucket_cap_mb=cap))


# ----------------------------------------------------------------- shapes and memory


class _OddShapes(nn.Module):
    """A zero-size, a scalar, a transposed and a strided parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 3)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.transposed = nn.Parameter(torch.zeros(2, 3).t())
        self.strided = nn.Parameter(torch.zeros(3, 4)[:, ::2])
        in_quarters(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x) @ (self.transposed + self.strided) * self.scalar
        return y + F.pad(self.empty, (0, 0, 0, 1)).sum()


@pytest.mark.parametrize("arguments", [{}, {"bucket_cap_mb": 1e-6}, {"gradient_as_bucket_view": True}])
def test_odd_shapes_and_strides(ranks: RankPool, arguments: dict[str, Any]) -> None:
    assert_equal_replicas(ranks(train_alike, _OddShapes, plain, lr=0.125, exact=True, **arguments))


def _only_an_empty_parameter() -> nn.Module:
    module = TwoLayers()
    module.empty = nn.Parameter(torch.zeros(0))
    return module


def test_an_empty_parameter_that_nobody_uses(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(train_alike, _only_an_empty_parameter, plain, exact=True, bucket_cap_mb=1e-6))


def _channels_last(rank: int, world: int, as_views: bool) -> str:
    build = lambda seed: in_quarters(nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last), seed)  # noqa: E731
    reference = OneProcess(build(0), world, sgd(0.125))
    ddp = DistributedDataParallel(build(rank), gradient_as_bucket_view=as_views)
    optimizer = sgd(0.125)(ddp.parameters())
    assert torch.equal(ddp.module.weight, reference.module.weight)
    for step in range(3):
        assert ddp.module.weight.is_contiguous(memory_format=torch.channels_last)
        _on_images(ddp, rank, step)
        reference.run(_on_images, step)
        assert_same_gradients(ddp.module, reference.module, f"step {step}", exact=True)
        assert ddp.module.weight.grad.stride() == ddp.module.weight.stride()
        for each in (optimizer, reference.optimizer):
            each.step()
            each.zero_grad()
    return digest(ddp.module)


def _on_images(model: nn.Module, rank: int, step: int) -> None:
    sq(model(whole_numbers(1, 2, 4, 4, key=(rank, step)))).backward()


@pytest.mark.parametrize("as_views", [False, True])
def test_channels_last_weights(ranks: RankPool, as_views: bool) -> None:
    assert_equal_replicas(ranks(_channels_last, as_views))


# ----------------------------------------------------------------- refused at construction


class _Expanded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 2)
        self.w = nn.Parameter(torch.zeros(1, 2).expand(3, 2))


def _frozen_linear() -> nn.Module:
    return nn.Linear(3, 2).requires_grad_(False)


def _lazy() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(2))


def _refusal(rank: int, world: int, build: Any) -> str:
    return raised(lambda: DistributedDataParallel(build()))


@pytest.mark.filterwarnings("ignore:Lazy modules")
@pytest.mark.parametrize(
    ("build", "fragment"), [(_Expanded, "'w'"), (_frozen_linear, "requires a grad"), (_lazy, "uninitialized")]
)
def test_what_cannot_be_trained_is_refused(ranks: RankPool, build: Any, fragment: str) -> None:
    for text, _ in ranks.run_with_warnings(_refusal, build):
        assert text.startswith("RuntimeError")
        assert fragment in text


def _refused_on_one_rank(rank: int, world: int) -> str:
    return raised(lambda: DistributedDataParallel(_frozen_linear() if rank == 1 else nn.Linear(3, 2)))


def test_what_one_rank_cannot_train_is_refused_on_all(ranks: RankPool) -> None:
    for text in ranks(_refused_on_one_rank):
        assert "requires a grad" in text
        assert "rank 1" in text or text.startswith("RuntimeError")


# ----------------------------------------------------------------- frozen, unfrozen, replaced, added, ignored


def _partly_frozen(seed: int = 0) -> TwoLayers:
    module = in_quarters(TwoLayers(), seed)
    module.a.requires_grad_(False)
    return module


def _frozen_from_the_start(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(_partly_frozen(rank))
    assert torch.equal(ddp.module.a.weight, _partly_frozen(0).a.weight)


def test_frozen_parameters_follow_rank_0(ranks: RankPool) -> None:
    ranks(_frozen_from_the_start)
    assert_equal_replicas(ranks(train_alike, _partly_frozen, plain, exact=True))


def _changing(rank: int, world: int, change: Any, arguments: dict[str, Any]) -> str:
    """Train while ``change(module, optimizer, step)`` alters the module before some steps."""
    reference = OneProcess(Branches("ab"), world, sgd(0.25))
    ddp = DistributedDataParallel(Branches("ab"), **arguments)
    optimizer = sgd(0.25)(ddp.parameters())
    for step in range(7):
        change(ddp.module, optimizer, step)
        change(reference.module, reference.optimizer, step)
        for each in (optimizer, reference.optimizer):
            each.zero_grad()
        plain(ddp, rank, step)
        reference.run(plain, step)
        assert_same_gradients(ddp.module, reference.module, f"step {step}", exact=True)
        for each in (optimizer, reference.optimizer):
            each.step()
        assert_same_state(ddp.module, reference.module, f"step {step}", exact=True)
    return digest(ddp.module)


def _freeze_then_unfreeze(module: Branches, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step in (2, 4):
        module.b.requires_grad_(step == 4)


def _freeze_to_none(module: Branches, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Frozen one parameter after the other, each for two steps."""
    module.a.weight.requires_grad_(step not in (1, 2))
    module.b.bias.requires_grad_(step not in (2, 3))


def _add_a_layer(module: Branches, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 2:
        module.c = in_quarters(nn.Linear(3, 2), seed=5)
        module.names = "abc"
        optimizer.add_param_group({"params": list(module.c.parameters())})


def _replace_a_layer(module: Branches, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 2:
        module.b = in_quarters(nn.Linear(3, 2), seed=6)
        optimizer.add_param_group({"params": list(module.b.parameters())})


def _replace_a_parameter(module: Branches, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 3:
        module.a.weight = nn.Parameter(torch.full((2, 3), 0.25))
        optimizer.add_param_group({"params": [module.a.weight]})


def _remove_a_layer(module: Branches, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 3:
        del module.b
        module.names = "a"


@pytest.mark.parametrize("arguments", [{}, {"bucket_cap_mb": 1e-6}])
@pytest.mark.parametrize(
    "change",
    [
        _freeze_then_unfreeze,
        _freeze_to_none,
        _add_a_layer,
        _replace_a_layer,
        _replace_a_parameter,
        _remove_a_layer,
    ],
)
def test_parameters_that_change_after_wrapping(ranks: RankPool, change: Any, arguments: dict[str, Any]) -> None:
    assert_equal_replicas(ranks(_changing, change, arguments))


def _twice_reduced(rank: int, world: int, reduction: str, cap: float | None) -> str:
    """Sums and weighted means, while a layer is unfrozen and another one added before a step of two passes."""
    reference = OneProcess(Branches("ab"), world, sgd(1 / 64))
    ddp = DistributedDataParallel(Branches("ab"), reduction=reduction, bucket_cap_mb=cap)
    optimizer = sgd(1 / 64)(ddp.parameters())
    for step in range(5):
        for module, each in ((ddp.module, optimizer), (reference.module, reference.optimizer)):
            module.b.requires_grad_(step not in (0, 3))
            if step == 1:
                module.c = in_quarters(nn.Linear(3, 2), seed=5)
                module.names = "abc"
                each.add_param_group({"params": list(module.c.parameters())})
        num_backwards = 1 if reduction == "weighted" else 2
        for which in range(num_backwards):
            if reduction == "weighted":
                ddp.add_gradient_weight(rank + 2)
            sq(ddp(batch(rank, step, which=which))).backward()
        reference.run(
            lambda model, r, s: [sq(model(batch(r, s, which=which))).backward() for which in range(num_backwards)],  # noqa: B023
            step,
            5 if reduction == "weighted" else 1,
        )
        assert_same_gradients(ddp.module, reference.module, f"step {step}")
        for each in (optimizer, reference.optimizer):
            each.step()
            if step != 1:  # once with gradients carried over
                each.zero_grad()
    return digest(ddp.module)


@pytest.mark.parametrize("cap", [None, 1e-6])
@pytest.mark.parametrize("reduction", ["sum", "weighted"])
def test_parameters_that_change_with_sums(ranks: RankPool, reduction: str, cap: float | None) -> None:
    assert_equal_replicas(ranks(_twice_reduced, reduction, cap))


def _sparse_sum(rank: int, world: int) -> str:
    """Two synchronised backwards into a sparse table, in sums; then once more on top."""
    ddp = DistributedDataParallel(_SparseTable(), reduction="sum")
    reference = OneProcess(_SparseTable(), world)
    for step in range(3):
        _accumulated_rows(ddp, rank, step)
        reference.run(_accumulated_rows, step, 1)
        assert_same_gradients(ddp.module, reference.module, f"step {step}")
        if step:
            ddp.zero_grad()
            reference.module.zero_grad()
    return digest(ddp.module)


def _sums_carried_over_a_change(rank: int, world: int) -> str:
    """Nothing is ever cleared, while the dense layer is frozen for a step: what is synchronised stays synchronised."""
    ddp = DistributedDataParallel(_SparseTable(), reduction="sum")
    reference = OneProcess(_SparseTable(), world)
    for step in range(4):
        for module in (ddp.module, reference.module):
            module.a.requires_grad_(step != 1)
        _other_rows(ddp, rank, step)
        reference.run(_other_rows, step, 1)
        assert_same_gradients(ddp.module, reference.module, f"step {step}")
    return digest(ddp.module)


def test_sums_carried_over_a_change(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(_sums_carried_over_a_change))


def test_sums_of_sparse_gradients(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(_sparse_sum))


def _added_with_other_values(rank: int, world: int) -> list[str]:
    """The ranks add a layer with different values; they must not train on as if they were replicas."""
    ddp = DistributedDataParallel(Branches("ab"))
    plain(ddp, rank, 0)
    ddp.module.c = in_quarters(nn.Linear(3, 2), seed=rank)
    ddp.module.names = "abc"
    try:
        plain(ddp, rank, 1)
    except Exception as error:
        return [str(error), ""]
    return ["", digest(ddp.module)]


def test_a_layer_added_with_other_values_is_told_or_made_equal(ranks: RankPool) -> None:
    first, second = ranks(_added_with_other_values)
    assert first == second or ("c.weight" in first[0] and "c.weight" in second[0])


def _changed_on_one_rank(rank: int, world: int) -> str:
    ddp = DistributedDataParallel(Branches("ab"))
    plain(ddp, rank, 0)
    if rank == 1:
        ddp.module.b.weight.requires_grad_(False)
    return raised(lambda: plain(ddp, rank, 1))


def test_a_parameter_frozen_on_one_rank_only_is_told_on_all(ranks: RankPool) -> None:
    for text in ranks(_changed_on_one_rank):
        assert "b.weight" in text


def _ignored(rank: int, world: int) -> None:
    module = in_quarters(Branches("ab"))
    in_quarters(module.b, seed=rank)
    mine = module.b.weight.detach().clone()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["b.weight", "b.bias"])
    ddp = DistributedDataParallel(module)
    assert torch.equal(module.b.weight, mine)
    local, reference = in_quarters(Branches("ab")), OneProcess(in_quarters(Branches("ab")), world)
    in_quarters(local.b, seed=rank)
    in_quarters(reference.module.b, seed=rank)
    plain(ddp, rank, 0)
    plain(local, rank, 0)
    for p, q in zip(module.b.parameters(), local.b.parameters(), strict=True):
        assert_near(p.grad, q.grad, "ignored", exact=True)
    # the gradient of a depends on the output, and so on each rank's own b
    replicas = [in_quarters(Branches("ab")) for _ in range(world)]
    for r, replica in enumerate(replicas):
        in_quarters(replica.b, seed=r)
        plain(replica, r, 0)
    mean = (replicas[0].a.weight.grad + replicas[1].a.weight.grad) / 2
    assert_near(module.a.weight.grad, mean, "a.weight", exact=True)


def test_ignored_parameters_stay_local(ranks: RankPool) -> None:
    ranks(_ignored)
