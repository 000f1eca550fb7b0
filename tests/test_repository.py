"""The repository as a whole: portable text, documented modules, commands that exist, pinned packages."""

import ast
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_ROOT = Path(__file__).parent.parent

# Assembled, so that this file does not trip over its own rule.
_FOLDERS = ("work/", "root/", "tmp/wt", "opt/pypi", "opt/wheels")
_FORBIDDEN = [*("/" + folder for folder in _FOLDERS), "pypi" + ".org"]


def _tracked_files() -> list[Path]:
    if not (_ROOT / ".git").exists():
        pytest.skip("not a git checkout, so nothing tells which files belong to the project")
    # The checkout may belong to another user than the one who runs the tests.
    command = ["git", "-c", f"safe.directory={_ROOT}", "ls-files", "-z"]
    listing = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=60, check=True)
    paths = [_ROOT / name for name in listing.stdout.split("\0") if name]
    return [path for path in paths if path.is_file()]


def _is_here(line: str, place: str) -> bool:
    """Whether the line names the place itself, not a longer path that merely contains it."""
    return re.search(rf"(?<![\w.\-]){re.escape(place)}", line) is not None


def _pinned() -> dict[str, Requirement]:
    lines = (_ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    requirements = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(requirement.name): requirement for requirement in requirements}


def _make_targets() -> set[str]:
    text = (_ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][\w-]*):", text, flags=re.MULTILINE))


def test_no_file_names_a_place_of_one_machine() -> None:
    found = []
    for path in _tracked_files():
        text = path.read_bytes().decode("utf-8", errors="replace")
        for number, line in enumerate(text.splitlines(), start=1):
            places = [place for place in _FORBIDDEN if _is_here(line, place)]
            found += [f"{path.relative_to(_ROOT)}:{number}: {place}" for place in places]
    assert found == []


@pytest.mark.parametrize(("line", "is_found"), [("cd /{}x", True), ("/home/me/{}x", False), ("'/{}'", True)])
def test_the_search_for_places_sees(line: str, is_found: bool) -> None:
    assert _is_here(line.format("work/"), "/" + "work/") is is_found


def test_every_module_says_what_it_holds() -> None:
    modules = [path for path in _tracked_files() if path.suffix == ".py"]
    assert modules
    silent = [
        str(path.relative_to(_ROOT))
        for path in modules
        if not (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").strip()
    ]
    assert silent == []


def test_the_make_commands_of_the_readme_exist() -> None:
    readme = (_ROOT / "README.md").read_text(encoding="utf-8")
    # Only what stands at the start of a code line or of an inline code span is a command.
    commands = set(re.findall(r"(?:^|`)[ \t]*(?:\$ )?make ([a-z][\w-]*)", readme, flags=re.MULTILINE))
    assert {"train", "test"} <= commands
    assert commands <= _make_targets()


def test_the_readme_names_every_extra_of_users() -> None:
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    readme = (_ROOT / "README.md").read_text(encoding="utf-8")
    extras = set(project["optional-dependencies"]) - {"dev"}
    assert [extra for extra in sorted(extras) if f"`{extra}`" not in readme] == []


def test_ci_runs_the_test_command_of_the_readme() -> None:
    script = _ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert "make test" in script.read_text(encoding="utf-8").splitlines()[-1]


def test_requirements_are_pinned_and_cover_what_the_project_asks_for() -> None:
    pinned = _pinned()
    loose = [str(pin) for pin in pinned.values() if not re.fullmatch(r"==[\w.]+", str(pin.specifier))]
    assert loose == []
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    used_by_tests = ("tokenizers", "tensorboard", "datasets", "dev")
    asked = [*project["dependencies"], *(each for name in used_by_tests for each in extras[name])]
    for requirement in map(Requirement, asked):
        pin = pinned[canonicalize_name(requirement.name)]
        version = str(pin.specifier).removeprefix("==")
        assert requirement.specifier.contains(version), f"{requirement} does not allow the pinned {version}"
