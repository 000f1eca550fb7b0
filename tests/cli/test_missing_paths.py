"""A path that the user names and that does not exist is wrong usage, whatever the command: one line, exit code 2."""

import pytest
from commands import python

from gradsync.cli.main import main
from training_jobs import options_for, train, write_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("trained")
    write_text(path)
    train(options_for(path, steps=1, eval_tokens=32, sample_tokens=0))
    return path


@pytest.mark.parametrize(
    "line",
    [
        "prepare text.txt nowhere --out out --tokenizer bytes",
        "prepare text.txt --out out --tokenizer nowhere.json",
        "train --data nowhere",
        "train --data text.txt --hellaswag nowhere.jsonl",
        "train --data text.txt --init-from nowhere",
        "train --data nowhere --run run",
        "train --data text.txt --hellaswag nowhere.jsonl --run run",
        "train --data text.txt --init-from nowhere --run run",
        "train --data text.txt --tokenizer nowhere.json",
        "train --config nowhere.yaml",
        "train --run nowhere --resume",
        "train --run nothing --resume",
        "report nowhere",
        "report nothing",
        "report run nowhere",
        "report run --out nowhere/page.html",
        "sample nowhere",
        "sample nothing",
        "sample text.txt",
        "sample run --prompt-file nowhere.txt",
        "eval nowhere",
        "eval run --data nowhere",
        "eval run --hellaswag nowhere.jsonl",
        "export nowhere --out out",
        "explain --out nowhere/page.html",
        "bench --json nowhere/samples.json",
        "bench collectives --json nowhere/samples.json",
        "bench recording --json nowhere/samples.json",
        "doctor --json nowhere/findings.json",
        "doctor --json nothing",
    ],
)
def test_it_is_named_in_one_line_with_exit_code_2(line, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    (folder / "nothing").mkdir(exist_ok=True)
    (folder / "nothing" / "notes.txt").write_text("no run")
    before = sorted(folder.rglob("*"))
    assert main(line.split()) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    *notes, error = errors.splitlines()
    assert error.startswith(f"gradsync {line.split()[0]}: error: ")
    assert "nowhere" in error or "nothing" in error or "text.txt" in error
    assert all(note.startswith("from ") for note in notes)
    assert sorted(folder.rglob("*")) == before, "nothing is made"


_WITHOUT_TORCH = """
import sys
from gradsync.cli.main import main
for line in sys.argv[1:]:
    assert main(line.split()) == 2, line
    assert "torch" not in sys.modules, line
"""


def test_it_is_refused_before_torch_is_imported(folder):
    lines = [
        "sample nowhere",
        "eval nowhere",
        "eval run --data nowhere",
        "eval run --hellaswag nowhere.jsonl",
        "export nowhere --out out",
        "report nowhere",
        "explain --model nowhere:model",
        "explain --out nowhere/page.html",
        "prove --model nowhere:model",
        "bench --model nowhere:model",
        "bench --json nowhere/samples.json",
        "train --data nowhere",
        "train --data text.txt --init-from nowhere",
        "prepare nowhere --out out",
        "doctor --json nowhere/findings.json",
    ]
    done = python("-c", _WITHOUT_TORCH, *lines, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert len(done.stderr.splitlines()) == len(lines), done.stderr
