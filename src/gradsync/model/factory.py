"""The user's own model, from a function of theirs. Knows nothing of ranks."""

import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradsync.errors import ConfigError


@dataclass(frozen=True)
class Factory:
    """How to make a model anew, what it is called with, and its loss."""

    build: Callable[[], nn.Module]
    batch: Any
    loss: Callable[[nn.Module, Any], Tensor]


def load_factory(path: str) -> Factory:
    """Return what ``module:function`` makes: ``(module, batch)`` or ``(module, batch, loss)``.

    ``loss(module, batch)`` returns a scalar; by default the mean square of ``module(batch)``.

    Raises:
        ConfigError: there is no such function, or it returns something else.
    """
    module_name, _, function_name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"--model {path}: {error}; give MODULE:FUNCTION, importable from this folder") from error
    made = _made(function)
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        raise ConfigError(
            f"--model {path}: the function must return (module, batch) or (module, batch, loss), not {made!r:.80}"
        )
    loss = made[2] if len(made) == 3 else mean_square
    return Factory(lambda: _made(function)[0], made[1], loss)


def mean_square(module: nn.Module, batch: Any) -> Tensor:
    """Return the mean square of the output."""
    output: Tensor = module(batch)
    return output.square().mean()


def _made(function: Callable[[], Any]) -> Any:
    """Call the function with seeded random numbers: it must make the same in every process, and each time."""
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    return function()
