"""Token shards: one file of token ids with a header that says what it holds and proves it.

Little-endian, 64 bytes of header and then the ids::

    magic 8s | version u32 | bytes per id u32 | vocabulary u64 | ids u64 | BLAKE2b of the ids 16s
    | reserved 12s | CRC-32 of the header before this field u32

Reading never executes anything. A folder of shards is the business of ``manifest.py``.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from gradsync.errors import DataError

MAGIC = b"GRDSYNCT"
VERSION = 1
SUFFIX = ".tokens"
UNFINISHED = ".unfinished"

_BODY = struct.Struct("<8sIIQQ16s12x")
_CHECK = struct.Struct("<I")
HEADER_BYTES = _BODY.size + _CHECK.size

_DIGEST_BYTES = 16
_BLOCK_BYTES = 1 << 22
_VERIFY_CHUNK_TOKENS = 1 << 22
_MAX_VOCAB = {2: 1 << 16, 4: 1 << 32}

TokenArray = NDArray[np.unsignedinteger[Any]]


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """The smallest dtype that shards use for ids of this vocabulary."""
    if vocab_size <= _MAX_VOCAB[2]:
        return np.dtype("<u2")
    if vocab_size <= _MAX_VOCAB[4]:
        return np.dtype("<u4")
    raise DataError(f"a vocabulary of {vocab_size:,} tokens does not fit the 32-bit ids of a shard")


@dataclass(frozen=True)
class ShardHeader:
    """What a shard says about itself."""

    vocab_size: int
    num_tokens: int
    digest: bytes

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """The dtype of the ids."""
        return token_dtype(self.vocab_size)

    def pack(self) -> bytes:
        """The header's 64 bytes."""
        body = _BODY.pack(MAGIC, VERSION, self.dtype.itemsize, self.vocab_size, self.num_tokens, self.digest)
        return body + _CHECK.pack(zlib.crc32(body))


