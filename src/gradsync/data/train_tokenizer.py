"""Train a byte-level BPE tokenizer, as GPT-2's is, on the training text of some inputs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gradsync.data.documents import Intake
from gradsync.data.inputs import Inputs
from gradsync.data.split import TRAIN
from gradsync.data.tokenizer import END_OF_TEXT
from gradsync.errors import ConfigError, MissingExtraError

SMALLEST_VOCAB = 257
"""Every byte and the end of a text: with these alone any text can be encoded."""

# More text than this changes little about the merges and costs much memory and time.
_ENOUGH_BYTES = 256 << 20


def train_tokenizer(inputs: Inputs, vocab_size: int, path: Path) -> None:
    """Write a tokenizer of up to ``vocab_size`` tokens to ``path``; small texts may give fewer."""
    if vocab_size < SMALLEST_VOCAB:
        raise ConfigError(
            f"a trained tokenizer has at least {SMALLEST_VOCAB} tokens (256 bytes and the end of a text), "
            f"got {vocab_size}"
        )
    try:
        import tokenizers
    except ImportError as error:
        raise MissingExtraError(
            "training a tokenizer needs the tokenizers library; install it with: pip install 'gradsync[tokenizers]'"
        ) from error
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        # All bytes, also those that the text lacks: no text is ever unknown.
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sample(inputs), trainer)
    tokenizer.save(str(path))


def _sample(inputs: Inputs) -> Iterator[str]:
    """Training text, evenly spread over inputs that are larger than what is needed."""
    every = -(-(inputs.num_bytes or 0) // _ENOUGH_BYTES) or 1
    num_bytes = 0
    texts = (piece.text for piece in inputs.pieces(Intake()) if piece.split == TRAIN)
    for number, text in enumerate(texts):
        if number % every == 0:
            num_bytes += len(text)
            yield text
        if num_bytes > _ENOUGH_BYTES:
            return
