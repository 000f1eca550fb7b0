"""GPT-2: the architecture, its initialisation and its optimizer groups.

Knows nothing of ranks, devices or data. Module names are those of the Hugging Face model, so that
weights travel both ways; the projections are plain ``nn.Linear`` (transposed against its Conv1D).
Shape and presets are in ``shape.py``, sampling is in ``sampling.py``.

Shapes: B batch, T tokens, C channels (width), H heads, D head size (C = H * D), V vocabulary,
P vocabulary padded for the hardware (P >= V).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradsync.errors import ConfigError
from gradsync.model.shape import PRESETS as PRESETS
from gradsync.model.shape import GPT2Config as GPT2Config

IGNORED_TARGET = -1
"""A target of this value takes no part in the loss (padding of a last, partial window)."""

_INIT_STD = 0.02
_FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


class Attention(nn.Module):
    """Causal self-attention over all heads at once."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        self.c_proj = nn.Linear(config.width, config.width, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Mix every token with those before it: (B, T, C) -> (B, T, C)."""
        batch, length, _ = x.shape
        # The heads are as many as the projection gives, whatever the width of x.
        query, key, value = (
            part.view(batch, length, -1, self.head_size).transpose(1, 2)  # B, H, T, D
            for part in self.c_attn(x).chunk(3, dim=2)
        )
        mixed = F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        mixed = mixed.transpose(1, 2).reshape(batch, length, -1)
        return self.resid_dropout(self.c_proj(mixed))  # type: ignore[no-any-return]


class MLP(nn.Module):
    """The position-wise network of a block, four times as wide inside."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.width, 4 * config.width, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.width, config.width, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C); the tanh form of GELU is the one GPT-2 was trained with."""
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")))  # type: ignore[no-any-return]


class Block(nn.Module):
    """One layer: attention and MLP, each normalised before and added to the residual stream."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width, bias=config.bias)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.width, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Everything below the head: embeddings, blocks, final norm."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.padded_vocab_size, config.width)
        self.wpe = nn.Embedding(config.context, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.ln_f = nn.LayerNorm(config.width, bias=config.bias)

    def forward(self, tokens: Tensor, activation_checkpointing: bool = False) -> Tensor:
        """Token ids (B, T) -> normalised hidden states (B, T, C)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.drop(self.wte(tokens) + self.wpe(positions))
        for block in self.h:
            x = checkpoint(block, x, use_reentrant=False) if activation_checkpointing else block(x)
        return self.ln_f(x)  # type: ignore[no-any-return]


class GPT2(nn.Module):
    """GPT-2 with its embedding and head tied.

    The vocabulary is padded to P rows because matrix products run faster on round sizes. The
    P - V padded rows stand for no token, so their columns are cut from the logits before anything
    looks at them: the loss is a softmax over the V real tokens and no sample can leave the
    vocabulary. The rows start as zeros, never get a gradient and so stay zeros.
    """

    def __init__(self, config: GPT2Config, activation_checkpointing: bool = False) -> None:
        super().__init__()
        self.config = config
        self.activation_checkpointing = activation_checkpointing
        self.transformer = Transformer(config)
        self.lm_head = nn.Linear(config.width, config.padded_vocab_size, bias=False)
        self.tie_weights()
        self.init_weights()

    def tie_weights(self) -> None:
        """Make head and embedding one parameter (again, after ``to_empty`` has split them)."""
        self.lm_head.weight = self.transformer.wte.weight

    @torch.no_grad()
    def init_weights(self) -> None:
        """GPT-2's initialisation: 0.02 everywhere, less where a layer adds to the residual stream."""
        residual_std = _INIT_STD / math.sqrt(2 * self.config.num_layers)
        for name, module in self.transformer.named_modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear | nn.Embedding):
                std = residual_std if name.endswith("c_proj") else _INIT_STD
                module.weight.normal_(0.0, std)
                if isinstance(module, nn.Linear) and module.bias is not None:
                    module.bias.zero_()
        self.transformer.wte.weight[self.config.vocab_size :].zero_()

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        reduction: Literal["mean", "sum"] = "mean",
    ) -> tuple[Tensor, Tensor | None]:
        """Logits (B, T, V) of ``tokens`` (B, T), and the loss against ``targets`` (B, T) if given.

        A target of -1 is left out of the loss. The loss is computed in float32 whatever the dtype
        of the logits.
        """
        logits = self._logits(self._hidden(tokens))
        if targets is None:
            return logits, None
        loss = F.cross_entropy(
            logits.float().flatten(0, 1),
            targets.flatten(),
            ignore_index=IGNORED_TARGET,
            reduction=reduction,
        )
        return logits, loss

    def next_token_logits(self, tokens: Tensor) -> Tensor:
        """Logits (B, V) of the token after ``tokens``; the head runs on the last position alone."""
        return self._logits(self._hidden(tokens)[:, -1])

    def num_parameters(self) -> int:
        """Parameters of the tied model without the padding of the vocabulary."""
        padding = (self.config.padded_vocab_size - self.config.vocab_size) * self.config.width
        return sum(parameter.numel() for parameter in self.parameters()) - padding

    def estimate_flops_per_token(self) -> int:
        """Floating-point operations of forward and backward for one token at full context.

        Six per weight that takes part in a matrix product (the position table does not), and
        twelve per channel, layer and position attended to. By custom the causal half that a good
        kernel skips is counted, and what activation checkpointing computes twice is not.
        """
        config = self.config
        in_products = self.num_parameters() - config.context * config.width
        return 6 * in_products + 12 * config.num_layers * config.width * config.context

    def configure_optimizers(
        self,
        weight_decay: float,
        learning_rate: float,
        device_type: str,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> torch.optim.AdamW:
        """AdamW with decay on matrices and embeddings only, fused where the device has a fused kernel."""
        return torch.optim.AdamW(
            decay_groups(self.parameters(), weight_decay),
            lr=learning_rate,
            betas=betas,
            eps=eps,
            fused=has_fused_optimizer(device_type),
        )

    def _hidden(self, tokens: Tensor) -> Tensor:
        if tokens.shape[1] > self.config.context:
            raise ConfigError(
                f"a sequence of {tokens.shape[1]} tokens is longer than the model's context of "
                f"{self.config.context}; cut it, or build the model with a longer context"
            )
        return self.transformer(tokens, self.activation_checkpointing)  # type: ignore[no-any-return]

    def _logits(self, hidden: Tensor) -> Tensor:
        # The product runs over all P rows, that is what the padding is for; the cut is a view.
        return self.lm_head(hidden)[..., : self.config.vocab_size]  # type: ignore[no-any-return]


def decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups of an optimizer: matrices and embeddings decay, vectors don't; frozen ones are in none."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def has_fused_optimizer(device_type: str) -> bool:
    """Whether torch has a fused AdamW for this device."""
    return torch.device(device_type).type in _FUSED_DEVICES
