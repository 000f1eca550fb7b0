"""What is trained in a measurement: a model, a batch for each rank, a loss and an optimizer.

Knows nothing of process groups.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from gradsync.model.factory import load_factory, mean_square
from gradsync.model.gpt2 import GPT2, GPT2Config


@dataclass(frozen=True)
class Workload:
    """One training job; ``steps_per_sample`` steps are timed together, so that a sample is not too short.

    ``loss(module, batch)`` returns a scalar; ``batch(seed)`` the arguments of one rank.
    """

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[nn.Module, Any], torch.Tensor]
    optimizer_class: type[torch.optim.Optimizer]
    optimizer_options: dict[str, Any]
    steps_per_sample: int = 1

    def optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        """Return a new optimizer of the module's parameters."""
        return self.optimizer_class(module.parameters(), **self.optimizer_options)


def _toy() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 1))


def _many() -> nn.Module:
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(500)])


def _mlp() -> nn.Module:
    return nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)])


def _gpt(config: GPT2Config) -> nn.Module:
    return GPT2(config)


def _random_inputs(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _random_tokens(batch_size: int, context: int, vocab_size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(vocab_size, (batch_size, context + 1), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _token_loss(module: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = module(*batch)[1]
    return loss


_SGD = (torch.optim.SGD, {"lr": 1e-6})
_ADAMW = (torch.optim.AdamW, {"lr": 1e-6, "fused": True})


def _gpt_workload(name: str, config: GPT2Config, batch_size: int, context: int) -> Workload:
    batch = partial(_random_tokens, batch_size, context, config.vocab_size)
    return Workload(name, partial(_gpt, config), batch, _token_loss, *_ADAMW)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "toy": lambda: Workload("toy", _toy, partial(_random_inputs, (32, 10)), mean_square, *_SGD, 200),
    "many": lambda: Workload("many", _many, partial(_random_inputs, (8, 16)), mean_square, *_SGD, 10),
    "mlp": lambda: Workload("mlp", _mlp, partial(_random_inputs, (64, 1024)), mean_square, *_SGD, 4),
    "gpt-small": lambda: _gpt_workload(
        "gpt-small", GPT2Config(num_layers=6, num_heads=6, width=384, context=256, vocab_size=257), 4, 256
    ),
    "gpt2": lambda: _gpt_workload("gpt2", GPT2Config.preset("gpt2", vocab_size=50257), 1, 256),
}
"""toy: the smallest step; many: 1000 small parameters; mlp: 8 x 1024 x 1024, batch 64; gpt-small: 6 layers, 384 wide,
4 x 256 tokens; gpt2: 124M, 1 x 256 tokens."""


def workload_of_factory(path: str) -> Workload:
    """Return the workload around the user's own model; see ``load_factory``.

    Raises:
        ConfigError: there is no such function, or it returns something else.
    """
    factory = load_factory(path)
    return Workload(path, factory.build, lambda _: factory.batch, factory.loss, *_SGD)
