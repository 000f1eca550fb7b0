"""Layouts as a user chooses them: options in, the same numbers out, one run under several of them."""

import json

import pytest
from commands import SMALL, gradsync

from gradsync.cli.main import main

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]


def losses(run):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_changes_its_layout_and_computes_the_same(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("".join(f"The {n}th line of {n * n} lines.\n" for n in range(400)))
    small = ["train", "--data", "text.txt", *SMALL, "--layers", "2", "--steps", "4"]
    monkeypatch.chdir(tmp_path)
    assert main([*small, "--run", "alone", "--nproc", "1"]) == 0  # in this process
    first = gradsync(*small, "--run", "spread", "--nproc", "2", "--strategy", "fsdp", "--stop-after", "2", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "layout: fsdp; 2 replica(s) x 1 slice(s) of tensors x 1 stage(s)" in first.stderr
    # No --nproc: the degrees say how many processes there are.
    rest = ["--resume", "--run", "spread", "--strategy", "ddp", "--dp", "1", "--pp", "2"]
    second = gradsync("train", *rest, cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    assert "layout: ddp; 1 replica(s) x 1 slice(s) of tensors x 2 stage(s)" in second.stderr
    assert losses(tmp_path / "spread") == pytest.approx(losses(tmp_path / "alone"), abs=1e-5)
    assert (tmp_path / "spread" / "samples" / "step-00000004.txt").is_file()
