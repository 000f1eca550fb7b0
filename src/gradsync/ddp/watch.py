"""What the wrapped module holds right now: its trainable parameters and its buffers.

The user may freeze, unfreeze, replace, convert or add parameters after wrapping, may reassign buffers, and may put
another module into the wrapper. A look at every module's dictionaries on each pass finds that out without a hook in
the user's module.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain

import torch
from torch import nn


class ModuleWatch:
    """Remembers the module's structure, and tells when it is no longer the same.

    Looks at the whole wrapper; names are those of the bare module inside. ``ignored`` are names of parameters and
    buffers that stay local.
    """

    def __init__(self, wrapper: nn.Module, ignored: Iterable[str] = ()) -> None:
        self._wrapper = weakref.ref(wrapper)
        self.ignored = frozenset(ignored)
        self.accept()

    @property
    def wrapper(self) -> nn.Module | None:
        """The wrapper; None once it is gone, though the graph of a forward may still be there."""
        return self._wrapper()

    def accept(self) -> None:
        """Take today's structure as the one to compare with."""
        modules = self._named_modules()
        parameters = [m._parameters for _, m in modules]
        self._children = _Slots([m._modules for _, m in modules])
        self._parameters = _Slots(parameters)
        self._buffers = [(prefix, m._buffers) for prefix, m in modules]
        self._buffer_dicts = [buffers for _, buffers in self._buffers]
        self._has_other_children: bool | None = None
        self._watched = [p for d in parameters for p in d.values() if p is not None]
        self._is_trainable = list(map(_requires_grad, self._watched))
        self._dtypes = list(map(_dtype, self._watched))
        self._sizes = _sizes(self._watched)

    def has_changed(self) -> bool:
        """Whether parameters came, went, or changed in ``requires_grad``, dtype or size since the last ``accept``."""
        if self._wrapper() is None:
            return False  # a backward that outlives its wrapper
        return (
            self._parameters.have_changed()
            or self._have_children_changed()
            or list(map(_requires_grad, self._watched)) != self._is_trainable
            or list(map(_dtype, self._watched)) != self._dtypes
            or _sizes(self._watched) != self._sizes
        )

    def _have_children_changed(self) -> bool:
        """Look whether modules came or went, unless ``has_buffers`` has looked since the last time."""
        found, self._has_other_children = self._has_other_children, None
        return self._children.have_changed() if found is None else found

    def has_buffers(self) -> bool:
        """Whether there are buffers at all; asked before every forward, where most models have none."""
        self._has_other_children = self._children.have_changed()
        if not self._has_other_children and not any(map(len, self._buffer_dicts)):
            return False
        return bool(self.buffers())

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters to synchronise, each once, in registration order, named as in the bare module."""
        return [(name, p) for name, p in self.all_parameters() if p.requires_grad]

    def all_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return trainable and frozen parameters, except the ignored ones."""
        return [
            (bare_name(name), p)
            for name, p in self._root().named_parameters()
            if bare_name(name) not in self.ignored and not getattr(p, "_ddp_ignored", False)
        ]

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the dense buffers, each once, except the ignored ones."""
        if self._children.have_changed():
            named = self._root().named_buffers()
            return {bare_name(n): b for n, b in named if _is_dense(b) and bare_name(n) not in self.ignored}
        found: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for prefix, buffers in self._buffers:
            for name, buffer in buffers.items():
                full = f"{prefix}.{name}" if prefix else name
                if buffer is None or id(buffer) in seen or full in self.ignored or not _is_dense(buffer):
                    continue
                seen.add(id(buffer))
                found[full] = buffer
        return found

    def replace_buffer(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Put ``new`` wherever the module holds the buffer ``old``."""
        for m in self._root().modules():
            for name, value in m._buffers.items():
                if value is old:
                    m._buffers[name] = new

    def sparse_names(self) -> set[str]:
        """Return the names of the parameters whose module says that their gradients are sparse."""
        return {
            f"{prefix}.weight" if prefix else "weight"
            for prefix, m in self._named_modules()
            if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse
        }

    def sparse_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers that are no dense tensors; they are compared at construction, and never sent."""
        named = self._root().named_buffers()
        return {bare_name(n): b for n, b in named if not _is_dense(b) and bare_name(n) not in self.ignored}

    def _root(self) -> nn.Module:
        wrapper = self._wrapper()
        assert wrapper is not None, "the wrapper is gone"
        return wrapper

    def _named_modules(self) -> list[tuple[str, nn.Module]]:
        return [(bare_name(name), m) for name, m in self._root().named_modules()]


# Called for every parameter in every pass, so without a frame of Python.
_requires_grad: Callable[[torch.Tensor], bool] = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]
_dtype: Callable[[torch.Tensor], torch.dtype] = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]


class _Slots:
    """Dictionaries, and which objects they held at the time."""

    def __init__(self, dictionaries: Sequence[Mapping[str, object]]) -> None:
        self._filled = [d for d in dictionaries if d]
        self._empty = [d for d in dictionaries if not d]  # most modules have no children
        self._ids = self._ids_now()
        self._objects = [value for d in self._filled for value in d.values()]  # alive, so that no id is used again

    def have_changed(self) -> bool:
        """Whether they hold other objects by now."""
        return any(map(len, self._empty)) or self._ids_now() != self._ids

    def _ids_now(self) -> list[int]:
        return list(map(id, chain.from_iterable(map(dict.values, self._filled))))  # type: ignore[arg-type]


def bare_name(name: str) -> str:
    """Return the name inside the bare module of something inside the wrapper."""
    return "" if name == "module" else name.removeprefix("module.")


def _sizes(parameters: list[nn.Parameter]) -> list[int]:
    try:
        return list(map(torch.Tensor.numel, parameters))
    except (RuntimeError, ValueError):  # a lazy parameter has no size yet
        return [-1 if nn.parameter.is_lazy(p) else p.numel() for p in parameters]


def _is_dense(buffer: torch.Tensor) -> bool:
    return buffer.layout == torch.strided
