"""What ``--data`` means: a text file, a folder of text files, prepared shards, or ``stdlib``.

Text is tokenized here, into memory or into a cache folder of shards; large amounts of text belong
to ``gradsync prepare``. The result is a training and a validation source, whatever it came from.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gradsync.data.documents import Intake
from gradsync.data.inputs import STDLIB, InputOptions, Inputs
from gradsync.data.manifest import MANIFEST, TOKENIZER_FILE, Manifest, open_split, read_manifest
from gradsync.data.prepare import JOURNAL, PrepareOptions, describe_source, prepare
from gradsync.data.shards import SUFFIX, UNFINISHED
from gradsync.data.source import TokenSource
from gradsync.data.split import SPLITS, TRAIN, VAL
from gradsync.data.statistics import commonest_token, warn_of
from gradsync.data.tokenize import batches, tokenize
from gradsync.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_fingerprint
from gradsync.errors import ConfigError, DataError

DEFAULT_VAL_FRACTION = 0.05


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
    files where there are 20 or more, else by cutting off the end. With ``cache`` (a folder that
    belongs to the corpus alone) the tokens are kept there and used again as long as files and
    options are the same.
    """
    if data != STDLIB and (Path(data) / MANIFEST).is_file():
        return open_prepared(Path(data), tokenizer)
    _check_is_text(Path(data))
    inputs = Inputs(InputOptions((data,), val_fraction))
    name = f"{data} ({len(inputs.files):,} file(s), {_size(inputs.num_bytes or 0)})"
    if cache is None:
        return _load_into_memory(inputs, load_tokenizer(tokenizer or "bytes"), name)
    return replace(_open_cache(inputs, tokenizer or "bytes", cache), name=name)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 100_000 else f"{num_bytes / 1e3:.1f} kB"


def tokenizer_of(data: str, tokenizer: str | None = None) -> Tokenizer:
    """Return the tokenizer that ``load_corpus`` would take; no text is read."""
    if data != STDLIB and (Path(data) / MANIFEST).is_file():
        return _own_tokenizer(Path(data), read_manifest(Path(data)), tokenizer)
    return load_tokenizer(tokenizer or "bytes")


def open_prepared(folder: Path, tokenizer: str | None = None) -> Corpus:
    """Open a folder of shards; naming another tokenizer than the folder's own is an error."""
    manifest = read_manifest(folder)
    own = _own_tokenizer(folder, manifest, tokenizer)
    return Corpus(
        train=_open_source(folder, manifest, TRAIN),
        val=_open_source(folder, manifest, VAL),
        tokenizer=own,
        name=str(folder),
        notes=tuple(warn_of(manifest.commonest, own)),
    )


def _own_tokenizer(folder: Path, manifest: Manifest, tokenizer: str | None) -> Tokenizer:
    has_own_file = manifest.tokenizer == TOKENIZER_FILE
    own = load_tokenizer(str(folder / TOKENIZER_FILE) if has_own_file else manifest.tokenizer)
    if (own.vocab_size, own.end_of_text) != (manifest.vocab_size, manifest.end_of_text):
        raise DataError(
            f"{folder} was made with a vocabulary of {manifest.vocab_size:,} tokens, its tokenizer "
            f"{manifest.tokenizer!r} has {own.vocab_size:,} now; prepare the data again"
        )
    if tokenizer is not None and tokenizer_fingerprint(tokenizer) != tokenizer_fingerprint(own.name):
        raise ConfigError(
            f"{folder} was prepared with the tokenizer {manifest.tokenizer!r}, not {tokenizer!r}; "
            f"leave the tokenizer out, or prepare the text again with the other one"
        )
    return own


def _check_is_text(path: Path) -> None:
    """Refuse token shards without their manifest, whose other files would pass for text."""
    if path.is_dir() and ((path / JOURNAL).exists() or any(path.glob(f"*{SUFFIX}*"))):
        raise DataError(
            f"{path} holds token shards but no {MANIFEST}: it was not prepared to the end, or is not whole; "
            f"run the same 'gradsync prepare' again"
        )
    if path.suffix == SUFFIX:
        raise DataError(f"{path} is one token shard; name the folder that it lies in")


def _load_into_memory(inputs: Inputs, tokenizer: Tokenizer, name: str) -> Corpus:
    intake = Intake()
    tokenized = [tokenize(batch, tokenizer) for batch in batches(inputs.pieces(intake))]
    if not tokenized:
        raise DataError(f"{name} holds no text")
    arrays = {split: np.concatenate([tokens[split] for tokens in tokenized]) for split in SPLITS}
    warnings = warn_of(commonest_token(arrays.values(), tokenizer.vocab_size), tokenizer)
    return Corpus(
        train=TokenSource([arrays[TRAIN]], f"the training split of {name}"),
        val=TokenSource([arrays[VAL]], f"the validation split of {name}"),
        tokenizer=tokenizer,
        name=name,
        notes=(*intake.notes(), *warnings),
    )


def _open_cache(inputs: Inputs, tokenizer: str, cache: Path) -> Corpus:
    """Open the shards in ``cache`` if they were made from the same text, else make them."""
    # Made beside the cache and renamed onto it: several processes may do this at once.
    unfinished = cache.with_name(f"{cache.name}.{os.getpid()}{UNFINISHED}")
    options = PrepareOptions(inputs.options, unfinished, tokenizer)
    source = describe_source(options, inputs)
    if _holds(cache, source):
        return open_prepared(cache)
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        notes = prepare(options).notes
        _put_in_place(unfinished, cache, source)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return replace(open_prepared(cache), notes=notes)


def _holds(cache: Path, source: dict[str, Any]) -> bool:
    try:
        return read_manifest(cache).source == source
    except DataError:
        return False


def _put_in_place(unfinished: Path, cache: Path, source: dict[str, Any]) -> None:
    try:
        if cache.exists() and not _holds(cache, source):
            shutil.rmtree(cache)
        unfinished.rename(cache)
    except OSError:
        # Another process was first; its folder holds the same.
        if not _holds(cache, source):
            raise


def _open_source(folder: Path, manifest: Manifest, split: str) -> TokenSource:
    shards = open_split(folder, manifest, split)
    return TokenSource([shard.tokens for shard in shards], f"the {split} split of {folder}")
