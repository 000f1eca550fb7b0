"""The user's own model, from a function of theirs. Knows nothing of ranks."""

import importlib
import os
import random
import sys
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
        ConfigError: there is no such function, or it returns something else, or nothing to train.
        UserCodeError: it raises; also each time that ``build`` or ``loss`` does, and for a loss that is not a number or
            has no gradient.
    """
    function = _find(path)
    build = _guarded(path, partial(_made, function))
    made = build()
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not isinstance(made[0], nn.Module):
        raise ConfigError(
            f"--model {path}: the function must return (module, batch) or (module, batch, loss), not {made!r:.80}"
        )
    if not any(parameter.requires_grad for parameter in made[0].parameters()):
        raise ConfigError(f"--model {path}: the module has no parameter that requires a gradient: nothing to train")
    loss = _guarded(path, made[2] if len(made) == 3 else mean_square)
    return Factory(lambda: build()[0], made[1], lambda module, batch: _checked(path, loss(module, batch)))


def _checked(path: str, loss: Any) -> Tensor:
    """Return the user's loss if a backward can start from it."""
    if not isinstance(loss, Tensor) or loss.dim() > 0:
        seen = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"{loss!r:.80}"
        raise UserCodeError(f"--model {path}: the loss is {seen}; it must be one number, the mean over the rows")
    if not loss.requires_grad:
        raise UserCodeError(f"--model {path}: the loss does not depend on a parameter that requires a gradient")
    return loss


def _find(path: str) -> Callable[[], Any]:
    module_name, _, function_name = path.partition(":")
    remedy = "give MODULE:FUNCTION, importable from this folder"
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    importlib.invalidate_caches()  # it may have been written a moment ago
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
