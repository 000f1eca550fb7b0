"""``gradsync prepare`` as it is typed: summary, errors with their exit codes, progress on a terminal alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gradsync.cli.main import main
from gradsync.data import prepare as prepare_module
from gradsync.data.manifest import read_manifest


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("It was the best of times,\nit was the worst of times.\n" * 100)
    return path


def test_the_summary(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["prepare", str(text), "--out", str(tmp_path / "out"), "--tokenizer", "bytes", "--val-fraction", "0.25"]
    assert main(command) == 0
    assert main(command) == 0
    output, errors = capsys.readouterr()
    numbers = """: tokenizer bytes, vocabulary of 257
  train            3,975 tokens in 1 shard(s)
  val              1,326 tokens in 1 shard(s)
  documents: 1
  most frequent token: 32 (' '), 18.9% of all
"""
    assert output == f"{tmp_path / 'out'} is ready{numbers}{tmp_path / 'out'} was prepared before{numbers}"
    assert errors == ""


def test_options_reach_the_work(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(f'{{"content": "number {n}"}}' for n in range(100)))
    options = ["--text-field", "content", "--train-tokenizer", "260", "--val-fraction", "0.2"]
    options += ["--workers", "2", "--shard-tokens", "200"]
    assert main(["prepare", str(path), "--out", str(tmp_path / "out"), *options]) == 0
    manifest = read_manifest(tmp_path / "out")
    assert (manifest.tokenizer, manifest.vocab_size) == ("tokenizer.json", 260)
    assert (manifest.num_documents("train"), manifest.num_documents("val")) == (80, 20)
    assert manifest.splits["train"][0].tokens == 200


def test_no_validation_text_is_said(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--tokenizer", "bytes", "--val-fraction", "0"]
    assert main(["prepare", str(text), "--out", str(tmp_path / "out"), *options]) == 0
    assert "there is no validation text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["TEXT"], 2, "--out is missing"),
        (["--out", "OUT"], 2, "nothing to prepare"),
        (["TEXT", "--out", "OUT", "--tokenizer", "bites"], 2, "unknown tokenizer 'bites'"),
        (["TEXT", "--out", "OUT", "--tokenizer", "bytes", "--train-tokenizer", "300"], 2, "not both"),
        (["TEXT", "--out", "OUT", "--train-tokenizer", "3"], 2, "at least 257 tokens"),
        (["TEXT", "--out", "OUT", "--val-fraction", "2"], 2, "validation fraction must be in"),
        (["TEXT", "--out", "OUT", "--workers", "0"], 2, "--workers is 0; it must be at least 1"),
        (["TEXT", "--out", "OUT", "--shard-tokens", "0"], 2, "--shard-tokens is 0"),
        (["TEXT", "--out", "OUT", "--worker", "3"], 2, "did you mean --workers?"),
        (["nothing.txt", "--out", "OUT", "--tokenizer", "bytes"], 2, "no such file or folder: nothing.txt"),
        (["TEXT", "--out", "TEXT", "--tokenizer", "bytes"], 1, "cannot write"),
    ],
)
def test_errors_are_one_line_and_touch_nothing(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, message: str
) -> None:
    places = {"TEXT": str(text), "OUT": str(tmp_path / "out")}
    content = text.read_text()
    assert main(["prepare", *(places.get(argument, argument) for argument in arguments)]) == code
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.startswith("gradsync prepare: error: ")
    assert errors.count("\n") == 1
    assert message in errors
    assert text.read_text() == content


def test_an_interruption_says_how_to_go_on(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare_module, "tokenize_all", interrupted)
    assert main(["prepare", str(text), "--out", str(tmp_path / "out"), "--tokenizer", "bytes"]) == 130
    assert "run the same command again to go on" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminal there")
def test_progress_is_shown_on_a_terminal(text: Path, tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    source = Path(prepare_module.__file__).parents[2]
    command = [sys.executable, "-m", "gradsync.cli.main", "prepare", str(text)]
    with os.fdopen(ours, "rb", buffering=0) as terminal:
        finished = subprocess.run(
            [*command, "--out", str(tmp_path / "out"), "--tokenizer", "bytes", "--workers", "1"],
            env=os.environ | {"PYTHONPATH": str(source), "TERM": "xterm"},
            stdout=subprocess.PIPE,
            stderr=theirs,
            timeout=60,
        )
        os.close(theirs)
        shown = terminal.read(100_000)
    assert finished.returncode == 0
    assert b"5,301 tokens" in shown
    assert b"\x1b" not in finished.stdout
