"""One bucket: the flat buffer, the gradient views into it, and the collective that is under way.

[Note: Buffer lifetime] After a pass ``param.grad`` *is* a view of the flat buffer, until the user drops
it. The next pass writes into the same memory, so a gradient that somebody still holds (the view
itself, or a tensor that shares its memory) would change under their hands; ``collect`` notices that
by the reference counts and moves on to another buffer. Between ``collect`` and the end of the pass the
buffer belongs to the collective: ``param.grad`` is None, and what autograd adds meanwhile goes into a
fresh tensor, the *late contribution*. Whoever assigns to ``param.grad.data`` moves our view to memory of his
own; ``collect`` leaves such a buffer too.
"""

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Protocol

import torch

from gradsync.ddp.control import NO_WORDS, Words
from gradsync.ddp.plan import BucketPlan, ParameterSpec
from gradsync.ddp.reduced import mark_reduced

_LARGE_BYTES = 256 * 1024
"""Of a gradient for which a pass through memory takes longer than a call."""


class Allocator(Protocol):
    """Where flat buffers come from: ordinary memory, or memory that peers can read."""

    def __call__(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a zeroed one-dimensional tensor."""


def allocate_zeros(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return ordinary memory."""
    return torch.zeros(numel, dtype=dtype, device=device)


@dataclass
class FlatBuffer:
    """The memory of a bucket: gradients first (``gradients``), then room for the control words (``words``)."""

    whole: torch.Tensor
    gradients: torch.Tensor
    words: Words
    views: list[torch.Tensor]
    idle_storage_count: int = 0
    idle_view_counts: list[int] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)

    def remember_idle_counts(self) -> None:
        """Note how many references there are while nobody but us holds the gradients."""
        self.idle_view_counts = list(map(sys.getrefcount, self.views))
        self.idle_storage_count = storage_count(self.whole)
        self.addresses = list(map(torch.Tensor.data_ptr, self.views))

    def is_intact(self) -> bool:
        """Whether all views still lie where they were made."""
        return list(map(torch.Tensor.data_ptr, self.views)) == self.addresses

    def is_held(self, num_own: Sequence[int]) -> bool:
        """Whether somebody else still looks at this memory; ``num_own`` counts our own references to each view."""
        if storage_count(self.whole) > self.idle_storage_count:
            return True
        counts = list(map(sys.getrefcount, self.views))
        if counts == self.idle_view_counts:
            return False
        return any(now - own > idle for now, own, idle in zip(counts, num_own, self.idle_view_counts, strict=True))


