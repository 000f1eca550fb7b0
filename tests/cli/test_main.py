"""The command line's frame: quick help without torch, one-line errors, exit codes."""

import subprocess
import sys

import pytest

from gradsync.cli import main as cli
from gradsync.cli.main import COMMANDS, main
from gradsync.errors import CheckpointError, ConfigError


def test_without_a_command_help_is_shown(capsys):
    assert main([]) == 2
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


def test_an_unknown_command_is_answered_with_the_nearest(capsys):
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == "gradsync: error: unknown command 'trian'; did you mean 'train'?\n"


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("gradsync ")


@pytest.mark.parametrize(("error", "code"), [(ConfigError("a"), 2), (CheckpointError("b"), 1)])
def test_errors_are_one_line_with_their_exit_code(monkeypatch, capsys, error, code):
    class Command:
        @staticmethod
        def main(arguments):
            raise error

    monkeypatch.setattr(cli.importlib, "import_module", lambda name: Command)
    assert main(["train"]) == code
    assert capsys.readouterr().err == f"gradsync train: error: {error}\n"


WRONG = [
    "['train', '--stepz', '1']",
    "['train', '--device', 'cpu', '--heads', '3']",
    "['train', '--device', 'cpu', '--nproc', '3', '--tp', '2']",
    "['train', '--device', 'cpu', '--nproc', '8', '--pp', '8']",
    "['train', '--device', 'cpu', '--data', 'no/such/folder']",
    "['train', '--dry-run', '--device', 'cpu', '--heads', '3']",
]


def test_help_and_usage_errors_never_import_torch():
    script = "import sys\nfrom gradsync.cli.main import main\n"
    for line in ["['--help']", *(f"['{name}', '--help']" for name in COMMANDS)]:
        script += f"try:\n    main({line})\nexcept SystemExit:\n    pass\n"
    script += "".join(f"assert main({line}) == 2\n" for line in WRONG)
    script += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=240)
