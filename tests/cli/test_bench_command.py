"""``gradsync bench`` as a user runs it: everybody is measured, in one run, and the samples are in the file."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from commands import TIMEOUT_S, environment, python, running

from gradsync.bench.rounds import Contestant, Timing
from gradsync.bench.variants import Variant
from gradsync.cli.bench_tables import Result, print_table
from gradsync.cli.main import main
from gradsync.comm import shm

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs the backend is NCCL"),
    pytest.mark.skipif(shm.is_available() is not None, reason="no shared memory between processes here"),
]

_OWN = """
import torch
from torch import nn


def mean():
    return nn.Linear(4, 2), torch.randn(16, 4)
"""


@pytest.mark.slow
def test_all_contestants_are_timed_in_one_run(tmp_path, run_here):
    done = run_here("bench", "--workload", "toy", "--rounds", "1", "--threads-variant", "--json", "out.json")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())["workloads"][0]
    engines = [f"{engine}/{backend}" for backend in ("gloo", "shm") for engine in ("torch", "gradsync", "zero")]
    assert list(result["step_s"]) == ["bare", *engines, "threads"]
    assert all(len(samples) == 1 and min(samples) > 0 for samples in result["step_s"].values())
    for engine in engines:
        assert result["exposed_s"][engine] >= 0
        assert engine in done.stdout


@pytest.mark.slow
def test_a_users_model_and_the_memory_of_each(tmp_path, run_here):
    (tmp_path / "own.py").write_text(_OWN)
    only = ("--only", "gradsync/shm", "--memory", "--json", "out.json")
    done = run_here("bench", "--model", "own:mean", "--rounds", "1", *only)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())["workloads"][0]
    assert set(result["step_s"]) == {"bare", "gradsync/shm"}
    assert min(result["peak_bytes"].values()) > 2**20


@pytest.mark.slow
def test_each_contestant_in_processes_of_its_own(tmp_path, run_here):
    chosen = ("--workload", "toy", "--only", "gradsync/shm", "--rounds", "2", "--isolate", "--memory")
    done = run_here("bench", *chosen, "--json", "out.json")
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "out.json").read_text())["workloads"][0]
    assert all(len(samples) == 2 and min(samples) > 0 for samples in result["step_s"].values())
    assert result["exposed_s"]["bare"] is None
    assert result["exposed_s"]["gradsync/shm"] >= 0
    assert set(result["peak_bytes"]) == {"bare", "gradsync/shm"}
    assert min(result["peak_bytes"].values()) > 2**20


def test_the_ratio_of_steps_is_said_to_be_that_of_the_rounds(capsys):
    torchs = Timing(Contestant(Variant.TORCH, "gloo"), [1.0, 2.0, 4.0])
    ours = Timing(Contestant(Variant.GRADSYNC, "gloo"), [0.5, 2.0, 3.0])  # the medians are equal
    bare = Timing(Contestant(Variant.BARE), [0.1, 0.1, 0.1])
    print_table(Result("toy", 2, [bare, torchs, ours], {}))
    told = capsys.readouterr().out
    assert "0.750" in told and "the median of the rounds' ratios, and not the ratio of the two medians" in told
    print_table(Result("toy", 2, [bare, ours], {}))
    assert "ratio" not in capsys.readouterr().out


@pytest.mark.slow
def test_collectives_in_shared_memory_and_in_memory_of_their_own(tmp_path, run_here):
    done = run_here("bench", "collectives", "--max-mib", "0.01", "--rounds", "1", "--json", "out.json")
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())["collectives"]
    kinds = {(row["operation"], row["backend"]) for row in rows}
    operations = ("all_reduce", "reduce_scatter", "all_gather", "broadcast")
    assert kinds == {(operation, way) for operation in operations for way in ("gloo", "shm", "shm*")}


@pytest.mark.slow
def test_ctrl_c_ends_all_ranks_with_its_code(tmp_path):
    with running("bench", "--workload", "toy", "--rounds", "100000", cwd=tmp_path) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while len(children.read_text().split()) < 2:  # until the server that forks the ranks is there
            assert process.poll() is None
            time.sleep(0.1)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 130


@pytest.mark.parametrize(
    "arguments",
    [
        ("--workload", "nothing"),
        ("--only", "torch/nothing"),
        ("--rounds", "0"),
        ("collectives", "--rounds", "0"),
        ("collectives", "--nproc", "0"),
        ("collectives", "--max-mib", "0"),
        ("recording", "--nproc", "0"),
        ("--backend", "mpi"),
    ],
)
def test_wrong_usage_is_said_in_one_line(arguments, capsys):
    assert main(["bench", *arguments]) == 2
    assert capsys.readouterr().err.startswith("gradsync bench: error: ")


@pytest.mark.slow
def test_under_a_launcher_its_ranks_are_measured_and_the_first_speaks(tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--"]
    command = [*launcher, "gradsync", "bench", "--workload", "toy", "--rounds", "1", "--only", "gradsync/gloo"]
    done = python(*command, "--nproc", "7", "--json", "out.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("toy: 2 processes") == 1
    assert json.loads((tmp_path / "out.json").read_text())["workloads"][0]["nproc"] == 2


@pytest.mark.slow
def test_mpi_is_measured_where_mpiexec_has_started_the_ranks(tmp_path):
    mpiexec = Path(sys.executable).parent / "mpiexec"
    if not mpiexec.exists():
        pytest.skip("no mpiexec beside this Python: pip install 'gradsync[mpi]' mpich")
    arguments = ["bench", "--workload", "toy", "--rounds", "1", "--backend", "mpi", "--only", "torch/mpi4py"]
    command = [str(mpiexec), "-n", "2", sys.executable, "-m", "gradsync", *arguments]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("torch/mpi4py") > 0


def test_isolation_is_refused_under_a_launcher(monkeypatch, capsys):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    assert main(["bench", "--isolate"]) == 2
    assert "under a launcher" in capsys.readouterr().err
