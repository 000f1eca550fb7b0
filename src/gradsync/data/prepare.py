"""Prepare: from text to a folder of token shards, in bounded memory, going on after a kill.

The order of work: read pieces of text (``inputs.py``), tokenize them in batches (``tokenize.py``),
append the tokens of each split to its shards, and every so often note in a journal how far all of
this has come. What the folder holds in the end is a function of the inputs and options alone,
whatever the number of workers and however often the work was cut off. Speaks to nobody: progress
goes to a callback.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from gradsync.data.documents import Intake
from gradsync.data.inputs import InputOptions, Inputs
from gradsync.data.manifest import (
    MANIFEST,
    TOKENIZER_FILE,
    Manifest,
    mark_verified,
    read_manifest,
    write_json,
    write_manifest,
)
from gradsync.data.shards import UNFINISHED, open_shard
from gradsync.data.split import SPLITS
from gradsync.data.split_writer import SplitWriter
from gradsync.data.statistics import commonest_token, warn_of
from gradsync.data.tokenize import TokensBySplit, batches, tokenize_all
from gradsync.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_fingerprint
from gradsync.data.train_tokenizer import train_tokenizer
from gradsync.errors import ConfigError, DataError

JOURNAL = "journal.json"
_BATCHES_PER_COMMIT = 64
_RECIPE = 1
"""Raised whenever the same options would give other tokens, or the same journal another place."""


@dataclass(frozen=True)
class PrepareOptions:
    """What to make shards of, and how; exactly one of the two tokenizer options counts."""

    inputs: InputOptions
    out: Path
    tokenizer: str = "bytes"
    train_tokenizer: int | None = None
    num_workers: int = 1
    shard_tokens: int = 100_000_000


@dataclass(frozen=True)
class PrepareProgress:
    """How far the work is; ``total_bytes`` is None where nobody knows."""

    done_bytes: int
    total_bytes: int | None
    tokens: int
    documents: int


@dataclass(frozen=True)
class PrepareResult:
    """What the folder holds; ``notes`` are sentences the user should see."""

    manifest: Manifest
    tokenizer: Tokenizer
    notes: tuple[str, ...]
    was_there: bool


def prepare(options: PrepareOptions, report: Callable[[PrepareProgress], None] = lambda _: None) -> PrepareResult:
    """Fill ``options.out`` with shards; a folder that is finished already is left as it is.

    Raises:
        DataError: the inputs cannot be read, or the folder cannot be written.
        ConfigError: an input does not exist, the folder holds something else, or another process is at work in it.
    """
    inputs = Inputs(options.inputs, leave_out=options.out)
    source = describe_source(options, inputs)
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        with _only_one(options.out):
            if _is_finished(options.out, source):
                return _result(options.out, Intake(), was_there=True)
            return _Preparation(options, inputs, source, report).run()
    except OSError as error:
        raise DataError(
            f"cannot write {options.out}: {error.strerror or error}; mend that and run the same command "
            f"again to go on from where it stopped"
        ) from error


def describe_source(options: PrepareOptions, inputs: Inputs) -> dict[str, Any]:
    """What the content of the folder depends on; equal descriptions give equal folders."""
    tokenizer = options.train_tokenizer or tokenizer_fingerprint(options.tokenizer)
    return {
        "recipe": _RECIPE,
        **inputs.fingerprint(),
        "tokenizer": tokenizer,
        "shard_tokens": options.shard_tokens,
    }


class _Preparation:
    """One run of the work, from the journal's place to the end."""

    def __init__(
        self,
        options: PrepareOptions,
        inputs: Inputs,
        source: dict[str, Any],
        report: Callable[[PrepareProgress], None],
    ) -> None:
        self._options = options
        self._inputs = inputs
        self._source = source
        self._report = report
        self._intake = Intake()
        journal = _read_journal(options.out)
        if journal is None or journal["source"] != source:
            journal = {"source": source, "batches": 0, "splits": {}}
            (options.out / TOKENIZER_FILE).unlink(missing_ok=True)
            # From here on the folder is known to be ours.
            write_json(options.out / JOURNAL, journal)
        self._num_batches = journal["batches"]
        self._tokenizer = self._make_tokenizer()
        self._writers = {split: self._make_writer(split, journal) for split in SPLITS}

    def run(self) -> PrepareResult:
        """Do what is left to do."""
        try:
            self._write_all()
            return self._finish()
        finally:
            for writer in self._writers.values():
                writer.release()

    def _make_tokenizer(self) -> Tokenizer:
        """The tokenizer, from the folder's own copy if it is made from a file."""
        own_file = self._options.out / TOKENIZER_FILE
        if self._options.train_tokenizer is None:
            tokenizer = load_tokenizer(self._options.tokenizer)
            if not Path(tokenizer.name).is_file():
                return tokenizer
        if not own_file.exists():
            unfinished = own_file.with_name(own_file.name + UNFINISHED)
            if self._options.train_tokenizer is None:
                shutil.copyfile(self._options.tokenizer, unfinished)
            else:
                train_tokenizer(self._inputs, self._options.train_tokenizer, unfinished)
            os.replace(unfinished, own_file)
        return load_tokenizer(str(own_file))

    def _make_writer(self, split: str, journal: dict[str, Any]) -> SplitWriter:
        options = self._options
        writer = SplitWriter(options.out, split, options.shard_tokens, self._tokenizer)
        if split in journal["splits"]:
            writer.go_on(journal["splits"][split])
        return writer

    def _write_all(self) -> None:
        stream = batches(self._inputs.pieces(self._intake))
        # What the journal has is read again, to find the place, but not tokenized again.
        left = islice(stream, self._num_batches, None)
        for tokens in tokenize_all(left, self._tokenizer, self._options.num_workers):
            self._write(tokens)
            self._report(self._progress())

    def _write(self, tokens: TokensBySplit) -> None:
        for split, writer in self._writers.items():
            writer.write(tokens[split])
        self._num_batches += 1
        if self._num_batches % _BATCHES_PER_COMMIT == 0:
            # First the tokens, then the note that says they are there.
            states = {split: writer.sync() for split, writer in self._writers.items()}
            journal = {"source": self._source, "batches": self._num_batches, "splits": states}
            write_json(self._options.out / JOURNAL, journal)

    def _progress(self) -> PrepareProgress:
        entries = [entry for writer in self._writers.values() for entry in writer.entries()]
        return PrepareProgress(
            done_bytes=self._intake.num_bytes,
            total_bytes=self._inputs.num_bytes,
            tokens=sum(entry.tokens for entry in entries),
            documents=sum(entry.documents for entry in entries),
        )

    def _finish(self) -> PrepareResult:
        out, tokenizer = self._options.out, self._tokenizer
        splits = {split: writer.finish() for split, writer in self._writers.items()}
        paths = [out / entry.name for entries in splits.values() for entry in entries]
        if not paths:
            raise DataError("there is no text in any document of the inputs")
        manifest = Manifest(
            tokenizer=TOKENIZER_FILE if Path(tokenizer.name).is_file() else tokenizer.name,
            vocab_size=tokenizer.vocab_size,
            end_of_text=tokenizer.end_of_text,
            splits=splits,
            source=self._source,
            commonest=commonest_token((open_shard(path).tokens for path in paths), tokenizer.vocab_size),
        )
        mark_verified(out, paths)
        write_manifest(out, manifest)
        (out / JOURNAL).unlink()
        return _result(out, self._intake, was_there=False)


