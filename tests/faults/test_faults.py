"""Whatever happens to a rank: all end soon, the cause is named, nothing is left, and the run can go on.

Every kind of fault at every point and on each backend is marked ``stress``; here each kind, each point and each backend
comes at least once, in other company each.
"""

import os
import random
import sys
from pathlib import Path

import pytest
from fault_rank import config_of
from harness import check, run_once
from injector import Fault, all_faults

from training_jobs import losses, write_text

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="stops, limits and inspects processes as Linux does"),
]
BACKENDS = ["gloo", "shm"]

IN_CI = [
    ("gloo", Fault("raise", "data")),
    ("shm", Fault("raise", "backward")),
    ("gloo", Fault("kill", "between buckets")),
    ("shm", Fault("kill", "saving")),
    ("shm", Fault("stop", "forward")),
    ("gloo", Fault("pause", "optimizer")),
    ("shm", Fault("hang", "data", rank=0)),
    ("gloo", Fault("drop", "forward")),
    ("shm", Fault("disk", "saving")),
    ("gloo", Fault("corrupt", "saving", rank=0)),
    ("shm", Fault("descriptors", "after rendezvous")),
    ("gloo", Fault("store", "forward")),
    ("gloo", Fault("raise", "before rendezvous")),
    ("shm", Fault("raise", "evaluation", rank=0)),
    ("gloo", Fault("kill", "shutdown")),
]


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("unbroken")
    write_text(folder)
    outcomes = run_once(folder, "gloo")
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], outcomes
    return losses(config_of(folder, False))


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "fault"), IN_CI, ids=str)
def test_struck(tmp_path: Path, unbroken: list[float], backend: str, fault: Fault) -> None:
    check(tmp_path, backend, fault, unbroken)


@pytest.mark.stress
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("fault", all_faults(0) + all_faults(1), ids=str)
def test_every_combination(tmp_path: Path, unbroken: list[float], backend: str, fault: Fault) -> None:
    check(tmp_path, backend, fault, unbroken)


def draw(seed: int) -> tuple[str, Fault]:
    chance = random.Random(seed)
    kind, point = "", ""
    while not Fault(kind, point).is_possible or not kind:
        found = chance.choice(all_faults())
        kind, point = found.kind, found.point
    return chance.choice(BACKENDS), Fault(kind, point, chance.randrange(2), chance.randrange(1, 7))


FIRST_SEED = int(os.environ.get("FAULTS_SEED", random.SystemRandom().randrange(10**6)))
NUM_ROUNDS = int(os.environ.get("FAULTS_ROUNDS", 2))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(NUM_ROUNDS))
def test_a_random_fault(tmp_path: Path, unbroken: list[float], number: int) -> None:
    """``FAULTS_SEED`` repeats a round: its number is 0 then."""
    backend, fault = draw(FIRST_SEED + number)
    print(f"FAULTS_SEED={FIRST_SEED + number}: {fault} of step {fault.after}, on {backend}")
    check(tmp_path, backend, fault, unbroken)
