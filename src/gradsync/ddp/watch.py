"""What the wrapped module holds right now: its trainable parameters and its buffers.

The user may freeze, unfreeze, replace or add parameters after wrapping, and may reassign buffers. A
look at every module's dictionaries on each pass finds that out without a hook in the user's module.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import nn


class ModuleWatch:
    """Remembers the module's structure, and tells when it is no longer the same.

    ``ignored`` are names of parameters and buffers that stay local.
    """

    def __init__(self, module: nn.Module, ignored: Iterable[str] = ()) -> None:
        self.module = module
        self.ignored = frozenset(ignored)
        self.accept()

    def accept(self) -> None:
        """Take today's structure as the one to compare with."""
        modules = dict(self.module.named_modules())
        self._children = [m._modules for m in modules.values()]
        self._parameters = [m._parameters for m in modules.values()]
        self._buffers = [(prefix, m._buffers) for prefix, m in modules.items()]
        self._child_ids = self._ids(self._children)
        self._parameter_ids = self._ids(self._parameters)
        self._watched = [p for d in self._parameters for p in d.values() if p is not None]
        self._is_trainable = [p.requires_grad for p in self._watched]

    def has_changed(self) -> bool:
        """Whether parameters came, went, or changed ``requires_grad`` since the last ``accept``."""
        return (
            self._ids(self._parameters) != self._parameter_ids
            or self._ids(self._children) != self._child_ids
            or [p.requires_grad for p in self._watched] != self._is_trainable
        )

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters to synchronise, each once, in registration order, named as in the bare module."""
        return [(name, p) for name, p in self.all_parameters() if p.requires_grad]

    def all_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return trainable and frozen parameters, except the ignored ones."""
        return [
            (name, p)
            for name, p in self.module.named_parameters()
            if name not in self.ignored and not getattr(p, "_ddp_ignored", False)
        ]

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers, each once, except the ignored ones."""
        if self._ids(self._children) != self._child_ids:
            named = self.module.named_buffers()
            return {name: b for name, b in named if name not in self.ignored}
        found: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for prefix, buffers in self._buffers:
            for name, buffer in buffers.items():
                full = f"{prefix}.{name}" if prefix else name
                if buffer is None or id(buffer) in seen or full in self.ignored:
                    continue
                seen.add(id(buffer))
                found[full] = buffer
        return found

    def replace_buffer(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Put ``new`` wherever the module holds the buffer ``old``."""
        for m in self.module.modules():
            for name, value in m._buffers.items():
                if value is old:
                    m._buffers[name] = new

    def sparse_names(self) -> set[str]:
        """Return the names of the parameters whose module says that their gradients are sparse."""
        return {
            f"{prefix}.weight" if prefix else "weight"
            for prefix, m in self.module.named_modules()
            if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse
        }

    @staticmethod
    def _ids(dictionaries: Iterable[Mapping[str, object]]) -> list[int]:
        return [id(value) for d in dictionaries for value in d.values()]
