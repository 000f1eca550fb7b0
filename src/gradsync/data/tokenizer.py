"""Tokenizers: text to token ids and back, also piece by piece while a sample is being produced.

Holds three of them: plain bytes (no files needed), GPT-2's (through tiktoken) and any file of the
``tokenizers`` library. Knows nothing of models or of how tokens are stored.
"""

from __future__ import annotations

import codecs
import textwrap
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gradsync.errors import ConfigError, DataError, MissingExtraError

END_OF_TEXT = "<|endoftext|>"
"""How the end-of-text token is spelled where it has to be shown."""

NAMED_TOKENIZERS = ("bytes", "gpt2")
"""Those that need no file."""

# Tokens that end a document in tokenizer files made elsewhere, most telling first.
_END_OF_TEXT_SPELLINGS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|im_end|>", "[SEP]")

TokenIds = NDArray[np.int64]


class Tokenizer(Protocol):
    """What the rest of the package asks of a tokenizer."""

    @property
    def name(self) -> str:
        """What ``load_tokenizer`` makes this tokenizer from."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, the end-of-text token included."""

    @property
    def end_of_text(self) -> int:
        """The id that separates documents; no text encodes to it."""

    def encode(self, text: str) -> TokenIds:
        """The ids of ``text``; whatever looks like a special token in it is ordinary text."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``; bytes that are not UTF-8 become U+FFFD."""

    def stream_decoder(self) -> StreamDecoder:
        """A decoder that takes one id at a time."""


class StreamDecoder(Protocol):
    """Decodes one id at a time; the pieces joined are what ``Tokenizer.decode`` gives."""

    def feed(self, token: int) -> str:
        """The text that is certain after one more token; empty within a character of several bytes."""

    def finish(self) -> str:
        """What was held back."""


class ByteTokenizer:
    """Every byte of the UTF-8 text is a token; 256 is the end of a text."""

    name = "bytes"
    vocab_size = 257
    end_of_text = 256

    def encode(self, text: str) -> TokenIds:
        """The bytes of ``text``."""
        return np.frombuffer(encodable(text).encode(), dtype=np.uint8).astype(np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """The text that the bytes spell."""
        return b"".join(map(self._bytes_of, ids)).decode("utf-8", errors="replace")

    def stream_decoder(self) -> StreamDecoder:
        """A decoder that holds back the bytes of an unfinished character."""
        return _ByteStreamDecoder(self._bytes_of)

    def _bytes_of(self, token: int) -> bytes:
        return END_OF_TEXT.encode() if token == self.end_of_text else bytes((int(token),))


class GPT2Tokenizer:
    """GPT-2's byte-pair tokens, through tiktoken."""

    name = "gpt2"

    def __init__(self) -> None:
        self._encoding = _load_tiktoken("gpt2")
        self.vocab_size: int = self._encoding.n_vocab
        self.end_of_text: int = self._encoding.eot_token

    def encode(self, text: str) -> TokenIds:
        """The byte-pair tokens of ``text``."""
        ids = self._encoding.encode_to_numpy(encodable(text), disallowed_special=())
        return ids.astype(np.int64)  # type: ignore[no-any-return]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``."""
        return self._encoding.decode([int(token) for token in ids])  # type: ignore[no-any-return]

    def stream_decoder(self) -> StreamDecoder:
        """A decoder that holds back the bytes of an unfinished character."""
        return _ByteStreamDecoder(self._encoding.decode_single_token_bytes)


class FileTokenizer:
    """A tokenizer saved as JSON by the ``tokenizers`` library."""

    def __init__(self, path: Path) -> None:
        self.path = path.resolve()
        self.name = str(self.path)
        self._tokenizer = _load_tokenizers_file(self.path)
        # Special tokens that appear in a text are text: only we separate documents.
        self._tokenizer.encode_special_tokens = True
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values()) + 1
        self.end_of_text: int = _find_end_of_text(vocabulary, path)

    def encode(self, text: str) -> TokenIds:
        """The tokens of ``text``, without any that the file would add around it."""
        return np.array(self._tokenizer.encode(encodable(text), add_special_tokens=False).ids, dtype=np.int64)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ``ids``, special tokens included."""
        return self._tokenizer.decode(  # type: ignore[no-any-return]
            [int(token) for token in ids], skip_special_tokens=False
        )

    def stream_decoder(self) -> StreamDecoder:
        """A decoder that emits text once later tokens cannot change it."""
        return _FileStreamDecoder(self._tokenizer)


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called ``bytes`` or ``gpt2``, or the one in a ``tokenizers`` JSON file."""
    if name == "bytes":
        return ByteTokenizer()
    if name == "gpt2":
        return GPT2Tokenizer()
    return FileTokenizer(_file_of(name))