def _result(out: Path, intake: Intake, was_there: bool) -> PrepareResult:
    manifest = read_manifest(out)
    own_file = out / TOKENIZER_FILE
    name = str(own_file) if manifest.tokenizer == TOKENIZER_FILE else manifest.tokenizer
    tokenizer = load_tokenizer(name)
    notes = (*intake.notes(), *warn_of(manifest.commonest, tokenizer))
    return PrepareResult(manifest, tokenizer, notes, was_there)


def _is_finished(out: Path, source: dict[str, Any]) -> bool:
    """Whether the folder holds what is asked for; raises if it holds something else."""
    if (out / MANIFEST).is_file():
        found, is_finished = read_manifest(out).source, True
    elif (journal := _read_journal(out)) is not None:
        # An attempt that came to nothing is no work that could be lost.
        found, is_finished = (journal["source"] if journal["batches"] else source), False
    elif any(out.iterdir()):
        raise ConfigError(f"{out} is not empty and not a folder of prepared data; choose another --out")
    else:
        return False
    if found != source:
        different = sorted(name for name in source if found.get(name) != source[name])
        raise ConfigError(
            f"{out} holds data prepared from something else (different: {', '.join(different)}); "
            f"choose another --out, or remove that folder"
        )
    return is_finished


def _read_journal(out: Path) -> dict[str, Any] | None:
    try:
        journal: dict[str, Any] = json.loads((out / JOURNAL).read_text("utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise DataError(f"{out / JOURNAL} is damaged; remove {out} and prepare again") from error
    return journal


@contextmanager
def _only_one(out: Path) -> Iterator[None]:
    """Keep a second process out of the folder; the lock ends with the process, however that ends."""
    try:
        import fcntl
    except ImportError:  # Windows: nothing that ends with the process is at hand
        yield
        return
    folder = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise ConfigError(f"another process is preparing data in {out}; wait for it to end") from error
    finally:
        os.close(folder)
