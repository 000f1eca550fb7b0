"""Optimizers that step inside backward, as soon as the gradients of a pass are reduced.

They come from ``torch.distributed.optim._apply_optimizer_in_backward``, which hangs them on the
parameters, or from ``_register_fused_optim``. An optimizer must see the reduced gradient, so the hooks
with which torch would step it at once, on the gradient of this rank alone, are taken off.
"""

import inspect
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

_TORCH_MODULE = "torch.distributed.optim.apply_optimizer_in_backward"


class OptimizersInBackward:
    """The optimizers of one wrapped module that ``step`` runs at the end of each pass."""

    def __init__(self) -> None:
        self._num_known: tuple[int, int] | None = None
        self._parameters: list[nn.Parameter] = []
        self.fused: torch.optim.Optimizer | None = None

    def refresh(self, find_parameters: Callable[[], Iterable[nn.Parameter]]) -> None:
        """Take over the optimizers that have been hung on the parameters since the last call."""
        handles = getattr(sys.modules.get(_TORCH_MODULE), "param_to_optim_hook_handle_map", {})
        if self._num_known == self._count(handles):
            return
        self._parameters = [p for p in find_parameters() if hasattr(p, "_in_backward_optimizers")]
        for parameter in self._parameters:
            for handle in handles.get(parameter, ()):
                handle.remove()
        self._num_known = self._count(handles)

    def _count(self, handles: Any) -> tuple[int, int]:
        """Count what would be one more if torch had hung on another optimizer."""
        return len(handles), sum(len(handles.get(p, ())) for p in self._parameters)

    def step(self) -> None:
        """Step on reduced gradients; those of parameters with an optimizer of their own are cleared."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                for optimizer in parameter._in_backward_optimizers:  # type: ignore[attr-defined]
                    optimizer.step()
                parameter.grad = None
        if self.fused is not None:
            self.fused.step()


def make_fused(
    optimizer_class: type[torch.optim.Optimizer],
    parameters: Sequence[torch.Tensor],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> torch.optim.Optimizer:
    """Return an optimizer that can step without being called by the user.

    Raises:
        ValueError: its ``step`` needs a closure.
    """
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"Optimizer {optimizer_class} does not have a functional counterpart: its step() needs a closure, "
            f"so it cannot run inside backward; call its step() after backward instead"
        )
    return optimizer_class(parameters, *args, **kwargs)
