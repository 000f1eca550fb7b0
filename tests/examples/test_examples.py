"""Every example is run as a reader would run it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_EXAMPLES = _ROOT / "examples"
_TINY_LOOP = ["--context", "16", "--micro-batch", "2", "--micro-batches-per-step", "4", "--steps", "3"]


def _run(*command: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(_ROOT / "src"), "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    finished = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True, timeout=240)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def _losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]


@pytest.fixture(scope="module")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("It was the best of times, it was the worst of times.\n" * 40)
    return path


@pytest.fixture(scope="module")
def losses_of_one_process(text_file: Path) -> list[float]:
    return _losses(_run(str(_EXAMPLES / "gpt2_loop.py"), "--data", str(text_file), *_TINY_LOOP))


def test_every_example_is_run_here() -> None:
    examples = {"toy_ddp.py", "gpt2_loop.py", "token_loader.py", "compare_losses.py"}
    assert {path.name for path in _EXAMPLES.glob("*.py")} == examples


@pytest.mark.distributed
def test_toy_ddp_reports_every_ten_batches() -> None:
    lines = _run(str(_EXAMPLES / "toy_ddp.py")).splitlines()
    places = [tuple(map(int, re.findall(r"epoch (\d+) batch +(\d+)", line)[0])) for line in lines]
    # 500 of the 1000 samples are rank 0's: 16 batches an epoch where there are two processes.
    assert {epoch for epoch, _ in places} == set(range(5))
    assert all(batch % 10 == 0 for _, batch in places)
    assert all(loss < 10 for loss in _losses("\n".join(lines)))


def test_compare_losses_finds_the_largest_difference(tmp_path: Path) -> None:
    for name, losses in (("one", [3.0, 2.0, 1.0]), ("two", [3.0, 2.5, 1.0, 0.5])):
        (tmp_path / name).mkdir()
        lines = [f'{{"step": {step}, "loss": {loss}}}\n' for step, loss in enumerate(losses, start=1)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(lines))
    output = _run(str(_EXAMPLES / "compare_losses.py"), str(tmp_path / "one"), str(tmp_path / "two"))
    assert output == "3 steps; largest difference of the loss 5.00e-01, at step 2\n"


def test_token_loader_begins_again_together() -> None:
    lines = _run(str(_EXAMPLES / "token_loader.py")).splitlines()
    starts = [int(re.findall(r"\[\[(\d+)", line)[0]) for line in lines]
    assert starts == [0, 8, 16, 24, 32, 40, 0, 8]


def test_gpt2_loop_learns_on_one_process(losses_of_one_process: list[float]) -> None:
    assert len(losses_of_one_process) == 3
    assert losses_of_one_process[-1] < losses_of_one_process[0]


@pytest.mark.distributed
@pytest.mark.parametrize("skip_sync", ["context", "attribute"])
def test_gpt2_loop_on_two_processes_is_the_same_run(
    skip_sync: str, text_file: Path, losses_of_one_process: list[float]
) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    loop = [str(_EXAMPLES / "gpt2_loop.py"), "--data", str(text_file), "--skip-sync", skip_sync]
    losses = _losses(_run(*launcher, *loop, *_TINY_LOOP))
    # The same batch summed in another order.
    assert losses == pytest.approx(losses_of_one_process, abs=1e-4)
