"""An elastic run on torchrun: a worker dies, a host is lost, a host comes; no sequence is lost or taken twice."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from agents import Agent, torchrun, wait_until

_SMALL = [
    *("--context", "16", "--batch-tokens", "192", "--width", "16", "--heads", "2", "--layers", "1"),
    *("--eval-tokens", "256", "--sample-tokens", "0", "--warmup-steps", "2", "--tensorboard", "false"),
    *("--eval-every", "0", "--checkpoint-every", "20", "--steps", "100000", "--backend", "gloo"),
]
_ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes as Linux shows them"),
]


def records(run: Path) -> list[dict[str, Any]]:
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def starts(run: Path) -> list[dict[str, Any]]:
    file = run / "starts.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@contextmanager
def ending(agents: list[Agent]) -> Iterator[None]:
    try:
        yield
    finally:
        for agent in agents:
            agent.kill()


def test_training_goes_on_with_the_hosts_that_are_left_and_with_those_that_come(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("".join(f"The {n}th line of {n * n} lines.\n" for n in range(400)))
    run, text = tmp_path / "run", ["--data", str(tmp_path / "text.txt")]
    # The rendezvous lives on a host that stays, as that of a cluster should: here, in this process.
    store: Any = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=120), wait_for_workers=False)
    training = ["gradsync", "train", *text, *_SMALL, "--run", str(run), "--auto-resume"]
    command = [*torchrun(f"127.0.0.1:{store.port}", 3, *training)]
    command.insert(3, "--local-addr=127.0.0.1")
    agents: list[Agent] = []

    def host(name: str) -> Agent:
        agents.append(Agent(command, tmp_path / f"{name}.log"))
        return agents[-1]

    def comes_further_with(num_ranks: int, num_starts: int) -> None:
        def holds() -> bool:
            told = starts(run)
            last = records(run)[-1:]
            is_new = len(told) >= num_starts and told[-1]["ranks"] == num_ranks
            return is_new and bool(last) and last[0]["step"] > told[-1]["step"] + 25

        wait_until(holds, f"{num_ranks} rank(s) train after start {num_starts}", agents)

    with ending(agents):
        first, second = host("first"), host("second")
        comes_further_with(2, 1)
        os.kill(second.workers()[0], signal.SIGKILL)
        comes_further_with(2, 2)
        first.kill()
        comes_further_with(1, 3)
        third = host("third")
        comes_further_with(2, 4)
        for agent in (second, third):
            os.kill(agent.process.pid, signal.SIGTERM)
        for agent in (second, third):
            agent.process.wait(timeout=240)

    told = records(run)
    assert [record["step"] for record in told] == list(range(1, len(told) + 1))
    straight = tmp_path / "straight"
    alone = [sys.executable, "-m", "gradsync", "train", *text, *_SMALL, "--run", str(straight), "--nproc", "1"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_ROOT / "src")}
    subprocess.run(
        [*alone, "--stop-after", str(len(told))], env=environment, check=True, capture_output=True, timeout=200
    )
    # The same sequences in every step, summed in another order.
    wanted = [record["loss"] for record in records(straight)]
    assert [record["loss"] for record in told] == pytest.approx(wanted, abs=1e-3)


def test_auto_resume_needs_a_folder_that_every_start_knows(capsys: pytest.CaptureFixture[str]) -> None:
    from gradsync.cli.main import main

    assert main(["train", "--auto-resume"]) == 2
    assert "--auto-resume needs --run" in capsys.readouterr().err
