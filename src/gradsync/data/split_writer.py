"""Writes the tokens of one split as shards of equal size, so that another process can go on with it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from gradsync.data.manifest import ShardEntry
from gradsync.data.shards import SUFFIX, ShardWriter, TokenArray
from gradsync.data.tokenizer import Tokenizer


class SplitWriter:
    """The shards of one split, one after the other."""

    def __init__(self, folder: Path, split: str, shard_tokens: int, tokenizer: Tokenizer) -> None:
        self._folder = folder
        self._split = split
        self._shard_tokens = shard_tokens
        self._tokenizer = tokenizer
        self._done: list[ShardEntry] = []
        self._writer: ShardWriter | None = None
        self._documents = 0

    def go_on(self, state: dict[str, Any]) -> None:
        """Take up what an earlier writer had made durable."""
        self._done = [ShardEntry(**entry) for entry in state["done"]]
        self._documents = state["documents"]
        if state["tokens"]:
            self._open(keep_tokens=state["tokens"])

    def write(self, tokens: TokenArray) -> None:
        """Append tokens; every shard but the last gets the same number of them."""
        while len(tokens):
            writer = self._writer or self._open()
            room = self._shard_tokens - writer.num_tokens
            part, tokens = tokens[:room], tokens[room:]
            writer.write(part)
            self._documents += int(np.count_nonzero(part == self._tokenizer.end_of_text))
            if writer.num_tokens == self._shard_tokens:
                self._close()

    def sync(self) -> dict[str, Any]:
        """Make everything durable; returns what ``go_on`` needs to take it up."""
        if self._writer is not None:
            self._writer.sync()
        return {
            "done": [asdict(entry) for entry in self._done],
            "tokens": self._writer.num_tokens if self._writer else 0,
            "documents": self._documents,
        }

    def entries(self) -> list[ShardEntry]:
        """All shards, the unfinished one included."""
        return [*self._done, *([self._entry(self._writer)] if self._writer else [])]

    def finish(self) -> tuple[ShardEntry, ...]:
        """Close the last shard."""
        if self._writer is not None:
            self._close()
        return tuple(self._done)

    def release(self) -> None:
        """Leave an unfinished shard as it is."""
        if self._writer is not None:
            self._writer.release()

    def _open(self, keep_tokens: int = 0) -> ShardWriter:
        path = self._folder / f"{self._split}-{len(self._done):05d}{SUFFIX}"
        self._writer = ShardWriter(path, self._tokenizer.vocab_size, keep_tokens)
        return self._writer

    def _close(self) -> None:
        assert self._writer is not None
        self._writer.close()
        self._done.append(self._entry(self._writer))
        self._writer = None
        self._documents = 0

    def _entry(self, writer: ShardWriter) -> ShardEntry:
        return ShardEntry(writer.path.name, writer.num_tokens, self._documents)