def encodable(text: str) -> str:
    """Return the text with what UTF-8 cannot say as U+FFFD: halves of surrogate pairs, which JSON can spell."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def tokenizer_fingerprint(name: str) -> str:
    """What tells tokenizers apart: the name, or the content of a file wherever it lies."""
    return name if name in NAMED_TOKENIZERS else f"file:{zlib.crc32(_file_of(name).read_bytes()):08x}"


def _file_of(name: str) -> Path:
    path = Path(name)
    if not path.is_file():
        raise ConfigError(
            f"unknown tokenizer {name!r}: neither 'bytes' nor 'gpt2', and no such file; "
            f"give one of the two names or the path of a JSON file of the tokenizers library"
        )
    return path


class _ByteStreamDecoder:
    """For tokenizers whose tokens are bytes: the standard library's incremental UTF-8 decoder."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        return self._decoder.decode(self._bytes_of(int(token)))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _FileStreamDecoder:
    """For tokenizers whose text depends on the neighbours: the library's own stream."""

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=False)
        self._ids: list[int] = []
        self._num_emitted = 0

    def feed(self, token: int) -> str:
        self._ids.append(int(token))
        piece: str = self._stream.step(self._tokenizer, int(token)) or ""
        self._num_emitted += len(piece)
        return piece

    def finish(self) -> str:
        whole: str = self._tokenizer.decode(self._ids, skip_special_tokens=False)
        return whole[self._num_emitted :]


def _load_tiktoken(name: str) -> Any:
    try:
        import tiktoken
    except ImportError as error:
        raise MissingExtraError(
            "the gpt2 tokenizer needs tiktoken; install it with: pip install 'gradsync[tokenizers]'"
        ) from error
    try:
        return tiktoken.get_encoding(name)
    # tiktoken lets everything through that its download can raise: sockets, requests, hashes.
    except Exception as error:
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 150)
        raise DataError(
            f"the files of the {name} tokenizer could not be had ({reason}). "
            f"Either connect this machine to a network once, or set TIKTOKEN_CACHE_DIR to a folder that "
            f"holds them (copy that folder from a machine where tiktoken has loaded {name!r})"
        ) from error


def _load_tokenizers_file(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer as JsonTokenizer
    except ImportError as error:
        raise MissingExtraError(
            f"{path} needs the tokenizers library; install it with: pip install 'gradsync[tokenizers]'"
        ) from error
    try:
        return JsonTokenizer.from_file(str(path))
    # The library raises bare Exception for a file that is not its own.
    except Exception as error:
        raise DataError(f"{path} is not a JSON file of the tokenizers library: {error}") from error


def _find_end_of_text(vocabulary: dict[str, int], path: Path) -> int:
    for spelling in _END_OF_TEXT_SPELLINGS:
        if spelling in vocabulary:
            return vocabulary[spelling]
    raise ConfigError(
        f"{path} has no token that ends a text (looked for {', '.join(_END_OF_TEXT_SPELLINGS)}); "
        f"add one of them to the tokenizer as a special token"
    )
