"""The hooks that tell a reducer of every gradient.

A reducer is referred to weakly, so that a wrapper that is dropped leaves the module as it was.

[Note: Written down] Most gradients complete nothing that is waited for, and a thousand calls into the reducer take a
millisecond. Of such parameters the hook only writes down that it ran; the reducer reads that when backward is over.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from gradsync.ddp.carried import CarriedSums


class GradientReceiver(Protocol):
    """What is told of gradients; parameters go by their index."""

    def on_gradient(self, index: int) -> None:
        """A contribution has been accumulated."""

    def carry(self, index: int) -> None:
        """A contribution is about to be accumulated."""

    def carry_unplanned(self, parameter: torch.Tensor) -> None:
        """A contribution to a parameter without an index is about to be accumulated."""

    @property
    def carried(self) -> CarriedSums:
        """The sums that are aside."""


class ParameterHooks:
    """The hooks of one reducer on its parameters; they go when it goes."""

    def __init__(self, receiver: GradientReceiver) -> None:
        self._receiver = weakref.ref(receiver)
        self._handles: list[Any] = []
        self._after: list[tuple[dict[int, Any], int]] = []
        self._only_written = bytearray()
        self._written: list[int] = []
        self._unplanned: set[int] = set()
        self._next_handle = -1
        weakref.finalize(receiver, _remove, self._handles).atexit = False

    def register(self, parameters: Sequence[torch.Tensor], before_too: bool) -> None:
        """Watch these parameters and no others; ``before_too`` asks for word before each contribution as well."""
        self.remove()
        self._only_written = bytearray(len(parameters))
        self._written = []
        for index, parameter in enumerate(parameters):
            handle = parameter.register_post_accumulate_grad_hook(self._after_hook(index))  # type: ignore[no-untyped-call]
            self._handles.append(handle)
            self._after.append((parameter._post_accumulate_grad_hooks, handle.id))
            if before_too:
                self._handles.append(parameter.register_hook(self._before_hook(index)))  # type: ignore[no-untyped-call]

    def register_unplanned(self, parameter: torch.Tensor) -> None:
        """Watch, until ``register`` or ``remove``, a parameter without an index as well, before and after."""
        if id(parameter) in self._unplanned:
            return
        self._unplanned.add(id(parameter))
        receiver, itself = self._receiver, weakref.ref(parameter)

        def before(_: torch.Tensor) -> None:
            alive, parameter = receiver(), itself()
            if alive is not None and parameter is not None:
                alive.carry_unplanned(parameter)

        def after(parameter: torch.Tensor) -> None:
            alive = receiver()
            if alive is not None:
                alive.carried.leave(parameter)

        self._handles.append(parameter.register_hook(before))  # type: ignore[no-untyped-call]
        self._handles.append(parameter.register_post_accumulate_grad_hook(after))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Watch nothing any more."""
        self._unplanned.clear()
        _remove(self._handles)
        self._after.clear()

    def write_down(self, which: bytes | bytearray) -> None:
        """Only write down contributions of the parameters marked in ``which``, until ``read_written``."""
        self._only_written[:] = which

    def read_written(self) -> list[int]:
        """Return the parameters of the contributions written down, in order, and write none down any more."""
        self._only_written[:] = bytes(len(self._only_written))
        written = self._written[:]
        self._written.clear()
        return written

    def overlook(self, handle: RemovableHandle) -> None:
        """Take note that this hook, on whatever tensor, is our own."""
        if handle.id == self._next_handle:
            self._next_handle += 1

    def come_last(self) -> None:
        """Let hooks that the user has set since run before ours: they may change the gradient, and must see it."""
        if RemovableHandle.next_id == self._next_handle:
            return  # nobody has set a hook anywhere
        self._next_handle = RemovableHandle.next_id
        for hooks, key in self._after:
            if len(hooks) > 1 and key in hooks:
                hooks[key] = hooks.pop(key)  # autograd goes by the order of insertion

    def _after_hook(self, index: int) -> Callable[[torch.Tensor], None]:
        receiver, only_written, write = self._receiver, self._only_written, self._written.append

        def hook(_: torch.Tensor) -> None:
            if only_written[index]:
                write(index)
                return
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
