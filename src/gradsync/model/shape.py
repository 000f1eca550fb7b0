"""The shape of a GPT-2 and its presets: plain numbers, checked. Imports no torch, so that a command can look first."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass
from typing import Any

from gradsync.errors import ConfigError

_BYTE_VOCAB = 257
_GPT2_VOCAB = 50257
_VOCAB_MULTIPLE = 64

# name: (layers, heads, width, context, vocabulary)
_PRESETS = {
    "tiny": (4, 5, 160, 128, _BYTE_VOCAB),
    "small": (4, 4, 256, 256, _BYTE_VOCAB),
    "gpt2": (12, 12, 768, 1024, _GPT2_VOCAB),
    "gpt2-medium": (24, 16, 1024, 1024, _GPT2_VOCAB),
    "gpt2-large": (36, 20, 1280, 1024, _GPT2_VOCAB),
    "gpt2-xl": (48, 25, 1600, 1024, _GPT2_VOCAB),
}
_ALIASES = {"medium": "gpt2-medium", "large": "gpt2-large", "xl": "gpt2-xl"}
PRESETS = (*_PRESETS, *_ALIASES)
"""Every name that ``GPT2Config.preset`` knows."""


@dataclass(frozen=True)
class GPT2Config:
    """The shape of one GPT-2; ``padded_vocab_size=None`` rounds the vocabulary up to a multiple of 64."""

    num_layers: int
    num_heads: int
    width: int
    context: int
    vocab_size: int
    # Always an int once constructed; None is only a way to ask for the default.
    padded_vocab_size: int = None  # type: ignore[assignment]
    dropout: float = 0.0
    bias: bool = True

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_heads", "width", "context", "vocab_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"GPT-2 needs {name} of at least 1, got {value!r}")
        if self.padded_vocab_size is None:
            padded = -(-self.vocab_size // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE
            object.__setattr__(self, "padded_vocab_size", padded)
        if self.padded_vocab_size < self.vocab_size:
            raise ConfigError(
                f"padded_vocab_size {self.padded_vocab_size} is smaller than the vocabulary "
                f"({self.vocab_size} tokens); leave it out to have it rounded up"
            )
        if self.width % self.num_heads:
            raise ConfigError(
                f"width {self.width} does not divide by {self.num_heads} heads; "
                f"every head takes an equal share of the width"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ConfigError(f"dropout must be in [0, 1), got {self.dropout}")

    @property
    def head_size(self) -> int:
        """Channels of one attention head."""
        return self.width // self.num_heads

    @classmethod
    def preset(cls, name: str, vocab_size: int | None = None, context: int | None = None, **changes: Any) -> GPT2Config:
        """The configuration called ``name``, with another vocabulary, context or other fields if given."""
        try:
            layers, heads, width, own_context, own_vocab = _PRESETS[_ALIASES.get(name, name)]
        except KeyError:
            near = difflib.get_close_matches(name, PRESETS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise ConfigError(f"unknown preset {name!r}{hint} (known: {', '.join(PRESETS)})") from None
        config = cls(layers, heads, width, context or own_context, vocab_size or own_vocab)
        # The padding follows the vocabulary unless the caller sets it.
        return dataclasses.replace(config, **changes) if changes else config
