"""The hooks that tell a reducer of every gradient.

A reducer is referred to weakly, so that a wrapper that is dropped leaves the module as it was.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class GradientReceiver(Protocol):
    """What is told of gradients; parameters go by their index."""

    def on_gradient(self, index: int) -> None:
        """A contribution has been accumulated."""

    def carry(self, index: int) -> None:
        """A contribution is about to be accumulated."""


class ParameterHooks:
    """The hooks of one reducer on its parameters; they go when it goes."""

    def __init__(self, receiver: GradientReceiver) -> None:
        self._receiver = weakref.ref(receiver)
        self._handles: list[Any] = []
        self._after: list[tuple[dict[int, Any], int]] = []
        weakref.finalize(receiver, _remove, self._handles).atexit = False

    def register(self, parameters: Sequence[torch.Tensor], before_too: bool) -> None:
        """Watch these parameters and no others; ``before_too`` asks for word before each contribution as well."""
        self.remove()
        for index, parameter in enumerate(parameters):
            handle = parameter.register_post_accumulate_grad_hook(self._after_hook(index))  # type: ignore[no-untyped-call]
            self._handles.append(handle)
            self._after.append((parameter._post_accumulate_grad_hooks, handle.id))
            if before_too:
                self._handles.append(parameter.register_hook(self._before_hook(index)))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Watch nothing any more."""
        _remove(self._handles)
        self._after.clear()

    def come_last(self) -> None:
        """Let hooks that the user has set since run before ours: they may change the gradient, and must see it."""
        for hooks, key in self._after:
            if len(hooks) > 1 and key in hooks:
                hooks[key] = hooks.pop(key)  # autograd goes by the order of insertion

    def _after_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        receiver = self._receiver

        def hook(_: torch.Tensor) -> None:
            alive = receiver()
            if alive is not None:
                alive.on_gradient(index)

        return hook

    def _before_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        receiver = self._receiver

        def hook(_: torch.Tensor) -> None:
            alive = receiver()
            if alive is not None:
                alive.carry(index)

        return hook


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
