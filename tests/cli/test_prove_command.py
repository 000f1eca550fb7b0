"""``gradsync prove`` as a user runs it: the table, the exit code, and rows that go on after one has failed."""

from itertools import groupby

import pytest
from commands import gradsync

from gradsync.cli import prove
from gradsync.cli.main import main

pytestmark = pytest.mark.timeout(300)

_OWN = """
import torch
from torch import nn


def mean():
    return nn.Linear(4, 2), torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


def watched():
    # each rank writes down over what it computes
    def loss(module, batch):
        if torch.distributed.is_initialized():
            with open(f"rank-{torch.distributed.get_rank()}.txt", "a") as file:
                print(torch.distributed.get_backend(), file=file)
        return module(batch).square().mean()

    return (*mean(), loss)


def hopeless():
    def loss(module, batch):
        raise ValueError("not this one")

    return (*mean(), loss)


def broken():
    def loss(module, batch):
        if hasattr(module, "reducer") and module.reducer.sharding is not None:
            raise ZeroDivisionError("my loss fails under ZeRO")
        if hasattr(module, "reducer") and len(batch) == 2 and module.require_backward_grad_sync:
            return module(batch).square().sum()
        return module(batch).square().mean()

    return (*mean(), loss)
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "own.py").write_text(_OWN)
    return tmp_path


@pytest.mark.slow
def test_a_users_model_passes_and_what_needs_more_processes_is_said(folder, run_here):
    done = run_here("prove", "--model", "own:mean", "--nproc", "2", "--steps", "2", "--backend", "gloo")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "7 of 7 rows passed" in done.stdout
    assert "left out: DDP on 4 (needs 4 processes; --nproc is 2)" in done.stdout
    assert "tensor parallel" not in done.stdout


@pytest.mark.slow
def test_each_backend_carries_the_rows_that_have_its_name(folder, run_here):
    first, *others = backends = prove._backends("cpu")
    done = run_here("prove", "--model", "own:watched", "--nproc", "2", "--steps", "1", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"own:watched, 1 step over {first}: " in done.stdout
    assert [name for name in others if f"DDP on 2, {name}" not in done.stdout] == []
    for rank in range(2):
        used = (folder / f"rank-{rank}.txt").read_text().split()
        assert [name for name, _ in groupby(used)] == backends


@pytest.mark.slow
def test_a_row_that_fails_is_named_and_the_others_go_on(folder, run_here):
    done = run_here("prove", "--model", "own:broken", "--nproc", "2", "--steps", "1", "--backend", "gloo")
    assert done.returncode == 1
    assert "FAILED DDP, accumulation: the first parameter beyond tolerance is " in done.stdout
    assert "FAILED ZeRO: --model own:broken: ZeroDivisionError: my loss fails under ZeRO (own.py:" in done.stdout
    assert "5 of 7 rows passed" in done.stdout


def test_a_model_that_fails_by_itself_is_no_row_that_fails(folder):
    done = gradsync("prove", "--model", "own:hopeless", "--nproc", "1", "--backend", "gloo", cwd=folder)
    assert (done.returncode, done.stdout) == (1, "")
    told = "gradsync prove: error: --model own:hopeless: ValueError: not this one (own.py:"
    assert [line for line in done.stderr.splitlines() if told in line] == done.stderr.splitlines()[-1:]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc", "0"], "--nproc and --steps must be at least 1"),
        (["--model", "nowhere:f"], "give MODULE:FUNCTION"),
        (["--device", "cuda", "--nproc", "999"], "lower --nproc"),
        (["--backend", "tin-cans"], "backend 'tin-cans' is unknown"),
    ],
)
def test_refusals_come_before_anything_is_started(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(prove, "_launch", lambda *_: pytest.fail("started"))
    assert main(["prove", *arguments]) == 2
    assert message in capsys.readouterr().err
