"""Whether an optimizer may be sharded: it has to do the same to a slice as to the whole tensor."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from gradsync.errors import ConfigError

_SHAPE = (4, 6)
_CUT = 10
_NUM_STEPS = 3
_LR = 0.1
_TOLERANCE = 1e-3


def check_elementwise(
    optimizer_class: Callable[..., torch.optim.Optimizer],
    groups: Sequence[Mapping[str, Any]],
    defaults: Mapping[str, Any],
    device: torch.device,
) -> torch.optim.Optimizer:
    """Try the optimizer on a small tensor and on two slices of it; returns the one on slices, for its defaults.

    Found out rather than listed, so that any optimizer can be used that works on elements. ``groups`` are the
    options of the parameter groups, each of which is tried.

    Raises:
        ConfigError: it raised an exception, did something else to slices, or keeps state of another shape. An error in
            the options is raised as the optimizer itself raises it.
    """
    name = getattr(optimizer_class, "__name__", repr(optimizer_class))
    generator = torch.Generator().manual_seed(0)

    def random() -> torch.Tensor:
        return torch.randn(_SHAPE, generator=generator, dtype=torch.float32).to(device)

    starts = [random() for _ in groups]
    _make(optimizer_class, [[nn.Parameter(start)] for start in starts], groups, defaults)
    groups, defaults = [_with_visible_lr(group) for group in groups], _with_visible_lr(defaults)
    whole = [[nn.Parameter(start.clone())] for start in starts]
    slices = [[nn.Parameter(part.clone()) for part in _cut(start)] for start in starts]
    try:
        on_whole = _make(optimizer_class, whole, groups, defaults)
        on_slices = _make(optimizer_class, slices, groups, defaults)
        for _ in range(_NUM_STEPS):
            for (parameter,), parts in zip(whole, slices, strict=True):
                parameter.grad = random()
                for part, grad in zip(parts, _cut(parameter.grad), strict=True):
                    part.grad = grad
            on_whole.step()
            on_slices.step()
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be sharded: it failed on flat slices of a parameter ({type(error).__name__}: {error}); a "
            f"sharded optimizer works element by element (SGD, Adam, AdamW, RMSprop, ...)"
        ) from error
    for start, (parameter,), parts in zip(starts, whole, slices, strict=True):
        wanted = parameter.detach().flatten()
        difference = (torch.cat([p.detach() for p in parts]) - wanted).abs().max()
        if not difference <= _TOLERANCE * (wanted - start.flatten()).abs().max():
            raise ConfigError(
                f"{name} cannot be sharded: what it does to an element depends on the rest of the tensor, so slices "
                f"would come out differently; use an optimizer that works element by element (SGD, Adam, AdamW, ...)"
            )
    _check_state(name, on_slices)
    return on_slices


def _check_state(name: str, optimizer: torch.optim.Optimizer) -> None:
    for parameter, values in optimizer.state.items():
        for key, value in values.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape != parameter.shape:
                raise ConfigError(
                    f"{name} cannot be sharded: its state {key!r} has shape {tuple(value.shape)} for a tensor of "
                    f"shape {tuple(parameter.shape)}, and only one element for each element can be cut"
                )


def _make(
    optimizer_class: Callable[..., torch.optim.Optimizer],
    parameters: Sequence[list[nn.Parameter]],
    groups: Sequence[Mapping[str, Any]],
    defaults: Mapping[str, Any],
) -> torch.optim.Optimizer:
    return optimizer_class(
        [{**g, "params": p} for g, p in zip(groups, parameters, strict=True)],
        **defaults,
    )


def _with_visible_lr(options: Mapping[str, Any]) -> dict[str, Any]:
    """A learning rate of 0, as before a warm-up, would show nothing."""
    return {k: _LR if k == "lr" and isinstance(v, int | float) else v for k, v in options.items()}


def _cut(tensor: torch.Tensor) -> list[torch.Tensor]:
    flat = tensor.detach().flatten()
    return [flat[:_CUT], flat[_CUT:]]
