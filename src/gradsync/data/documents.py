"""Text files: which there are, and their text in pieces of bounded size.

What cannot be used is left out or mended, and noted in an ``Intake``; nothing is dropped in silence.
"""

from __future__ import annotations

import codecs
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gradsync.errors import DataError

PIECE_CHARS = 1 << 20
_BLOCK_BYTES = 1 << 20
_SNIFF_BYTES = 8192

# Tests are left out because some systems ship Python without them: the text should be the same.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass
class Intake:
    """What has been read so far, and what was done to it on the way in."""

    num_bytes: int = 0
    replaced: list[str] = field(default_factory=list)
    binary: list[str] = field(default_factory=list)
    num_empty: int = 0

    def notes(self) -> list[str]:
        """One sentence for each kind of thing that was done; empty files lose nothing and get none."""
        notes = []
        if self.replaced:
            notes.append(f"what UTF-8 cannot say became U+FFFD in {_some_of(self.replaced)}")
        if self.binary:
            notes.append(f"left out as binary: {_by_kind(self.binary)}")
        return notes


def text_files(folder: Path, leave_out: Path | None = None) -> list[Path]:
    """Every file below ``folder`` that is neither hidden nor in the folder ``leave_out``, ordered by path."""
    return _walk(folder, set(), leave_out)


def stdlib_folder() -> Path:
    """Where the sources of the standard library of this interpreter are."""
    return Path(sysconfig.get_paths()["stdlib"])


def stdlib_files() -> list[Path]:
    """The Python sources of the standard library without its tests, ordered by path."""
    folder = stdlib_folder()
    files = [path for path in _walk(folder, _NOT_STDLIB) if path.suffix == ".py"]
    if not files:
        raise DataError(
            f"this Python has no sources of its standard library in {folder} (a frozen or zipped "
            f"installation); name a text file or a folder of text files instead"
        )
    return files


def is_binary(path: Path) -> bool:
    """Whether a file begins as no text does: text has no NUL bytes."""
    try:
        with path.open("rb") as file:
            return b"\0" in file.read(_SNIFF_BYTES)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def read_text(path: Path, start: int, stop: int, intake: Intake) -> Iterator[str]:
    """The text of bytes ``start`` to ``stop`` of a file, block by block.

    A byte-order mark is dropped, bytes that are not UTF-8 become U+FFFD.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    is_replacing = False
    for block, is_last in _read_blocks(path, start, stop):
        pending, _ = decoder.getstate()
        try:
            text = decoder.decode(block, is_last)
        except UnicodeDecodeError:
            intake.replaced.append(str(path))
            is_replacing = True
            decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
            text = decoder.decode(pending + block, is_last)
        intake.num_bytes += len(block)
        yield text
    assert is_replacing or not decoder.getstate()[0]


def line_start(path: Path, position: int) -> int:
    """The beginning of a line at or after byte ``position`` > 0, or of a character in a long line."""
    with path.open("rb") as file:
        file.seek(position - 1)
        block = file.read(_BLOCK_BYTES)
    newline = block.find(b"\n")
    if newline >= 0:
        return position + newline
    # Bytes 10xxxxxx go on with a character.
    within = (i for i, byte in enumerate(block[1:]) if byte & 0xC0 != 0x80)
    return position + next(within, len(block) - 1)


def cut_into_pieces(chunks: Iterable[str], piece_chars: int = PIECE_CHARS) -> Iterator[tuple[str, bool]]:
    """Pieces of at most ``piece_chars``, each with whether it is the last; the joined text is unchanged.

    Cut where GPT-2's tokenizer begins a new token anyway, if there is such a place, so that the
    tokens of the pieces are those of the whole.
    """
    rest, begin = "", 0
    for chunk in chunks:
        rest, begin = rest[begin:] + chunk, 0
        while len(rest) - begin > piece_chars:
            place = _place_to_cut(rest, begin, begin + piece_chars)
            yield rest[begin:place], False
            begin = place
    yield rest[begin:], True


def _place_to_cut(text: str, begin: int, limit: int) -> int:
    """Where to cut ``text`` after ``begin``, at ``limit`` at the latest."""
    place = text.rfind("\n", begin + 1, limit)
    while place > begin:
        # A newline between two words is a token of its own; of several, the last is set apart.
        if not text[place - 1].isspace() and not text[place + 1].isspace():
            return place + 1
        place = text.rfind("\n", begin + 1, place)
    # A word takes the blank before it along.
    blank = text.rfind(" ", begin + 1, limit)
    return blank if blank > begin else limit


def _read_blocks(path: Path, start: int, stop: int) -> Iterator[tuple[bytes, bool]]:
    try:
        with path.open("rb") as file:
            file.seek(start)
            position = start
            while position < stop:
                block = file.read(min(_BLOCK_BYTES, stop - position))
                if not block:
                    raise DataError(f"{path} has become shorter while it was read; leave it alone meanwhile")
                position += len(block)
                yield block, position == stop
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _walk(folder: Path, skip: set[str], leave_out: Path | None = None) -> list[Path]:
    return sorted(_walk_unordered(folder, skip, leave_out), key=lambda path: path.relative_to(folder).parts)


def _walk_unordered(folder: Path, skip: set[str], leave_out: Path | None) -> Iterator[Path]:
    out = None if leave_out is None else leave_out.resolve()
    for place, folders, names in os.walk(folder, onerror=_fail_to_list):
        # Changing the list in place is how os.walk is told where not to go.
        folders[:] = [
            name
            for name in folders
            if name not in skip and not name.startswith(".") and (out is None or (Path(place) / name).resolve() != out)
        ]
        for name in names:
            path = Path(place) / name
            if not name.startswith(".") and path.is_file():
                yield path


def _fail_to_list(error: OSError) -> None:
    raise DataError(f"cannot read the folder {error.filename}: {error.strerror}") from error


def _by_kind(names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    kinds = Counter(Path(name).suffix for name in names)
    told = [f"{number} {kind or 'without a suffix'}" for kind, number in kinds.most_common(3)]
    others = len(names) - sum(number for _, number in kinds.most_common(3))
    return f"{len(names)} files ({', '.join(told + ([f'{others} others'] if others else []))})"


def _some_of(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
