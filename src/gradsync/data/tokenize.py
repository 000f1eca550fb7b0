"""Tokenize a stream of pieces, in this process or in many, always in the order of the stream."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np

from gradsync.data.inputs import Piece
from gradsync.data.shards import TokenArray, token_dtype
from gradsync.data.split import SPLITS
from gradsync.data.tokenizer import Tokenizer, load_tokenizer
from gradsync.errors import DataError

BATCH_CHARS = 1 << 20
# Enough that no worker waits for the reader, few enough that memory stays bounded.
_BATCHES_PER_WORKER = 3

_worker_tokenizer: Tokenizer | None = None


TokensBySplit = dict[str, TokenArray]


def batches(pieces: Iterable[Piece], batch_chars: int = BATCH_CHARS) -> Iterator[list[Piece]]:
    """Pieces in lists of about ``batch_chars`` characters."""
    batch: list[Piece] = []
    num_chars = 0
    for piece in pieces:
        batch.append(piece)
        num_chars += len(piece.text)
        if num_chars >= batch_chars:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


def tokenize(batch: list[Piece], tokenizer: Tokenizer) -> TokensBySplit:
    """The tokens of a batch by split; the end-of-text token follows every document."""
    dtype = token_dtype(tokenizer.vocab_size)
    end = np.array([tokenizer.end_of_text], dtype=dtype)
    parts: dict[str, list[TokenArray]] = {split: [end[:0]] for split in SPLITS}
    for piece in batch:
        parts[piece.split].append(tokenizer.encode(piece.text).astype(dtype))
        if piece.ends_document:
            parts[piece.split].append(end)
    return {split: np.concatenate(arrays) for split, arrays in parts.items()}


def tokenize_all(stream: Iterable[list[Piece]], tokenizer: Tokenizer, num_workers: int) -> Iterator[TokensBySplit]:
    """The tokens of every batch in order; more than one worker means that many processes."""
    if num_workers > 1:
        yield from _tokenize_in_processes(stream, tokenizer.name, num_workers)
    else:
        for batch in stream:
            yield tokenize(batch, tokenizer)


def _tokenize_in_processes(
    stream: Iterable[list[Piece]], tokenizer_name: str, num_workers: int
) -> Iterator[TokensBySplit]:
    pool = ProcessPoolExecutor(
        num_workers,
        # Not fork: the caller may have threads (a progress display, torch).
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(tokenizer_name,),
    )
    running: deque[Future[TokensBySplit]] = deque()
    try:
        for batch in stream:
            running.append(pool.submit(_tokenize_in_worker, batch))
            if len(running) > _BATCHES_PER_WORKER * num_workers:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "a worker process ended without a word (killed, or out of memory); run the same command again "
            "to go on from where it stopped, with fewer --workers if memory is short"
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_worker(tokenizer_name: str) -> None:
    global _worker_tokenizer
    # Ctrl-C is for the parent, which then ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker_tokenizer = load_tokenizer(tokenizer_name)


def _end_with_parent() -> None:
    # A worker waits for work on a pipe whose other end it holds itself, so that it would never
    # notice that its parent was killed.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _tokenize_in_worker(batch: list[Piece]) -> TokensBySplit:
    assert _worker_tokenizer is not None
    return tokenize(batch, _worker_tokenizer)
