"""What ``--data`` means: a text file, a folder of text files, prepared shards, or ``stdlib``.

Text is tokenized here, into memory or into a cache folder of shards; large amounts of text belong
to ``gradsync prepare``. The result is a training and a validation source, whatever it came from.
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gradsync.data.documents import Notes, read_text, stdlib_files, text_files
from gradsync.data.manifest import (
    MANIFEST,
    Manifest,
    ShardEntry,
    mark_verified,
    open_split,
    read_manifest,
    write_manifest,
)
from gradsync.data.shards import SUFFIX, ShardWriter, TokenArray, token_dtype
from gradsync.data.source import TokenSource
from gradsync.data.tokenizer import Tokenizer, load_tokenizer
from gradsync.errors import ConfigError, DataError

STDLIB = "stdlib"
DEFAULT_VAL_FRACTION = 0.05
TOKENIZER_FILE = "tokenizer.json"
"""Name under which a folder of shards holds a copy of its tokenizer, if that is a file."""

# Below this the choice of whole documents could miss the wanted share by far.
_FEWEST_DOCUMENTS_TO_SPLIT = 20


@dataclass(frozen=True)
class Corpus:
    """Tokens to train on and to validate with; ``notes`` are sentences the user should see."""

    train: TokenSource
    val: TokenSource
    tokenizer: Tokenizer
    name: str
    notes: tuple[str, ...] = ()


def load_corpus(
    data: str,
    tokenizer: str | None = None,
    val_fraction: float = DEFAULT_VAL_FRACTION,
    cache: Path | None = None,
) -> Corpus:
    """Open ``data``: ``stdlib``, a text file, a folder of text files, or a folder of prepared shards.

    Text is tokenized with ``tokenizer`` (bytes if not given) and split by ``val_fraction``: by whole
    documents (files) where there are 20 or more, else by cutting off the end. With ``cache`` (a
    folder that belongs to the corpus alone) the tokens are kept there and used again as long as
    files and options are the same. Prepared shards bring tokenizer and split with them.
    """
    path = Path(data)
    if data != STDLIB and not path.exists():
        raise DataError(
            f"no such file or folder: {data}; --data takes a text file, a folder of text files, a folder "
            f"made by gradsync prepare, or {STDLIB!r} for the standard library's sources"
        )
    if data != STDLIB and (path / MANIFEST).is_file():
        return open_prepared(path, tokenizer)
    if not 0.0 <= val_fraction < 1.0:
        raise ConfigError(f"the validation fraction must be in [0, 1), got {val_fraction}")
    text = _TextCorpus(data, load_tokenizer(tokenizer or "bytes"), val_fraction)
    return text.load() if cache is None else text.load_cached(cache)


def open_prepared(folder: Path, tokenizer: str | None = None) -> Corpus:
    """Open a folder of shards; naming another tokenizer than the folder's own is an error."""
    manifest = read_manifest(folder)
    own_file = folder / TOKENIZER_FILE
    own = load_tokenizer(str(own_file) if manifest.tokenizer == TOKENIZER_FILE else manifest.tokenizer)
    if (own.vocab_size, own.end_of_text) != (manifest.vocab_size, manifest.end_of_text):
        raise DataError(
            f"{folder} was made with a vocabulary of {manifest.vocab_size:,} tokens, its tokenizer "
            f"{manifest.tokenizer!r} has {own.vocab_size:,} now; prepare the data again"
        )
    if tokenizer is not None and not _is_same_tokenizer(tokenizer, own.name):
        raise ConfigError(
            f"{folder} was prepared with the tokenizer {manifest.tokenizer!r}, not {tokenizer!r}; "
            f"leave the tokenizer out, or prepare the text again with the other one"
        )
    return Corpus(
        train=_open_source(folder, manifest, "train"),
        val=_open_source(folder, manifest, "val"),
        tokenizer=own,
        name=str(folder),
    )


def cut_at_end(num_tokens: int, val_fraction: float) -> int:
    """How many tokens stay for training when validation is the end of a text."""
    return num_tokens - round(num_tokens * val_fraction)


