"""The MPI backend on processes that ``mpiexec`` has started: the jobs that every group has to do, and failures."""

import importlib.util
import multiprocessing
import os
import shutil
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

import gradsync
from gradsync.comm import mpi
from gradsync.comm.backends import choose_backend
from gradsync.errors import MissingExtraError

_FOLDER = Path(__file__).parent
_MPIEXEC = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
_OPERATIONS = [
    f"test_shm_operations:{name}"
    for name in (
        "all_reduce_everything=[0,1,7,9000]",
        "move_everything",
        "reduce_everything",
        "all_to_all_of_uneven_parts",
        "tensors_that_are_not_contiguous",
        "collect_objects",
        "sparse_sum",
        "one_rank",
    )
]
_ON_TWO = [
    "mpi_jobs:default_group_is_mpi",
    "test_shm_operations:wrong_arguments",
    *(
        f"test_shm_async:{name}"
        for name in (
            "work_in_any_order",
            "completes_unattended",
            "issue_never_blocks",
            "futures",
            "impatient",
            "from_threads",
            "inputs_are_kept",
            "messages",
            "tags_and_order",
            "many_unread_messages",
            "future_of_a_message",
            "coalesced",
        )
    ),
    *(
        f"test_shm_clients:{name}"
        for name in ("torch_ddp", "torch_ddp_hooks", "fsdp2", "tensor_parallel", "pipeline", "functional_collectives")
    ),
    "mpi_jobs:gradsync_ddp",
    "mpi_jobs:gradsync_zero",
    "mpi_jobs:never_joins",
]
_ON_THREE = [
    "test_shm_operations:sums_in_sub_groups",
    "test_shm_async:from_anybody",
    "mpi_jobs:gradsync_ddp",
    *(f"mpi_jobs:{name}" for name in ("late", "given_up", "elsewhere", "aborted", "message_nobody_sends")),
    "mpi_jobs:message_of_a_group_that_is_given_up",
    "mpi_jobs:late_to_a_private_group",
]

needs_mpi = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None or _MPIEXEC is None,
    reason="needs mpi4py and an mpiexec (pip install mpi4py mpich)",
)
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


def mpiexec(num_ranks: int, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(_FOLDER.parents[1] / "src"), *sys.path]),
        **variables,
    }
    return subprocess.run(
        [str(_MPIEXEC), "-n", str(num_ranks), sys.executable, *command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )


def run_jobs(num_ranks: int, jobs: list[str], **variables: str) -> None:
    result = mpiexec(num_ranks, str(_FOLDER / "mpi_ranks.py"), *jobs, **variables)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    assert [line.removeprefix("passed ") for line in result.stdout.splitlines() if line.startswith("passed")] == jobs


@needs_mpi
def test_every_operation_and_every_client_on_two_ranks() -> None:
    run_jobs(2, _OPERATIONS + _ON_TWO)


@needs_mpi
def test_gloo_meets_at_the_address_that_mpi_hands_round() -> None:
    job = "mpi_jobs:default_group_is_gloo"
    result = mpiexec(2, str(_FOLDER / "mpi_ranks.py"), job, GRADSYNC_TEST_BACKEND="gloo")
    # Not the exit code: on a crowded machine threads of torch have been seen to abort a process at its very end.
    assert f"passed {job}" in result.stdout, f"{result.stdout}\n{result.stderr}"


@needs_mpi
def test_more_ranks_than_cores_then_failures_that_are_named_within_the_time_limit_and_no_rank_stays() -> None:
    result = mpiexec(3, str(_FOLDER / "mpi_ranks.py"), *_ON_THREE)
    assert result.stdout.count("passed") == len(_ON_THREE), f"{result.stdout}\n{result.stderr}"
    assert result.returncode != 0  # operations are left in MPI that will never end


@needs_mpi
@pytest.mark.parametrize(("job", "sign"), [("raises", "something is wrong here"), ("dies", "")])
def test_a_rank_that_ends_badly_ends_all(job: str, sign: str) -> None:
    result = mpiexec(2, str(_FOLDER / "mpi_ranks.py"), f"mpi_jobs:{job}")
    assert result.returncode != 0
    assert sign in result.stdout + result.stderr


@needs_mpi
def test_ranks_that_no_mpiexec_has_started_are_told_so(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=_begin_by_itself, args=(tmp_path, rank)) for rank in range(2)]
    for process in ranks:
        process.start()
    for rank, process in enumerate(ranks):
        process.join(60)
        told = (tmp_path / f"{rank}.txt").read_text()
        assert f"rank {rank} is one of 2 ranks of a group over MPI, but MPI knows 1 process(es)" in told


def _begin_by_itself(folder: Path, rank: int) -> None:
    try:
        gradsync.init_process_group("mpi", f"file://{folder / 'store'}", timedelta(seconds=30), 2, rank)
    except Exception as error:
        (folder / f"{rank}.txt").write_text(str(error))
    os._exit(0)


@needs_mpi
@pytest.mark.slow
def test_train_takes_its_ranks_from_mpiexec(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"The {n}th line of {n * n} lines.\n" for n in range(400)))
    small = ["--context", "16", "--batch-tokens", "128", "--width", "16", "--heads", "2", "--layers", "1"]
    small += ["--eval-tokens", "256", "--sample-tokens", "0", "--steps", "3", "--tensorboard", "false"]
    command = ["-m", "gradsync", "train", "--data", str(tmp_path / "text.txt"), *small]
    result = mpiexec(2, *command, "--run", str(tmp_path / "run"))
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    assert "process group: mpi4py, 2 rank(s)" in result.stderr
    assert result.stdout.count("finished step 3 of 3") == 1
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3


@needs_mpi
@pytest.mark.slow
def test_what_all_ranks_fail_of_is_told_once_and_the_store_stays_until_all_have_left(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"The {n}th line of {n * n} lines.\n" for n in range(400)))
    small = ["--context", "16", "--batch-tokens", "128", "--width", "16", "--heads", "2", "--layers", "1"]
    wrong = ["--lr", "1e30", "--clip", "0", "--data", str(tmp_path / "text.txt"), "--run", str(tmp_path / "run")]
    result = mpiexec(2, "-m", "gradsync", "train", *small, *wrong)
    assert result.returncode == 1
    assert result.stderr.count("gradsync train: error: step 2: the loss is not finite") == 1
    assert "Exception raised" not in result.stderr  # torch's, on a store that is gone


@needs_mpi
@pytest.mark.slow
def test_prove_and_doctor_try_what_a_run_under_mpiexec_would_take() -> None:
    proof = mpiexec(2, "-m", "gradsync", "prove", "--steps", "1")
    assert proof.returncode == 0, f"{proof.stdout}\n{proof.stderr}"
    assert proof.stdout.count("a small GPT-2, 1 step over mpi4py") == 1
    assert proof.stdout.count("10 of 10 rows passed") == 1
    doctor = mpiexec(2, "-m", "gradsync", "doctor")
    assert "mpi4py works over 2 rank(s)" in doctor.stdout, f"{doctor.stdout}\n{doctor.stderr}"


def test_without_mpi4py_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mpi, "is_available", lambda: "mpi4py is not installed: pip install 'gradsync[mpi]'")
    if dist.is_mpi_available():
        pytest.skip("this torch brings MPI itself")
    with pytest.raises(MissingExtraError, match=r"backend 'mpi' was asked for, but mpi4py is not installed.*\[mpi\]"):
        choose_backend("mpi")
    assert choose_backend("auto", "mpiexec").name != "mpi4py"
