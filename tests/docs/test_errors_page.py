"""The page of errors: every class is on it, and every row has a message, a cause and a cure."""

import inspect
import re
from pathlib import Path

import pytest

from gradsync import errors

_ROOT = Path(__file__).parents[2]
_PAGE = (_ROOT / "docs" / "errors.md").read_text(encoding="utf-8")
_SOURCE = {path: path.read_text(encoding="utf-8") for path in (_ROOT / "src" / "gradsync").rglob("*.py")}
_CLASSES = [
    name
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, errors.GradsyncError) and value.__module__ == errors.__name__
]


def _rows() -> list[list[str]]:
    lines = [line for line in _PAGE.splitlines() if line.startswith("|") and not re.match(r"\|\s*-", line)]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


@pytest.mark.parametrize("name", _CLASSES)
def test_every_class_is_on_the_page_with_its_meaning(name: str) -> None:
    (row,) = [row for row in _rows() if row[0] == f"`{name}`"] or [[]]
    assert len(row) == 3 and all(row), f"{name} is missing in the table of classes of docs/errors.md"


def test_the_table_of_classes_names_no_other() -> None:
    table = _PAGE.partition("## Classes")[2].partition("\n## ")[0]
    named = set(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE))
    assert named == set(_CLASSES)


def test_every_row_has_a_message_a_cause_and_a_cure() -> None:
    incomplete = [row for row in _rows() if len(row) != 3 or not all(row)]
    assert incomplete == []


def test_every_message_on_the_page_is_one_of_the_source() -> None:
    """By its longest run of words between the dots and numbers that stand for what differs from case to case."""
    whole = "".join(re.sub(r'"\s*\n\s*f?"', "", text) for text in _SOURCE.values())
    plain = re.sub(r"\{[^{}]*\}", "\0", whole)
    missing = []
    for message, *_ in _rows():
        quoted = re.findall(r"`([^`]+)`", message)
        if not quoted or quoted[0] in _CLASSES:
            continue
        parts = [part.strip(" :;,()'") for part in re.split(r"\.\.\.|\b\d[\d.,]*\b|\b[A-Z]\b", quoted[0])]
        longest = max(parts, key=len)
        words = longest.split()
        runs = [" ".join(words[start : start + 3]) for start in range(max(1, len(words) - 2))]
        if not any(run in plain for run in runs):
            missing.append(quoted[0])
    assert not missing, "\n".join(missing)
