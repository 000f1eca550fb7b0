"""The soft limit holds in every layout, where torch's own collectives wait, and names who is behind."""

import sys
from pathlib import Path
from typing import Any

import pytest
from harness import run_once
from injector import Fault

from training_jobs import write_text

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="stops and inspects processes as Linux does"),
]


@pytest.mark.parametrize(
    ("backend", "fault", "layout"),
    [
        ("gloo", Fault("stop", "data"), {"tp": 2}),
        ("gloo", Fault("hang", "data", rank=0), {"pp": 2}),
        ("gloo", Fault("stop", "optimizer"), {"strategy": "fsdp"}),
        ("shm", Fault("hang", "optimizer"), {"pp": 2}),
        ("shm", Fault("stop", "data", rank=0), {"strategy": "fsdp"}),
        ("shm", Fault("hang", "evaluation"), {"tp": 2}),
    ],
    ids=str,
)
def test_a_rank_that_stands_still_ends_all_and_is_named(
    tmp_path: Path, backend: str, fault: Fault, layout: dict[str, Any]
) -> None:
    write_text(tmp_path)
    outcomes = run_once(tmp_path, backend, fault, **layout)
    other = outcomes[1 - fault.rank]
    assert [outcome.exit_code == 0 for outcome in outcomes] == [False, False], outcomes
    assert other.kind == "StalledError", other
    assert f"the odd one out is rank {fault.rank}: " in other.text
    phase = "optimizer" if fault.point == "optimizer" else fault.point
    if fault.kind == "hang":  # who is stopped says nothing
        assert f"rank {fault.rank}: step {3 if phase == 'evaluation' else 4}, {phase}" in other.text
        assert "injector.py" in other.text and "time.sleep(HANG_S)" in other.text


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=str)
def test_a_pause_shorter_than_the_limit_is_survived(tmp_path: Path, layout: dict[str, Any]) -> None:
    write_text(tmp_path)
    outcomes = run_once(tmp_path, "gloo", Fault("pause", "data"), **layout)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], outcomes
