"""What one forward pass keeps for backward, found by running it, and how much of that a rank has when matrices are cut.

Works on fake tensors as on real ones. Knows the layout of the model, and no ranks: degrees come in as plain numbers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from gradsync.model.layout import Layout

_Part = Literal["between", "inside", "gathered"]


@dataclass(frozen=True)
class Activations:
    """Bytes that the undivided model keeps."""

    between: int
    """Of norms, dropout and the residual stream: cut if sequences are."""
    inside: int
    """Of what lies between a projection cut by columns and one cut by rows, and of logits: cut with the matrices."""
    gathered: int
    """Inputs of projections cut by columns: whole on every rank."""

    def on_rank(self, slices: int, cuts_sequences: bool) -> int:
        """Return the bytes of one of ``slices`` ranks that share the matrices."""
        return self.between // (slices if cuts_sequences else 1) + self.inside // slices + self.gathered


def kept_by(model: nn.Module, layout: Layout, run: Callable[[], object]) -> Activations:
    """Return what is kept when ``run`` runs the model; its parameters are not counted."""
    own = {_storage_id(parameter) for parameter in model.parameters()}
    kept: dict[int, tuple[_Part, Tensor]] = {}

    def keep(tensor: Tensor) -> Tensor:
        if _storage_id(tensor) not in own:
            kept[_storage_id(tensor)] = (_part_of(running[-1], tensor, layout), tensor)
        return tensor

    with _running_modules(model) as running, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run()
    sizes: dict[_Part, int] = {"between": 0, "inside": 0, "gathered": 0}
    for part, tensor in kept.values():
        sizes[part] += tensor.untyped_storage().nbytes()
    return Activations(**sizes)


@contextmanager
def _running_modules(model: nn.Module) -> Iterator[list[tuple[str, nn.Module]]]:
    """Keep a list of the modules that are running, by name, the innermost last."""
    running: list[tuple[str, nn.Module]] = []

    def enter(name: str, module: nn.Module, _: object) -> None:
        running.append((name, module))

    def leave(*_: object) -> None:
        running.pop()

    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(partial(enter, name)))
        hooks.append(module.register_forward_hook(leave))
    try:
        yield running
    finally:
        for hook in hooks:
            hook.remove()


def _part_of(running: tuple[str, nn.Module], tensor: Tensor, layout: Layout) -> _Part:
    """Return the kind of what a module keeps; the model itself takes the loss."""
    name, module = running
    in_block = name.removeprefix(f"{layout.blocks}.").partition(".")[2] if name.startswith(f"{layout.blocks}.") else ""
    if in_block in layout.columns or name == layout.tied[0].removesuffix(".weight"):
        is_weight = tensor.shape == module.weight.t().shape  # type: ignore[operator, union-attr]  # cast by autocast
        return "inside" if is_weight else "gathered"
    return "inside" if in_block in (*layout.rows, *layout.branches) or name == "" else "between"


def _storage_id(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
