"""The tutorial: every command on the page is executed, in order, in one shell."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_PAGE = _ROOT / "docs" / "tutorial.md"


def commands() -> str:
    return "\n".join(re.findall(r"```sh\n(.*?)```", _PAGE.read_text(encoding="utf-8"), re.DOTALL))


def test_no_command_hides_outside_the_blocks_that_are_executed():
    fences = re.findall(r"^```(\w*)$", _PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(fences) <= {"sh", ""}
    assert commands().count("gradsync ") >= 10


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_command_does_what_the_page_says(tmp_path):
    pytest.importorskip("tokenizers")
    pytest.importorskip("safetensors")
    script = f'gradsync() {{ "{sys.executable}" -m gradsync "$@"; }}\npython() {{ "{sys.executable}" "$@"; }}\n'
    environment = {**os.environ, "PYTHONPATH": str(_ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = ["bash", "-euo", "pipefail", "-c", script + commands()]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=580)
    assert result.returncode == 0, result.stderr
    assert "stopped after step 25 of 40" in result.stdout
    assert "finished step 40 of 40, validation loss" in result.stdout
    assert result.stdout.count("nats per token, perplexity") == 2
    names = {path.name for path in (tmp_path / "runs" / "first").iterdir()}
    assert {"config.yaml", "metrics.jsonl", "starts.jsonl", "checkpoints", "samples", "trace.json"} <= names
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert {path.name for path in (tmp_path / "exported").iterdir()} >= {"config.json", "model.safetensors"}
