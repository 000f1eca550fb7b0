"""What ``import gradsync`` offers, and that it offers it without paying for torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gradsync

_PACKAGE = Path(gradsync.__file__).parent
_HEAVY = ("torch", "numpy")


def _names_for_type_checkers() -> list[str]:
    """What the root module imports under TYPE_CHECKING, that is, what type checkers see."""
    tree = ast.parse((_PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    guarded = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for block in guarded for node in block.body if isinstance(node, ast.ImportFrom)]
    return [alias.asname or alias.name for node in imports for alias in node.names]


def _heavy_modules_after(code: str) -> list[str]:
    """Which of the heavy modules a fresh interpreter has loaded after running the code."""
    report = f"import sys; print('HEAVY', *[name for name in {_HEAVY} if name in sys.modules])"
    finished = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, timeout=240, check=True
    )
    return finished.stdout.rsplit("HEAVY", 1)[1].split()


def test_all_is_sorted_and_without_repetition() -> None:
    assert gradsync.__all__ == sorted(set(gradsync.__all__))


def test_all_is_complete() -> None:
    assert set(gradsync.__all__) == set(gradsync._HOMES)
    assert set(gradsync.__all__) == set(_names_for_type_checkers())


@pytest.mark.parametrize("name", gradsync.__all__)
def test_every_name_resolves_to_its_home(name: str) -> None:
    thing = getattr(gradsync, name)
    assert thing is getattr(sys.modules[gradsync._HOMES[name]], name)
    assert thing.__doc__


def test_dir_shows_every_name() -> None:
    assert set(gradsync.__all__) <= set(dir(gradsync))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'gradsync' has no attribute 'Nonsense'"):
        _ = gradsync.Nonsense


def test_import_is_light() -> None:
    assert _heavy_modules_after("import gradsync") == []


@pytest.mark.skipif(not (_PACKAGE / "cli" / "main.py").exists(), reason="there is no command yet")
def test_help_is_light() -> None:
    code = (
        "import sys\n"
        "from gradsync.cli.main import main\n"
        "sys.argv = ['gradsync', '--help']\n"
        "try:\n"
        "    status = main()\n"
        "except SystemExit as stop:\n"
        "    status = stop.code\n"
        "assert not status, status\n"
    )
    assert _heavy_modules_after(code) == []


def test_the_check_for_heavy_modules_can_fail() -> None:
    assert _heavy_modules_after("import numpy") == ["numpy"]
