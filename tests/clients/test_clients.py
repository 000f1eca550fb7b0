"""Frameworks that wrap models themselves, unchanged but for one line, train as they do with torch's wrapper.

On demand (``make test-clients``): these need packages that the project itself does not.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.clients, pytest.mark.slow]

_FOLDER = Path(__file__).parent
_PACKAGES = {"accelerate_loop": "accelerate", "fabric_loop": "lightning_fabric", "trainer_run": "transformers"}


def _run(script: str, *arguments: str) -> dict[str, Any]:
    """Run the script on two ranks under torchrun and return what its first rank reports."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true"}
    finished = subprocess.run(
        [*launcher, str(_FOLDER / f"{script}.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=150,
        env=environment,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    lines = [line for line in finished.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(lines) == 1, finished.stdout
    result: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return result


@pytest.mark.parametrize(
    ("script", "arguments"),
    [("accelerate_loop", ()), ("fabric_loop", ()), ("trainer_run", ()), ("trainer_run", ("--checkpointing",))],
)
def test_one_line_makes_a_client_use_gradsync(script: str, arguments: tuple[str, ...]) -> None:
    if importlib.util.find_spec(_PACKAGES[script]) is None:
        pytest.skip(f"{_PACKAGES[script]} is not installed")
    torchs, ours = _run(script, *arguments), _run(script, *arguments, "--gradsync")
    assert torchs.pop("wrapper") == "torch.nn.parallel.distributed"
    assert ours.pop("wrapper") == "gradsync.ddp.module"
    assert set(ours) == set(torchs)
    for what, expected in torchs.items():
        is_numbers = isinstance(expected, list) and all(isinstance(value, float) for value in expected)
        assert ours[what] == (pytest.approx(expected, rel=1e-4, abs=1e-6) if is_numbers else expected), what
    assert len(set(ours["losses"])) > 3
