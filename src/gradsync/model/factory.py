"""The user's own model, from a function of theirs. Knows nothing of ranks."""

import importlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gradsync.errors import ConfigError, GradsyncError, UserCodeError, in_users_words


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
        UserCodeError: it raises; also each time that ``build`` or ``loss`` does.
    """
    function = _find(path)
    build = _guarded(path, partial(_made, function))
    made = build()
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        raise ConfigError(
            f"--model {path}: the function must return (module, batch) or (module, batch, loss), not {made!r:.80}"
        )
    loss = made[2] if len(made) == 3 else mean_square
    return Factory(lambda: build()[0], made[1], _guarded(path, loss))


def _find(path: str) -> Callable[[], Any]:
    module_name, _, function_name = path.partition(":")
    remedy = "give MODULE:FUNCTION, importable from this folder"
    try:
        module = importlib.import_module(module_name)
    except (ModuleNotFoundError, ValueError) as error:
        raise ConfigError(f"--model {path}: {error}; {remedy}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"--model {path}: {module_name} cannot be imported: {in_users_words(error)}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"--model {path}: {module_name} has no function {function_name!r}; {remedy}")
    return function  # type: ignore[no-any-return]


def _guarded(path: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the user's whose exceptions say that they are."""

    def call(*arguments: Any) -> Any:
        try:
            return function(*arguments)
        except GradsyncError:
            raise
        except (Exception, SystemExit) as error:
            raise UserCodeError(f"--model {path}: {in_users_words(error)}") from error

    return call


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
