"""A backward that raises: the exception is the user's own, and training goes on where it can."""

from typing import Any

import pytest
import torch
from reference import (
    OneProcess,
    assert_equal_replicas,
    assert_same_gradients,
    batch,
    digest,
    in_quarters,
    plain,
    raised,
    sgd,
    sq,
)
from torch import nn

from gradsync import DistributedDataParallel
from rank_pool import RankPool


class _MayRaise(nn.Module):
    """Layers a, b, c; the backward raises between two of them while ``fuse`` is lit."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.fuse: list[str] = []
        in_quarters(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self._guarded(self.a(x), "between a and b"))
        x = torch.tanh(self._guarded(self.b(x), "between b and c"))
        return self._guarded(self.c(x), "at once")

    def _guarded(self, x: torch.Tensor, where: str) -> torch.Tensor:
        def hook(_: torch.Tensor) -> None:
            if where in self.fuse:
                raise KeyError(f"blown {where}")

        if x.requires_grad:
            x.register_hook(hook)
        return x


_PLACES = ["at once", "between b and c", "between a and b"]


def _caught_on_all(rank: int, world: int, place: str, cap: float | None, clears: bool) -> str:
    ddp = DistributedDataParallel(_MayRaise(), bucket_cap_mb=cap)
    reference = OneProcess(_MayRaise(), world, sgd(0.25))
    optimizer = sgd(0.25)(ddp.parameters())
    for step in range(6):
        optimizer.zero_grad()
        if step in (0, 2, 3):
            ddp.module.fuse = [place]
            with pytest.raises(KeyError, match="blown"):
                plain(ddp, rank, 100 + step)
            ddp.module.fuse = []
            if clears:
                optimizer.zero_grad()
        plain(ddp, rank, step)
        reference.run(plain, step)
        assert_same_gradients(ddp.module, reference.module, f"step {step}", exact=True)
        optimizer.step()
        reference.optimizer.step()
        reference.optimizer.zero_grad()
    return digest(ddp.module)


@pytest.mark.parametrize("cap", [None, 1e-6])
@pytest.mark.parametrize("place", _PLACES)
def test_caught_on_all_ranks(ranks: RankPool, place: str, cap: float | None) -> None:
    assert_equal_replicas(ranks(_caught_on_all, place, cap, True))


def _weights_of_an_interrupted_backward(rank: int, world: int, cap: float | None) -> str:
    """A weight that was given for a backward that raised is gone with its gradients; the next one counts."""
    ddp = DistributedDataParallel(_MayRaise(), reduction="weighted", bucket_cap_mb=cap)
    reference = OneProcess(_MayRaise(), world)
    for step in range(3):
        ddp.module.fuse = ["between b and c"]
        ddp.add_gradient_weight(100)
        with pytest.raises(KeyError, match="blown"):
            plain(ddp, rank, 50)
        ddp.module.fuse = []
        ddp.zero_grad()
        ddp.add_gradient_weight(rank + 1)
        plain(ddp, rank, step)
        reference.run(plain, step, 3)
        assert_same_gradients(ddp.module, reference.module, f"step {step}")
        ddp.zero_grad()
        reference.module.zero_grad()
    return digest(ddp.module)


@pytest.mark.parametrize("cap", [None, 1e-6])
def test_weights_of_an_interrupted_backward(ranks: RankPool, cap: float | None) -> None:
    assert_equal_replicas(ranks(_weights_of_an_interrupted_backward, cap))


def _raised_on_one(rank: int, world: int, place: str, cap: float | None) -> list[str]:
    """Rank 1's backward raises; rank 0 is told in the same pass, and both go on after clearing."""
    ddp = DistributedDataParallel(_MayRaise(), bucket_cap_mb=cap)
    reference = OneProcess(_MayRaise(), world, sgd(0.25))
    optimizer = sgd(0.25)(ddp.parameters())
    texts = []
    for step in range(3):
        plain(ddp, rank, step)
        optimizer.zero_grad()
    if rank == 1:
        ddp.module.fuse = [place]
    texts.append(raised(lambda: plain(ddp, rank, 7)))
    ddp.module.fuse = []
    if rank == 1:  # the next pass tells this rank, too, that the others have dropped theirs
        texts.append(raised(lambda: ddp(batch(rank, 8))))
    optimizer.zero_grad()
    for step in range(3):
        plain(ddp, rank, step)
        reference.run(plain, step)
        assert_same_gradients(ddp.module, reference.module, f"step {step}", exact=True)
        for each in (optimizer, reference.optimizer):
            each.step()
            each.zero_grad()
    return texts


# An exception before backward has reached the wrapper is a backward that this rank has left out; see uneven work.
@pytest.mark.parametrize("cap", [None, 1e-6])
@pytest.mark.parametrize("place", _PLACES[1:])
def test_raised_on_one_rank(ranks: RankPool, place: str, cap: float | None) -> None:
    told, (own, later) = ranks(_raised_on_one, place, cap)
    assert "rank(s) 1" in told[0]
    assert "raised" in told[0]
    assert "KeyError" in own
    assert "rank(s) 0" in later


def _before_anything(rank: int, world: int) -> None:
    """A forward that raises, caught on all ranks, leaves nothing behind."""
    ddp = DistributedDataParallel(_MayRaise())
    reference = OneProcess(_MayRaise(), world)
    for step in range(3):
        with pytest.raises(RuntimeError):
            ddp(torch.ones(2, 7))
        plain(ddp, rank, step)
        reference.run(plain, step)
        assert_same_gradients(ddp.module, reference.module, f"step {step}", exact=True)
        ddp.zero_grad()
        reference.module.zero_grad()


def test_an_exception_in_forward_caught_on_all_ranks(ranks: RankPool) -> None:
    ranks(_before_anything)


def _in_no_sync(rank: int, world: int) -> str:
    """A backward that raises inside no_sync on one rank concerns nobody else."""
    ddp = DistributedDataParallel(_MayRaise())
    reference = OneProcess(_MayRaise(), world)
    if rank == 1:
        ddp.module.fuse = ["between b and c"]
        with pytest.raises(KeyError), ddp.no_sync():
            plain(ddp, rank, 50)
        ddp.module.fuse = []
    ddp.zero_grad()
    plain(ddp, rank, 0)
    reference.run(plain, 0)
    assert_same_gradients(ddp.module, reference.module, exact=True)
    return digest(ddp.module)


def test_an_exception_inside_no_sync_on_one_rank(ranks: RankPool) -> None:
    assert_equal_replicas(ranks(_in_no_sync))


def _interrupted_by_the_end(rank: int, world: int) -> Any:
    """The wrapper may be dropped right after a backward that raised everywhere."""
    ddp = DistributedDataParallel(_MayRaise(), bucket_cap_mb=1e-6)
    plain(ddp, rank, 0)
    ddp.module.fuse = ["between a and b"]
    with pytest.raises(KeyError):
        sq(ddp(batch(rank, 1))).backward()
    del ddp
    fresh = DistributedDataParallel(_MayRaise())
    reference = OneProcess(_MayRaise(), world)
    plain(fresh, rank, 0)
    reference.run(plain, 0)
    assert_same_gradients(fresh.module, reference.module, exact=True)


def test_a_wrapper_dropped_after_an_exception(ranks: RankPool) -> None:
    ranks(_interrupted_by_the_end)