class _TextCorpus:
    """Text files on their way to a corpus."""

    def __init__(self, data: str, tokenizer: Tokenizer, val_fraction: float) -> None:
        self._data = data
        self._tokenizer = tokenizer
        self._val_fraction = val_fraction
        self._root, self._files = _files_of(data)

    def load(self) -> Corpus:
        """Tokenize into memory."""
        notes = Notes()
        splits = self._tokenize(notes)
        return Corpus(
            train=TokenSource([splits["train"]], self._source_name("train")),
            val=TokenSource([splits["val"]], self._source_name("val")),
            tokenizer=self._tokenizer,
            name=self._name(),
            notes=tuple(notes.lines()),
        )

    def load_cached(self, cache: Path) -> Corpus:
        """Open the shards in ``cache`` if they were made from the same text, else make them."""
        source = self._fingerprint()
        notes = Notes()
        if not _holds(cache, source):
            self._write(cache, self._tokenize(notes), source)
        manifest = read_manifest(cache)
        return Corpus(
            train=_open_source(cache, manifest, "train"),
            val=_open_source(cache, manifest, "val"),
            tokenizer=self._tokenizer,
            name=self._name(),
            notes=tuple(notes.lines()),
        )

    def _tokenize(self, notes: Notes) -> dict[str, TokenArray]:
        """The tokens of both splits, every document followed by the end-of-text token."""
        dtype = token_dtype(self._tokenizer.vocab_size)
        end = np.array([self._tokenizer.end_of_text], dtype=dtype)
        names, documents = [], []
        for path in self._files:
            text = read_text(path, notes)
            if text is not None:
                names.append(path.relative_to(self._root).as_posix())
                documents.append(np.concatenate([self._tokenizer.encode(text).astype(dtype), end]))
        if not documents:
            raise DataError(f"{self._data} holds no text: " + _why_nothing(notes, len(self._files)))
        return _split(names, documents, self._val_fraction)

    def _write(self, cache: Path, splits: dict[str, TokenArray], source: dict[str, Any]) -> None:
        # Made beside the cache and renamed onto it: several processes may do this at once.
        unfinished = cache.with_name(f"{cache.name}.{os.getpid()}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        vocab_size = self._tokenizer.vocab_size
        entries: dict[str, tuple[ShardEntry, ...]] = {}
        for split, tokens in splits.items():
            with ShardWriter(unfinished / f"{split}-00000{SUFFIX}", vocab_size) as writer:
                writer.write(tokens)
            documents = int((tokens == self._tokenizer.end_of_text).sum())
            entries[split] = (ShardEntry(writer.path.name, len(tokens), documents),)
        manifest = Manifest(self._tokenizer.name, vocab_size, self._tokenizer.end_of_text, entries, source)
        write_manifest(unfinished, manifest)
        mark_verified(unfinished, sorted(unfinished.glob(f"*{SUFFIX}")))
        _rename_folder(unfinished, cache, source)

    def _fingerprint(self) -> dict[str, Any]:
        status = [path.stat() for path in self._files]
        listing = "\n".join(
            f"{path}\0{entry.st_size}\0{entry.st_mtime_ns}" for path, entry in zip(self._files, status, strict=True)
        )
        return {
            "data": self._data,
            "files": len(self._files),
            "bytes": sum(entry.st_size for entry in status),
            "listing_crc32": zlib.crc32(listing.encode("utf-8", errors="surrogateescape")),
            "tokenizer": self._tokenizer.name,
            "tokenizer_crc32": _crc_of_file(self._tokenizer.name),
            "val_fraction": self._val_fraction,
        }

    def _name(self) -> str:
        megabytes = sum(path.stat().st_size for path in self._files) / 1e6
        return f"{self._data} ({len(self._files):,} file(s), {megabytes:.1f} MB)"

    def _source_name(self, split: str) -> str:
        return f"the {split} split of {self._data}"


def _files_of(data: str) -> tuple[Path, list[Path]]:
    """The files that ``data`` means, and the folder that their names are told from."""
    if data == STDLIB:
        files = stdlib_files()
        return Path(os.path.commonpath(files)), files
    path = Path(data)
    if path.is_file():
        return path.parent, [path]
    files = text_files(path)
    if not files:
        raise DataError(f"{data} is an empty folder: there is no text in it to train on")
    return path, files


def _split(names: Sequence[str], documents: Sequence[TokenArray], val_fraction: float) -> dict[str, TokenArray]:
    if len(documents) < _FEWEST_DOCUMENTS_TO_SPLIT:
        tokens = np.concatenate(documents)
        cut = cut_at_end(len(tokens), val_fraction)
        return {"train": tokens[:cut], "val": tokens[cut:]}
    chosen = _choose_documents(names, [len(document) for document in documents], val_fraction)
    empty = documents[0][:0]
    return {
        split: np.concatenate(
            [empty, *(doc for name, doc in zip(names, documents, strict=True) if (name in chosen) == is_val)]
        )
        for split, is_val in (("train", False), ("val", True))
    }


def _choose_documents(names: Sequence[str], lengths: Sequence[int], val_fraction: float) -> set[str]:
    """Names of documents for validation: in an order that only the names decide, while they fit."""
    room = round(sum(lengths) * val_fraction)
    chosen = set()
    by_hash = sorted(zip(names, lengths, strict=True), key=lambda item: (zlib.crc32(item[0].encode()), item))
    for name, length in by_hash:
        if length <= room:
            chosen.add(name)
            room -= length
    return chosen


def _open_source(folder: Path, manifest: Manifest, split: str) -> TokenSource:
    shards = open_split(folder, manifest, split)
    return TokenSource([shard.tokens for shard in shards], f"the {split} split of {folder}")


def _holds(cache: Path, source: dict[str, Any]) -> bool:
    try:
        return read_manifest(cache).source == source
    except DataError:
        return False


def _rename_folder(unfinished: Path, cache: Path, source: dict[str, Any]) -> None:
    try:
        if cache.exists() and not _holds(cache, source):
            shutil.rmtree(cache)
        unfinished.rename(cache)
    except OSError:
        # Another process was first; its folder holds the same.
        shutil.rmtree(unfinished, ignore_errors=True)
        if not _holds(cache, source):
            raise


def _is_same_tokenizer(asked: str, own: str) -> bool:
    """By name, or by content where both are files: a folder of shards holds a copy of its own."""
    return asked == own or _crc_of_file(asked) == _crc_of_file(own) != 0


def _crc_of_file(name: str) -> int:
    """Checksum of a tokenizer's file; 0 for those that are known by name."""
    path = Path(name)
    return zlib.crc32(path.read_bytes()) if path.is_file() else 0


def _why_nothing(notes: Notes, num_files: int) -> str:
    if num_files == 1:
        return "the file is binary" if notes.binary else "the file is empty"
    return f"{len(notes.binary)} of {num_files} files are binary, {notes.empty} empty"
