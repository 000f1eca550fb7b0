"""``gradsync doctor`` as a user runs it on one machine."""

import json
from pathlib import Path

import pytest
from commands import gradsync

from gradsync.cli.main import main


@pytest.mark.distributed
def test_a_healthy_machine(tmp_path: Path) -> None:
    result = gradsync("doctor", "--json", "all.json", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    for line in ("gloo works over 2 rank(s)", "the ranks reach each other (1 pair(s) tried)", "0 - 1"):
        assert line in result.stdout
    told = json.loads((tmp_path / "all.json").read_text())
    assert {finding["level"] for finding in told["findings"]} <= {"ok", "note"}
    assert [rank["rank"] for rank in told["ranks"]] == [0, 1] and told["ways"][0]["latency_s"] > 0


def test_nonsense_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--nproc", "0"]) == 2
    assert "--nproc must be at least 1" in capsys.readouterr().err
