"""A command in this process: quicker than one in a process of its own, and its ranks are forked from a warm server."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gradsync.cli.main import main

RunHere = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[RunHere]:
    """Run a command in ``tmp_path``, where modules may lie that it is to find; they are forgotten again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        code = main(arguments)
        out, err = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, out, err)

    yield run
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]
