"""``gradsync explain`` as a user starts it: a page from real ranks, and refusals in one line."""

import re

import pytest

from gradsync.cli.main import main

FACTORY = """
import torch

def make():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    return model, torch.ones(4, 8)
"""


def test_a_users_model_is_explained_with_its_own_names(tmp_path, run_here):
    (tmp_path / "mine.py").write_text(FACTORY)
    finished = run_here("explain", "--model", "mine:make", "--steps", "3", "--lang", "zh", "--out", "p.html")
    assert finished.returncode == 0, finished.stderr
    verdict, path = finished.stdout.splitlines()
    assert "communication hidden" in verdict
    assert path == "p.html"
    page = (tmp_path / "p.html").read_text()
    assert "0.weight[" in page
    assert "逐位相同" in page  # the replicas ended up equal
    # the gradient that only rank 0 has is halved, and the one that nobody has stays None
    rows = re.findall(r"<td>(only_on_rank_0|used_nowhere)</td><td>([^<]*)</td><td>([^<]*)</td>", page)
    assert rows == [
        ("only_on_rank_0", "1", "0.5"),
        ("only_on_rank_0", "None", "0.5"),
        ("used_nowhere", "None", "None"),
        ("used_nowhere", "None", "None"),
    ]


@pytest.mark.parametrize("command", ["explain", "bench", "prove"])
def test_an_exception_in_the_users_function_is_one_line_with_their_line(tmp_path, monkeypatch, capsys, command):
    (tmp_path / "users_failing.py").write_text("def make():\n    return [][0]\n")
    monkeypatch.chdir(tmp_path)
    for module in ("explain", "bench"):
        monkeypatch.setattr(f"gradsync.cli.{module}.run_ranks", lambda entry, nproc, job: entry(job))
    assert main([command, "--model", "users_failing:make"]) == 1
    assert capsys.readouterr().err == (
        f"gradsync {command}: error: --model users_failing:make: IndexError: list index out of range "
        f"(users_failing.py:2 in make: return [][0])\n"
    )


def test_a_factory_that_is_not_there_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "gradsync.cli.explain.run_ranks", lambda entry, nproc, job: {r: entry(job) for r in range(nproc)}
    )
    assert main(["explain", "--model", "no_such_module:make"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(
        "gradsync explain: error: --model no_such_module:make: No module named 'no_such_module'; give MODULE"
    )
    assert captured.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lang", "fr"], "--lang is 'fr'; expected one of en, zh"),
        (["--nproc", "1"], "--nproc is 1; it takes at least 2 processes"),
        (["--steps", "2"], "--steps is 2; the engine learns in the first two"),
        (["--model", "huge"], "--model is 'huge'; expected toy, gpt or MODULE:FUNCTION"),
        (["--out", "no/such/folder/p.html"], "cannot be written: there is no such folder"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(capsys, arguments, message):
    assert main(["explain", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.count("\n") == 1
