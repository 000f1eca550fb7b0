"""Inputs: everything that text may come from, as one stream of pieces that know their split.

The stream is a function of the inputs and the validation fraction alone, never of who reads it or
how often. Text files are one document each; records (JSON lines, parquet, data sets) one a row.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from gradsync.data.documents import (
    Intake,
    cut_into_pieces,
    is_binary,
    line_start,
    read_text,
    stdlib_files,
    stdlib_folder,
    text_files,
)
from gradsync.data.records import read_dataset, read_jsonl, read_parquet
from gradsync.data.split import (
    FEWEST_FILES_TO_CHOOSE_FROM,
    TRAIN,
    VAL,
    choose_files,
    cut_at_end,
    is_validation_record,
)
from gradsync.data.tokenizer import encodable
from gradsync.errors import ConfigError, DataError

STDLIB = "stdlib"
_RECORD_READERS = {".jsonl": read_jsonl, ".parquet": read_parquet}


@dataclass(frozen=True)
class InputOptions:
    """What to read: files, folders or ``stdlib``, and a data set if one is named."""

    inputs: tuple[str, ...]
    val_fraction: float
    text_field: str = "text"
    dataset: str | None = None
    dataset_config: str | None = None
    dataset_split: str = "train"


@dataclass(frozen=True)
class InputFile:
    """One file of the inputs; ``name`` is its path below the folder that was given."""

    path: Path
    name: str
    num_bytes: int
    changed_ns: int

    @property
    def holds_records(self) -> bool:
        """Whether every row of it is a document, rather than all of it one."""
        return self.path.suffix in _RECORD_READERS


@dataclass(frozen=True)
class Piece:
    """A stretch of one document."""

    text: str
    split: str
    ends_document: bool


class Inputs:
    """The files that ``options`` mean, and the text in them; the folder ``leave_out`` is no part of them."""

    def __init__(self, options: InputOptions, leave_out: Path | None = None) -> None:
        if not 0.0 <= options.val_fraction < 1.0:
            raise ConfigError(f"the validation fraction must be in [0, 1), got {options.val_fraction}")
        self.options = options
        self._listing = Intake()
        self.files = _list_files(options.inputs, self._listing, leave_out)
        if not self.files and options.dataset is None:
            raise _nothing_to_read(options.inputs, self._listing)

    @property
    def num_bytes(self) -> int | None:
        """Bytes of all inputs; None where a data set is among them."""
        return None if self.options.dataset else sum(file.num_bytes for file in self.files)

    def pieces(self, intake: Intake) -> Iterator[Piece]:
        """All text in order; ``intake`` follows how far it was read."""
        intake.binary += self._listing.binary
        yield from self._text_pieces([file for file in self.files if not file.holds_records], intake)
        yield from self._record_pieces(intake)

    def fingerprint(self) -> dict[str, Any]:
        """What tells whether the same inputs would give the same stream."""
        options = self.options
        listing = "\n".join(f"{f.path.absolute()}\0{f.num_bytes}\0{f.changed_ns}" for f in self.files)
        return {
            "files": len(self.files),
            "bytes": sum(file.num_bytes for file in self.files),
            "listing_crc32": zlib.crc32(listing.encode("utf-8", errors="surrogateescape")),
            "text_field": options.text_field,
            "dataset": [options.dataset, options.dataset_config, options.dataset_split],
            "val_fraction": options.val_fraction,
        }

    def _text_pieces(self, files: list[InputFile], intake: Intake) -> Iterator[Piece]:
        names, sizes = [file.name for file in files], [file.num_bytes for file in files]
        if len(files) >= FEWEST_FILES_TO_CHOOSE_FROM:
            chosen = choose_files(names, sizes, self.options.val_fraction)
            cuts = [0 if i in chosen else size for i, size in enumerate(sizes)]
        else:
            cut = cut_at_end(sum(sizes), self.options.val_fraction)
            begins = accumulate(sizes[:-1], initial=0)
            cuts = [min(max(cut - begin, 0), size) for begin, size in zip(begins, sizes, strict=False)]
        for file, cut in zip(files, cuts, strict=True):
            yield from _pieces_of_file(file, cut, intake)

    def _record_pieces(self, intake: Intake) -> Iterator[Piece]:
        # Empty records take a number too: leaving one out must not move all others.
        for number, text in enumerate(self._records(intake)):
            if text:
                mended = encodable(text)
                if mended != text:
                    intake.replaced.append(f"record {number}")
                is_val = is_validation_record(number, self.options.val_fraction)
                yield from _pieces([mended], VAL if is_val else TRAIN, is_end=True)
            else:
                intake.num_empty += 1

    def _records(self, intake: Intake) -> Iterator[str]:
        options = self.options
        for file in self.files:
            if file.holds_records:
                yield from _RECORD_READERS[file.path.suffix](file.path, options.text_field, intake)
        if options.dataset is not None:
            yield from read_dataset(options.dataset, options.dataset_config, options.dataset_split, options.text_field)


def _pieces_of_file(file: InputFile, cut: int, intake: Intake) -> Iterator[Piece]:
    """Training text up to byte ``cut`` and validation text from there; both may be all of it."""
    if 0 < cut < file.num_bytes:
        cut = min(line_start(file.path, cut), file.num_bytes)
    for split, start, stop in ((TRAIN, 0, cut), (VAL, cut, file.num_bytes)):
        if start < stop:
            text = read_text(file.path, start, stop, intake)
            yield from _pieces(text, split, is_end=stop == file.num_bytes)


def _pieces(chunks: Iterable[str], split: str, is_end: bool) -> Iterator[Piece]:
    for text, is_last in cut_into_pieces(chunks):
        yield Piece(text, split, is_last and is_end)


def _list_files(inputs: Iterable[str], intake: Intake, leave_out: Path | None) -> list[InputFile]:
    files = []
    for given in inputs:
        root, paths = _paths_of(given, leave_out)
        for path in paths:
            file = _input_file(path, path.relative_to(root).as_posix())
            if file.num_bytes == 0:
                intake.num_empty += 1
            elif not file.holds_records and is_binary(path):
                intake.binary.append(str(path))
            else:
                files.append(file)
    return files


def _paths_of(given: str, leave_out: Path | None) -> tuple[Path, list[Path]]:
    """The files that one input means, and the folder that their names are told from."""
    if given == STDLIB:
        return stdlib_folder(), stdlib_files()
    path = Path(given)
    if path.is_dir():
        return path, text_files(path, leave_out)
    if not path.exists():
        raise ConfigError(
            f"no such file or folder: {given}; give text files, .jsonl or .parquet files, folders of them, "
            f"or {STDLIB!r} for the sources of Python's standard library"
        )
    if not path.is_file():
        raise DataError(f"{given} is no regular file (a pipe or a device); write the text to a file first")
    return path.parent, [path]


def _input_file(path: Path, name: str) -> InputFile:
    status = path.stat()
    return InputFile(path, name, status.st_size, status.st_mtime_ns)


def _nothing_to_read(inputs: tuple[str, ...], intake: Intake) -> DataError:
    where = ", ".join(inputs) or "no input"
    found = len(intake.binary) + intake.num_empty
    if found == 0:
        return DataError(f"{where}: an empty folder, there is no text in it")
    if found == 1:
        return DataError(f"{where} holds no text: the file is {'binary' if intake.binary else 'empty'}")
    return DataError(
        f"{where} holds no text: of {found} files {len(intake.binary)} are binary, {intake.num_empty} empty"
    )
