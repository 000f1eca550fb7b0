"""Whatever happens to a rank: all end soon, the cause is named, nothing is left, and the run can go on.

Every kind of fault at every point and on each backend is marked ``stress``; here each kind, each point and each backend
comes at least once, in other company each. What MPI's own launcher has a say in is in ``test_faults_of_mpi``.
"""

import os
import random
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fault_rank import config_of
from harness import check, run_once
from injector import Fault, all_faults, draw

from training_jobs import losses, write_text

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="stops, limits and inspects processes as Linux does"),
]
BACKENDS = ["gloo", "shm"]
STRATEGIES = ["ddp", "zero"]
BESIDE = {"async_checkpoints": True, "strategy": "ddp"}
BETWEEN = {"async_checkpoints": False, "strategy": "ddp"}
"""When checkpoints are written: beside the training, as is usual, or between two steps."""

Unbroken = Callable[[str], list[float]]

IN_CI = [
    ("gloo", Fault("raise", "data"), BESIDE),
    ("shm", Fault("raise", "backward"), BETWEEN),
    ("gloo", Fault("kill", "between buckets"), BESIDE),
    ("shm", Fault("kill", "saving", 0, 5), BESIDE),  # the manifest is there, the name is not
    ("gloo", Fault("kill", "saving", 1, 3), BETWEEN),
    ("shm", Fault("stop", "forward"), BESIDE),
    ("gloo", Fault("pause", "optimizer"), BETWEEN),
    ("shm", Fault("hang", "data", rank=0), BESIDE),
    ("gloo", Fault("hang", "saving", 1, 2), BESIDE),
    ("gloo", Fault("drop", "forward"), BESIDE),
    ("shm", Fault("disk", "saving", 1, 1), BETWEEN),
    ("gloo", Fault("disk", "saving", 0, 2), BESIDE),
    ("gloo", Fault("corrupt", "saving", 0, 9), BETWEEN),
    ("shm", Fault("descriptors", "after rendezvous"), BESIDE),
    ("gloo", Fault("store", "forward"), BETWEEN),
    ("gloo", Fault("raise", "before rendezvous"), BESIDE),
    ("gloo", Fault("kill", "after rendezvous"), BESIDE),
    ("shm", Fault("raise", "evaluation", rank=0), {**BESIDE, "strategy": "zero"}),
    ("gloo", Fault("kill", "shutdown"), BESIDE),
    ("shm", Fault("kill", "data", rank=0), {**BESIDE, "serves_itself": True}),
]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Unbroken:
    """The losses of a run that nothing happens to, by strategy."""

    @cache
    def run(strategy: str) -> list[float]:
        folder = tmp_path_factory.mktemp("unbroken")
        write_text(folder)
        outcomes = run_once(folder, "gloo", strategy=strategy)
        assert [outcome.exit_code for outcome in outcomes] == [0, 0], outcomes
        return losses(config_of(folder))

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "fault", "options"), IN_CI, ids=str)
def test_struck(tmp_path: Path, unbroken: Unbroken, backend: str, fault: Fault, options: dict[str, Any]) -> None:
    check(tmp_path, backend, fault, unbroken(options["strategy"]), **options)


@pytest.mark.stress
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fault", all_faults(0) + all_faults(1), ids=str)
def test_every_combination(tmp_path: Path, unbroken: Unbroken, backend: str, fault: Fault) -> None:
    check(tmp_path, backend, fault, unbroken("ddp"), **BESIDE)


@pytest.mark.stress
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["raise", "kill", "stop", "hang", "drop"])
def test_the_store_is_in_the_rank_that_is_struck(tmp_path: Path, unbroken: Unbroken, backend: str, kind: str) -> None:
    check(tmp_path, backend, Fault(kind, "forward", 0), unbroken("ddp"), serves_itself=True, **BESIDE)


FIRST_SEED = int(os.environ.get("FAULTS_SEED", random.SystemRandom().randrange(10**6)))
NUM_ROUNDS = int(os.environ.get("FAULTS_ROUNDS", 2))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(NUM_ROUNDS))
def test_a_random_fault(tmp_path: Path, unbroken: Unbroken, number: int) -> None:
    """``FAULTS_SEED`` repeats a round: its number is 0 then."""
    chance = random.Random(FIRST_SEED + number)
    fault, backend = draw(chance), chance.choice(BACKENDS)
    options = {"async_checkpoints": chance.random() < 0.7, "strategy": chance.choice(STRATEGIES)}
    print(f"FAULTS_SEED={FIRST_SEED + number}: {fault} the {fault.after}th time, on {backend}, {options}")
    check(tmp_path, backend, fault, unbroken(options["strategy"]), **options)