class ShardWriter:
    """Writes one shard in bounded memory; the file appears under its name only when it is whole.

    A context manager: leaving it through an exception removes the unfinished file. With
    ``keep_tokens`` it goes on with an earlier writer's file, of which that many tokens are kept.
    """

    def __init__(self, path: Path, vocab_size: int, keep_tokens: int = 0) -> None:
        self.path = path
        self.vocab_size = vocab_size
        self.num_tokens = keep_tokens
        self._dtype = token_dtype(vocab_size)
        self._digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        self._unfinished = path.with_name(path.name + UNFINISHED)
        if keep_tokens:
            # The earlier writer may have got as far as giving the file its name.
            if not self._unfinished.exists() and path.exists():
                os.replace(path, self._unfinished)
            self._file = self._unfinished.open("r+b")
            self._keep(keep_tokens)
        else:
            self._file = self._unfinished.open("w+b")
            self._file.write(bytes(HEADER_BYTES))

    def write(self, ids: NDArray[Any]) -> None:
        """Append token ids; one that is not in the vocabulary is refused."""
        if ids.size == 0:
            return
        check_ids(int(ids.min()), int(ids.max()), self.vocab_size, self.path)
        data = np.ascontiguousarray(ids, dtype=self._dtype).data.cast("B")
        self._digest.update(data)
        self._file.write(data)
        self.num_tokens += ids.size

    def sync(self) -> None:
        """Make what was written durable, so that a later writer can keep it."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> ShardHeader:
        """Write the header, make the file durable and give it its name."""
        header = ShardHeader(self.vocab_size, self.num_tokens, self._digest.digest())
        self._file.seek(0)
        self._file.write(header.pack())
        self.sync()
        self._file.close()
        os.replace(self._unfinished, self.path)
        return header

    def release(self) -> None:
        """Close the file as it is, for a later writer to go on with."""
        # What cannot be written any more was not promised to be there.
        with contextlib.suppress(OSError):
            self._file.close()

    def discard(self) -> None:
        """Give up and remove what was written."""
        self.release()
        with contextlib.suppress(FileNotFoundError):
            self._unfinished.unlink()

    def _keep(self, num_tokens: int) -> None:
        """Hash the tokens to keep and cut off what follows them."""
        self._file.seek(HEADER_BYTES)
        left = num_tokens * self._dtype.itemsize
        while left:
            block = self._file.read(min(left, _BLOCK_BYTES))
            if not block:
                self.release()
                raise DataError(
                    f"{self._unfinished} is shorter than it was when it was last saved; remove its folder "
                    f"and prepare the data again"
                )
            self._digest.update(block)
            left -= len(block)
        self._file.truncate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self.discard()


@dataclass(frozen=True)
class Shard:
    """An open shard; ``tokens`` is memory-mapped."""

    path: Path
    header: ShardHeader
    tokens: TokenArray

    def verify(self) -> None:
        """Read the whole shard once: checksum and vocabulary, or ``DataError``."""
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        largest = 0
        for start in range(0, len(self.tokens), _VERIFY_CHUNK_TOKENS):
            chunk = np.ascontiguousarray(self.tokens[start : start + _VERIFY_CHUNK_TOKENS])
            digest.update(chunk.data.cast("B"))
            largest = max(largest, int(chunk.max()))
        if digest.digest() != self.header.digest:
            raise DataError(
                f"{self.path} is damaged: its tokens do not match its checksum; prepare the data again, "
                f"or copy the file again from where it is whole"
            )
        check_ids(0, largest, self.header.vocab_size, self.path)


def open_shard(path: Path) -> Shard:
    """Map a shard into memory; its header and its length are checked, its tokens are not read."""
    header = read_header(path)
    tokens: TokenArray
    if header.num_tokens == 0:
        tokens = np.empty(0, dtype=header.dtype)
    else:
        tokens = np.memmap(path, header.dtype, "r", HEADER_BYTES, (header.num_tokens,))
    return Shard(path, header, tokens)


def read_header(path: Path) -> ShardHeader:
    """The header of a shard, or ``DataError`` with the reason why ``path`` is none."""
    try:
        with path.open("rb") as file:
            raw = file.read(HEADER_BYTES)
            num_bytes = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"cannot read the token shard {path}: {error.strerror or error}") from error
    if raw[: len(MAGIC)] != MAGIC:
        raise DataError(
            f"{path} is not a gradsync token shard (it begins with {raw[: len(MAGIC)]!r}, not {MAGIC!r}); "
            f"make shards from text with: gradsync prepare"
        )
    if len(raw) < HEADER_BYTES:
        raise DataError(f"{path} is truncated: {len(raw)} bytes, its header alone takes {HEADER_BYTES}")
    _, version, item_bytes, vocab_size, num_tokens, digest = _BODY.unpack_from(raw)
    if version != VERSION:
        raise DataError(
            f"{path} is a token shard of version {version}, this gradsync reads version {VERSION}; "
            f"prepare the data again with this version"
        )
    header = ShardHeader(vocab_size, num_tokens, digest)
    if _CHECK.unpack_from(raw, _BODY.size)[0] != zlib.crc32(raw[: _BODY.size]):
        raise DataError(f"{path} is damaged: its header does not match its own checksum")
    if not 0 < vocab_size <= _MAX_VOCAB[4] or item_bytes != header.dtype.itemsize:
        raise DataError(f"{path} is damaged: {item_bytes} bytes an id for a vocabulary of {vocab_size}")
    expected_bytes = HEADER_BYTES + num_tokens * item_bytes
    if num_bytes != expected_bytes:
        what = "truncated" if num_bytes < expected_bytes else "longer than it says"
        raise DataError(f"{path} is {what}: {num_bytes:,} bytes, {num_tokens:,} tokens take {expected_bytes:,}")
    return header


def check_ids(smallest: int, largest: int, vocab_size: int, where: Path) -> None:
    """Refuse ids that no model of this vocabulary could look up."""
    if smallest < 0 or largest >= vocab_size:
        culprit = smallest if smallest < 0 else largest
        raise DataError(
            f"{where}: token id {culprit} is outside the vocabulary of {vocab_size:,} tokens; "
            f"the tokens were made with another tokenizer than the one named"
        )
