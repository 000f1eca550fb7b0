"""Documents: from files of text to strings, one at a time and always in the same order.

What cannot be used is left out or mended, and said so in a ``Notes``; nothing is skipped in silence.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gradsync.errors import DataError

# Tests are left out because some systems ship Python without them: the text should be the same.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_SNIFF_BYTES = 8192


@dataclass
class Notes:
    """What was done to the text on the way in."""

    replaced: list[str] = field(default_factory=list)
    binary: list[str] = field(default_factory=list)
    empty: int = 0

    def lines(self) -> list[str]:
        """One sentence for each kind of thing that was done; empty files lose nothing and get none."""
        lines = []
        if self.replaced:
            lines.append(f"bytes that are not UTF-8 became U+FFFD in {_some_of(self.replaced)}")
        if self.binary:
            lines.append(f"left out as binary: {_some_of(self.binary)}")
        return lines


def text_files(folder: Path) -> list[Path]:
    """Every file below ``folder`` that is not hidden, ordered by path."""
    return _walk(folder, skip=set())


def stdlib_files() -> list[Path]:
    """The Python sources of the standard library of this interpreter, ordered by path."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [path for path in _walk(folder, skip=_NOT_STDLIB) if path.suffix == ".py"]
    if not files:
        raise DataError(
            f"this Python has no sources of its standard library in {folder} (a frozen or zipped "
            f"installation); give a text file or a folder with --data"
        )
    return files


def read_text(path: Path, notes: Notes) -> str | None:
    """The text of a file; None (and a note) for a file that is binary or empty."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    if is_binary(raw[:_SNIFF_BYTES]):
        notes.binary.append(str(path))
        return None
    if not raw:
        notes.empty += 1
        return None
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        notes.replaced.append(str(path))
        return raw.decode("utf-8", errors="replace")


def is_binary(head: bytes) -> bool:
    """Whether a file that begins like this is no text: text has no NUL bytes."""
    return b"\0" in head


def _walk(folder: Path, skip: set[str]) -> list[Path]:
    return sorted(_walk_unordered(folder, skip), key=lambda path: path.relative_to(folder).parts)


def _walk_unordered(folder: Path, skip: set[str]) -> Iterator[Path]:
    for place, folders, names in os.walk(folder, onerror=_fail_to_list):
        # Changing the list in place is how os.walk is told where not to go.
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        for name in names:
            path = Path(place) / name
            if not name.startswith(".") and path.is_file():
                yield path


def _fail_to_list(error: OSError) -> None:
    raise DataError(f"cannot read the folder {error.filename}: {error.strerror}") from error


def _some_of(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
