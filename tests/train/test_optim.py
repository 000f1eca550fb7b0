"""The schedule as a function of the optimizer step."""

import pytest
import torch

from gradsync.train.optim import Schedule, set_lr

GPT2 = Schedule(peak=6e-4, min_fraction=0.1, warmup_steps=715, total_steps=19_073)


def test_the_published_schedule():
    assert GPT2.lr_at(0) == pytest.approx(6e-4 / 715)
    assert GPT2.lr_at(714) == GPT2.lr_at(715) == 6e-4
    assert GPT2.lr_at((715 + 19_073) // 2) == pytest.approx((6e-4 + 6e-5) / 2, rel=1e-3)
    assert GPT2.lr_at(19_073) == pytest.approx(6e-5)


def test_it_rises_and_then_falls():
    rates = [GPT2.lr_at(step) for step in range(0, 19_073, 50)]
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1])
    assert rates[top:] == sorted(rates[top:], reverse=True)


def test_short_runs_and_no_warm_up():
    assert Schedule(1.0, 0.0, warmup_steps=0, total_steps=2).lr_at(0) == 1.0
    assert Schedule(1.0, 0.5, warmup_steps=5, total_steps=5).lr_at(4) == 1.0
    assert Schedule(1.0, 0.5, warmup_steps=9, total_steps=3).lr_at(2) == pytest.approx(3 / 9)


def test_every_group_gets_the_rate():
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    set_lr(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