class Bucket:
    """Gradients of several parameters that are reduced in one collective.

    ``parameters`` are the local tensors of the parameters in ``plan``'s order.
    """

    def __init__(
        self,
        number: int,
        plan: BucketPlan,
        specs: Sequence[ParameterSpec],
        parameters: Sequence[torch.Tensor],
        tail_numel: int = 0,
        allocate: Allocator = allocate_zeros,
    ) -> None:
        self.number = number
        self.plan = plan
        self.parameters = list(parameters)
        self.is_launched = False
        self.waiting = 0
        self.work: Any = None
        self._specs = [specs[i] for i in plan.indices]
        self._tail_numel = tail_numel
        self._allocate = allocate
        self._buffer: FlatBuffer | None = None
        self._spare: FlatBuffer | None = None
        self.missing: list[int] = []
        self._kept: dict[int, torch.Tensor] = {}
        self._kept_results: dict[int, torch.Tensor] = {}
        self._large = {p for p, spec in enumerate(self._specs) if spec.num_bytes >= _LARGE_BYTES}
        self._has_dtensors = any(local_tensor(p) is not p for p in self.parameters)
        self._grad_of = local_grad if self._has_dtensors else _plain_grad
        self._position = {index: position for position, index in enumerate(plan.indices)}

    @property
    def buffer(self) -> FlatBuffer:
        """The memory in use; made when first needed."""
        if self._buffer is None:
            self._buffer = self._make_buffer()
        return self._buffer

    @property
    def views(self) -> list[torch.Tensor]:
        """One tensor a parameter, with its shape, dtype and strides, in the flat buffer."""
        return self.buffer.views

    def results(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the parameters whose gradient is still what the last pass left there, with their views."""
        if self._buffer is None:
            return []
        return [(p, v) for p, v in zip(self.parameters, self._buffer.views, strict=True) if local_grad(p) is v]

    def holds_result(self, index: int) -> bool:
        """Whether the gradient of one parameter is still what the last pass left there."""
        return self._buffer is not None and local_grad(self.parameters[self._position[index]]) is self.view_of(index)

    @torch.no_grad()
    def adopt(self, results: Mapping[int, torch.Tensor]) -> None:
        """Move gradients that lie in the memory of earlier buckets into this one; ``results`` is by parameter id."""
        for position, parameter in enumerate(self.parameters):
            result = results.get(id(parameter))
            if result is not None:
                view = self.views[position]
                set_local_grad(parameter, view.copy_(result))

    def view_of(self, index: int) -> torch.Tensor:
        """Return the view of one parameter (by its index in the model)."""
        return self.views[self._position[index]]

    def keep(self, index: int, grad: torch.Tensor) -> None:
        """Let ``write_back`` put this result of an earlier pass back if no rank used the parameter."""
        self._kept_results[self._position[index]] = local_tensor(grad)

    def start_pass(self, waiting: int) -> None:
        """Forget the previous pass; ``waiting`` is the number of parameters to wait for before the launch."""
        self.is_launched = False
        self.waiting = waiting
        self.work = None
        self.missing = []
        self._kept, self._kept_results = {}, {}

    @torch.no_grad()
    def collect(self, touched: bytearray, scale: float) -> None:
        """Move the gradients into the flat buffer, times ``scale``; missing ones count as zeros.

        ``touched`` says, for each parameter of the *model*, whether anything was accumulated since it was
        last synchronised. A gradient that was not touched contributes too (it may be the average of an
        earlier pass, or what the user put there), but is kept, so that it can be put back untouched if no
        rank used the parameter.
        """
        grads = list(map(self._grad_of, self.parameters))
        is_grad = self._leave_held_buffer(grads)
        views = self.buffer.views
        if 0 in touched:
            self._keep_untouched(grads, is_grad, touched)
        if True not in is_grad and not any([g is None for g in grads]):
            self._copy_scaled(views, grads, scale)
        else:
            pairs = [(v, g) for v, g, own in zip(views, grads, is_grad, strict=True) if g is not None and not own]
            copy_all([v for v, _ in pairs], [g for _, g in pairs])
            self.missing = [i for i, g in zip(self.plan.indices, grads, strict=True) if g is None]
            if self.missing:
                torch._foreach_zero_([self.view_of(i) for i in self.missing])
            if scale != 1.0:
                self.buffer.gradients.mul_(scale)
        deque(map(_set_plain_grad, self.parameters, repeat(None)), maxlen=0)
        self.is_launched = True

    def _copy_scaled(self, views: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None], scale: float) -> None:
        """Fill the views with the gradients times ``scale``: large ones in one pass through memory instead of two."""
        if scale == 1.0 or not self._large:
            copy_all(list(views), grads)
            if scale != 1.0:
                self.buffer.gradients.mul_(scale)
            return
        small = []
        for position, (view, grad) in enumerate(zip(views, grads, strict=True)):
            if position in self._large and grad is not None and grad.layout == torch.strided:
                torch.mul(grad, scale, out=view)
            else:
                small.append(position)
        copy_all([views[p] for p in small], [grads[p] for p in small])
        if small:
            torch._foreach_mul_([views[p] for p in small], scale)

    def add_late(self, index: int, contribution: torch.Tensor) -> None:
        """Add to the reduced gradient of a parameter what all ranks together were late with."""
        self.view_of(index).add_(contribution)

    def multiply(self, factor: float) -> None:
        """Multiply the reduced gradients."""
        self.buffer.gradients.mul_(factor)

    def write_back(self, is_used: Sequence[bool] | None) -> None:
        """Point ``grad`` of each used parameter at its view; put back what the others had.

        ``is_used`` follows this bucket's parameters; None means that all were used.
        """
        views = self.buffer.views
        if is_used is None:
            set_grad = set_local_grad if self._has_dtensors else _set_plain_grad
            deque(map(set_grad, self.parameters, views), maxlen=0)
            return
        for position, (parameter, view) in enumerate(zip(self.parameters, views, strict=True)):
            if is_used[position]:
                set_local_grad(parameter, view)
            else:
                self._put_back(position, parameter, view)

    @torch.no_grad()
    def _put_back(self, position: int, parameter: torch.Tensor, view: torch.Tensor) -> None:
        """Give a parameter that no rank used what it had: a result of an earlier pass stays known as one."""
        result = self._kept_results.get(position)
        if result is None:
            parameter.grad = self._kept.get(position)
        else:
            set_local_grad(parameter, view.copy_(result))

    def _keep_untouched(
        self, grads: Sequence[torch.Tensor | None], is_grad: Sequence[bool], touched: bytearray
    ) -> None:
        for position, index in enumerate(self.plan.indices):
            if not touched[index] and grads[position] is not None:
                grad = self.parameters[position].grad
                assert grad is not None
                if is_grad[position]:
                    self._kept_results[position] = local_tensor(grad).clone()
                else:
                    self._kept[position] = grad

    def _leave_held_buffer(self, grads: Sequence[torch.Tensor | None]) -> list[bool]:
        """Take another buffer if somebody holds this one; returns which gradients are our own views."""
        buffer = self.buffer
        if not buffer.is_intact():
            self._buffer = self._make_buffer()
            return [False] * len(grads)
        is_grad = [g is v for g, v in zip(grads, buffer.views, strict=True)]
        # a view that is a gradient is held by its parameter and by the list `grads`
        if not buffer.is_held([2 * own for own in is_grad]):
            return is_grad
        other = self._spare
        if other is None or not other.is_intact() or other.is_held([0] * len(grads)):
            other = self._make_buffer()
        self._buffer, self._spare = other, buffer
        return [False] * len(grads)

    def _make_buffer(self) -> FlatBuffer:
        plan = self.plan
        whole = self._allocate(plan.numel + self._tail_numel, plan.dtype, plan.device)
        views = [view_at(whole, offset, spec) for offset, spec in zip(plan.offsets, self._specs, strict=True)]
        words = whole[plan.numel :].numpy() if self._tail_numel else NO_WORDS
        buffer = FlatBuffer(whole, whole[: plan.numel], words, views)
        mark_reduced(views)
        buffer.remember_idle_counts()
        return buffer


_plain_grad: Callable[[torch.Tensor], torch.Tensor | None] = torch.Tensor.grad.__get__  # type: ignore[union-attr]
_set_plain_grad: Callable[[torch.Tensor, torch.Tensor | None], None] = torch.Tensor.grad.__set__  # type: ignore[union-attr]
"""The attribute's getter and setter, to be mapped over many parameters; for any that is no DTensor."""


def local_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the parameter's gradient on this rank: of a DTensor its local part."""
    grad = parameter.grad
    if grad is None:
        return None
    local = getattr(grad, "_local_tensor", None)
    return grad if local is None else local


def set_local_grad(parameter: torch.Tensor, local: torch.Tensor) -> None:
    """Make ``local`` the parameter's gradient; a DTensor parameter gets a DTensor around it."""
    if getattr(parameter, "_local_tensor", None) is not None:
        from torch.distributed.tensor import DTensor

        assert isinstance(parameter, DTensor)
        parameter.grad = DTensor(local, parameter._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    else:
        parameter.grad = local


def local_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """Return the part of the parameter that lives on this rank."""
    local = getattr(parameter, "_local_tensor", None)
    return parameter if local is None else local


def copy_all(targets: list[torch.Tensor], sources: Sequence[torch.Tensor | None]) -> None:
    """Copy gradients, sparse ones too, into the views in one call."""
    if not targets:
        return
    try:
        torch._foreach_copy_(targets, sources)  # type: ignore[arg-type]
    except RuntimeError:
        # Looked for only now, since it takes as long as a small copy.
        if not any(s.is_sparse for s in sources if s is not None):
            raise
        dense = [s.to_dense() if s is not None and s.is_sparse else s for s in sources]
        torch._foreach_copy_(targets, dense)  # type: ignore[arg-type]


def view_at(whole: torch.Tensor, offset: int, spec: ParameterSpec) -> torch.Tensor:
    """Return a tensor over the buffer's memory that is no autograd view, so that ``grad.detach_()`` works on it."""
    start = whole.storage_offset() + offset
    if spec.dtype.is_complex:
        start //= 2
    view = torch.empty(0, dtype=spec.dtype, device=spec.device)
    return view.set_(whole.untyped_storage(), start, spec.shape, spec.strides)  # type: ignore[call-overload]


def storage_count(tensor: torch.Tensor) -> int:
    """Return how many tensors look at this one's memory; to be compared with what it was while nobody else did."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))  # type: ignore[attr-defined]
