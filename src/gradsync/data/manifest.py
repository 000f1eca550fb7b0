"""A folder of token shards: the manifest that names them, and how the folder is opened and verified.

The manifest is plain JSON. File names in it must be plain names: nothing outside the folder is ever
opened because a manifest says so.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gradsync.data.shards import UNFINISHED, Shard, open_shard
from gradsync.data.tokenizer import NAMED_TOKENIZERS
from gradsync.errors import DataError

MANIFEST = "manifest.json"
TOKENIZER_FILE = "tokenizer.json"
"""Name under which a folder holds a copy of its tokenizer, if that is a file."""

_VERIFIED = "verified.json"
_FORMAT = "gradsync-tokens"
_VERSION = 1


@dataclass(frozen=True)
class ShardEntry:
    """One shard of a split."""

    name: str
    tokens: int
    documents: int


@dataclass(frozen=True)
class Commonest:
    """The most frequent token and its share: a text that is mostly one token is hardly a text."""

    token: int
    share: float


@dataclass(frozen=True)
class Manifest:
    """What a folder of shards holds; ``source`` says what it was made from, for reuse and restart."""

    tokenizer: str
    vocab_size: int
    end_of_text: int
    splits: dict[str, tuple[ShardEntry, ...]]
    source: dict[str, Any]
    commonest: Commonest

    def num_tokens(self, split: str) -> int:
        """Tokens of one split, 0 where there is no such split."""
        return sum(entry.tokens for entry in self.splits.get(split, ()))

    def num_documents(self, split: str) -> int:
        """Documents of one split."""
        return sum(entry.documents for entry in self.splits.get(split, ()))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write (atomically) the manifest of ``folder``."""
    content = {"format": _FORMAT, "version": _VERSION, **asdict(manifest)}
    write_json(folder / MANIFEST, content)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of ``folder``, or ``DataError`` with what is wrong with it."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged: not JSON ({error})") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise DataError(f"{path} is not the manifest of a gradsync data folder (no format {_FORMAT!r})")
    if content.get("version") != _VERSION:
        raise DataError(
            f"{path} has version {content.get('version')!r}, this gradsync reads version {_VERSION}; "
            f"prepare the data again with this version"
        )
    try:
        return Manifest(
            tokenizer=_read_tokenizer(content["tokenizer"]),
            vocab_size=int(content["vocab_size"]),
            end_of_text=int(content["end_of_text"]),
            splits={
                str(split): tuple(_read_entry(entry) for entry in entries)
                for split, entries in content["splits"].items()
            },
            source=dict(content["source"]),
            commonest=Commonest(int(content["commonest"]["token"]), float(content["commonest"]["share"])),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DataError(f"{path} is damaged: {type(error).__name__}: {error}") from error


def open_split(folder: Path, manifest: Manifest, split: str) -> list[Shard]:
    """Every shard of a split, opened, checked against the manifest and verified once.

    The tokens themselves are read and checksummed only when size or time of a file are not those
    of the last verification, which is noted in the folder where that is possible.
    """
    shards = [_open_entry(folder, manifest, entry) for entry in manifest.splits.get(split, ())]
    _verify_once(folder, shards)
    return shards


def mark_verified(folder: Path, paths: Iterable[Path]) -> None:
    """Note that the present content of these shards is known to be right."""
    verified = _read_verified(folder) | {path.name: _stamp(path) for path in paths}
    # A read-only folder is legal; its shards are then verified at every start.
    with contextlib.suppress(OSError):
        write_json(folder / _VERIFIED, verified)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON so that a reader sees the old content or the new, never a part."""
    # Several processes may note a verification at the same time.
    unfinished = path.with_name(f"{path.name}.{os.getpid()}{UNFINISHED}")
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def _read_tokenizer(name: Any) -> str:
    if name not in (*NAMED_TOKENIZERS, TOKENIZER_FILE):
        raise ValueError(f"{name!r} is no tokenizer; a file of one lies beside the manifest as {TOKENIZER_FILE}")
    return str(name)


def _read_entry(entry: dict[str, Any]) -> ShardEntry:
    name = str(entry["name"])
    if name != os.path.basename(name) or name in ("", ".", "..") or "\\" in name or "\0" in name:
        raise ValueError(f"{name!r} is not a plain file name; shards lie beside their manifest")
    return ShardEntry(name, int(entry["tokens"]), int(entry["documents"]))


def _open_entry(folder: Path, manifest: Manifest, entry: ShardEntry) -> Shard:
    shard = open_shard(folder / entry.name)
    found = (shard.header.vocab_size, shard.header.num_tokens)
    if found != (manifest.vocab_size, entry.tokens):
        raise DataError(
            f"{shard.path} is not the shard that {folder / MANIFEST} names: it has {found[1]:,} tokens of "
            f"a vocabulary of {found[0]:,}, expected {entry.tokens:,} of {manifest.vocab_size:,}; "
            f"prepare the data again"
        )
    return shard


def _verify_once(folder: Path, shards: list[Shard]) -> None:
    verified = _read_verified(folder)
    unknown = [shard for shard in shards if verified.get(shard.path.name) != _stamp(shard.path)]
    for shard in unknown:
        shard.verify()
    if unknown:
        mark_verified(folder, [shard.path for shard in unknown])


def _read_verified(folder: Path) -> dict[str, Any]:
    # Only a memory of work done: missing or damaged, the work is done again.
    try:
        content = json.loads((folder / _VERIFIED).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _stamp(path: Path) -> list[int]:
    """Return what no longer holds when a file was changed or copied; its time of change cannot be set by hand."""
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
