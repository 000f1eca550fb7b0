"""Low-precision parameters for forward and backward, on top of parameters that stay in full precision.

While the module runs, its parameters are replaced by casts of them. A cast is an ordinary autograd
operation, so gradients arrive in the full precision of the parameters, and the engine, the optimizer and
``state_dict`` never see anything else. Knows nothing of ranks; what travels is chosen in ``compression``.

[Note: Recomputation] A checkpointed block runs again in backward, outside of the wrapper's forward. So the
casts that a forward used are put in place again when backward reaches one of its outputs, and taken out
when that backward is over, or has raised.
"""

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.distributed.utils import _cast_forward_inputs

Casts = dict[int, torch.Tensor]
"""For the ``id`` of each full-precision parameter what stands in for it."""


class FullPrecision:
    """What the wrapper uses without ``mixed_precision``: nothing is cast."""

    reduce_dtype: torch.dtype | None = None

    def cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the inputs as they are."""
        return args, kwargs

    def running(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for the module's forward."""
        return contextlib.nullcontext()

    def watch_outputs(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do nothing."""

    def restore(self) -> None:
        """Do nothing."""


@dataclass
class _Slot:
    """A place in a module that holds a parameter."""

    home: dict[str, Any]
    name: str
    parameter: nn.Parameter
    is_sparse: bool = False
    stand_in: torch.Tensor | None = None

    def put(self, stand_in: torch.Tensor | None) -> None:
        """Put a stand-in, or None for the parameter itself, unless the user has put something else there."""
        expected = self.parameter if self.stand_in is None else self.stand_in
        if self.home.get(self.name) is expected:
            self.home[self.name] = self.parameter if stand_in is None else stand_in
            self.stand_in = stand_in


class LowPrecision(FullPrecision):
    """Casts what is floating-point, unless the wrapper ignores it: parameters while they run, buffers for good.

    ``config`` has the three dtypes of torch's ``_MixedPrecision``; None leaves a kind as it is.
    """

    def __init__(self, config: Any, module: nn.Module) -> None:
        self.param_dtype: torch.dtype | None = config.param_dtype
        self.reduce_dtype = config.reduce_dtype or config.param_dtype
        self._module = module
        self._slots: list[_Slot] = []
        self._current: Casts | None = None
        self._last: Casts | None = None
        self._backward: weakref.ref[_Restore] | None = None
        _cast_buffers(module, config.buffer_dtype)

    def cast_inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the inputs with their floating-point tensors cast."""
        if self.param_dtype is None:
            return args, kwargs
        cast: tuple[Any, Any] = _cast_forward_inputs(self.param_dtype, *args, **kwargs)
        return cast

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let the module run on casts of its parameters."""
        if self.param_dtype is None:
            yield
            return
        before = self._current
        self._put(self._cast() if before is None else before)
        try:
            yield
        finally:
            self._last = self._current
            self._put(before)

    def watch_outputs(self, tensors: Iterable[torch.Tensor]) -> None:
        """Use the casts of the forward just run again while a backward that reaches one of its outputs lasts."""
        casts, self._last = self._last, None
        if casts is None:
            return
        precision = weakref.ref(self)

        def output_hook(_: torch.Tensor) -> None:
            alive = precision()
            if alive is not None and alive._current is None:
                alive._begin_backward(casts)

        for tensor in tensors:
            tensor.register_hook(output_hook)  # type: ignore[no-untyped-call]

    def restore(self) -> None:
        """Put the parameters themselves in place."""
        self._backward = None
        self._put(None)

    def _begin_backward(self, casts: Casts) -> None:
        callback = _Restore(self)
        Variable._execution_engine.queue_callback(callback)  # type: ignore[attr-defined]
        self._backward = weakref.ref(callback, lambda _: self.restore())
        self._put(casts)

    def _cast(self) -> Casts:
        casts: Casts = {}
        for slot in _find_slots(self._module):
            if id(slot.parameter) not in casts:
                casts[id(slot.parameter)] = _cast(slot, self.param_dtype)
        return casts

    def _put(self, casts: Casts | None) -> None:
        if self._current is None and casts is not None:
            self._slots = _find_slots(self._module)
        for slot in self._slots:
            slot.put(None if casts is None else casts.get(id(slot.parameter)))
        self._current = casts
        if casts is None:
            self._slots = []


class _Restore:
    """What autograd calls when backward is over, and drops when backward has raised."""

    def __init__(self, precision: LowPrecision) -> None:
        self._precision = precision

    def __call__(self) -> None:
        self._precision.restore()


def choose_precision(config: Any, module: nn.Module) -> FullPrecision:
    """Return what the constructor's ``mixed_precision`` asks for."""
    return FullPrecision() if config is None else LowPrecision(config, module)


def _find_slots(module: nn.Module) -> list[_Slot]:
    return [
        _Slot(m._parameters, name, p, is_sparse=getattr(m, "sparse", False) is True)
        for m in module.modules()
        for name, p in m._parameters.items()
        if p is not None and _is_cast(p)
    ]


def _cast(slot: _Slot, dtype: torch.dtype | None) -> torch.Tensor:
    if not slot.is_sparse:
        return slot.parameter.to(dtype)
    cast: torch.Tensor = _SparseCast.apply(slot.parameter, dtype)  # type: ignore[no-untyped-call]
    return cast


class _SparseCast(torch.autograd.Function):
    """``to(dtype)`` for a table with sparse gradients, which the backward of torch's own refuses."""

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the table in another dtype."""
        ctx.dtype = table.dtype
        return table.to(dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient, sparse or not, in the table's dtype."""
        return grad.to(ctx.dtype), None


def _is_cast(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and not getattr(tensor, "_ddp_ignored", False)


@torch.no_grad()
def _cast_buffers(module: nn.Module, dtype: torch.dtype | None) -> None:
    if dtype is None:
        return
    for buffer in _floating(module.buffers()):
        buffer.data = buffer.to(dtype)


def _floating(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    return (t for t in tensors if _is_cast(t))
