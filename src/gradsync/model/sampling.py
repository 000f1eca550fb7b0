"""Continue token sequences with a GPT-2; tokens in, tokens out, text is the tokenizer's business.

Shapes: B batch, T tokens so far, V vocabulary, K tokens kept by top-k.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from gradsync.errors import ConfigError, NonFiniteError
from gradsync.model.gpt2 import GPT2Config
from gradsync.model.mode import HasMode, in_evaluation


class Sampled(HasMode, Protocol):
    """What sampling needs of a model; ``GPT2`` has it."""

    config: GPT2Config

    def next_token_logits(self, tokens: Tensor) -> Tensor:
        """Return logits (B, V) of the token after ``tokens`` (B, T)."""


def generate(
    model: Sampled,
    tokens: Tensor,
    num_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    stop_token: int | None = None,
) -> Tensor:
    """``tokens`` (B, T) and up to ``num_new_tokens`` more; the arguments are those of ``stream``."""
    new = stream(model, tokens, num_new_tokens, temperature, top_k, generator, stop_token)
    return torch.cat([tokens, *(token[:, None] for token in new)], dim=1)


def stream(
    model: Sampled,
    tokens: Tensor,
    num_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    stop_token: int | None = None,
) -> Iterator[Tensor]:
    """Yield the next token (B,) of every sequence, one step at a time.

    The model sees the last ``model.config.context`` tokens. Temperature 0 takes the likeliest
    token. A sequence that has produced ``stop_token`` goes on producing it; when all have, the
    stream ends.
    """
    _check_arguments(tokens, num_new_tokens, temperature, top_k)
    return _stream(model, tokens, num_new_tokens, temperature, top_k, generator, stop_token)


@torch.no_grad()
def _stream(
    model: Sampled,
    tokens: Tensor,
    num_new_tokens: int,
    temperature: float,
    top_k: int | None,
    generator: torch.Generator | None,
    stop_token: int | None,
) -> Iterator[Tensor]:
    context = model.config.context
    stopped = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
    for _ in range(num_new_tokens):
        tokens = tokens[:, -context:]
        # Per step and not around the loop: the caller may train between two tokens.
        with in_evaluation(model):
            logits = model.next_token_logits(tokens)
        token = _pick(logits.float(), temperature, top_k, generator)
        if stop_token is not None:
            token = torch.where(stopped, stop_token, token)
            stopped |= token == stop_token
        yield token
        if stop_token is not None and bool(stopped.all()):
            return
        tokens = torch.cat([tokens, token[:, None]], dim=1)


def _pick(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """One token (B,) for each row of ``logits`` (B, V)."""
    if not bool(torch.isfinite(logits).all()):
        raise NonFiniteError(
            "the model's logits are infinite or not a number, so no token can be drawn: its training has diverged; "
            "take an earlier checkpoint, and train with a lower --lr"
        )
    if temperature == 0.0:
        return logits.argmax(dim=-1)
    kept, ids = logits.topk(min(top_k or logits.shape[-1], logits.shape[-1]), dim=-1)  # B, K
    # Below the largest, which comes first: a tiny temperature must not make them overflow.
    probabilities = torch.softmax((kept - kept[:, :1]) / temperature, dim=-1)
    choice = torch.multinomial(probabilities, 1, generator=generator)
    return ids.gather(1, choice).squeeze(1)


def _check_arguments(tokens: Tensor, num_new_tokens: int, temperature: float, top_k: int | None) -> None:
    if tokens.ndim != 2 or tokens.shape[1] == 0:
        raise ConfigError(
            f"sampling continues tokens of shape (batch, length) with at least one token each, got "
            f"shape {tuple(tokens.shape)}; start from the end-of-text token to sample without a prompt"
        )
    if num_new_tokens < 0:
        raise ConfigError(f"the number of new tokens cannot be negative, got {num_new_tokens}")
    if not temperature >= 0.0:
        raise ConfigError(f"temperature must be 0 (greedy) or more, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ConfigError(f"top_k must be at least 1, got {top_k}; leave it out to keep every token")
