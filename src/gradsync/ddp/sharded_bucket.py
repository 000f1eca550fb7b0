"""A bucket of which each rank keeps its slice: the gradients go into a sum over the ranks and don't come back whole.

[Note: Slices] ``shard`` is this rank's slice of the reduced gradients, and between passes ``param.grad`` is a
``ShardedGradient`` that stands for them. Dropping that (``param.grad = None``) drops the gradient: what the next
pass brings then takes its place instead of being added. The memory of a slice is freed with the gradients, so that
the activations of the next forward can use it.

[Note: No copy] A large parameter has a bucket of its own, and its gradient is sent from where autograd put it.
Only small ones are copied together, into a buffer that is kept. What is sent must be as long on every rank, also
where there is no gradient: without the padding at the end if the exchange allows that (``num_sent``).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from gradsync.comm.summing import Pending
from gradsync.ddp.bucket import Allocator, Bucket, copy_all, storage_count, view_at
from gradsync.ddp.exchange import Exchange
from gradsync.ddp.plan import BucketPlan, ParameterSpec
from gradsync.ddp.shard_layout import Placement, flat_view, in_layout_of, is_laid_out_as
from gradsync.ddp.sharded_gradient import ShardedGradient


class ShardedBucket(Bucket):
    """Gradients of several parameters, cut into one slice a rank. The plan must have been made with a ``Slicing``."""

    def __init__(
        self,
        number: int,
        plan: BucketPlan,
        specs: Sequence[ParameterSpec],
        parameters: Sequence[torch.Tensor],
        exchange: Exchange,
        rank: int,
        world_size: int,
        allocate: Allocator,
    ) -> None:
        super().__init__(number, plan, specs, parameters, allocate=allocate)
        self.rank = rank
        self.slice_numel = plan.numel // world_size
        self.shard: torch.Tensor | None = None
        self.stand_ins = [ShardedGradient(p, self, position) for position, p in enumerate(self.parameters)]
        self.exchange = exchange
        self._placements = [
            Placement(offset, spec.flat_numel, self.slice_numel)
            for offset, spec in zip(plan.offsets, self._specs, strict=True)
        ]
        self.num_sent = num_sent(plan, self._specs, exchange)
        self._whole: torch.Tensor | None = None
        self._incoming: torch.Tensor | None = None
        self._spare_slice: torch.Tensor | None = None
        self._idle_count = 0
        self._factor = 1.0
        self._held: list[int] = []

    # ------------------------------------------------------------- what this rank holds

    def name_of(self, position: int) -> str:
        """Return the name of one of the bucket's parameters."""
        return self._specs[position].name

    def spec_of(self, position: int) -> ParameterSpec:
        """Return the description of one of the bucket's parameters."""
        return self._specs[position]

    def own_piece(self, position: int) -> torch.Tensor | None:
        """Return this rank's part of the gradient of one parameter, flat; None if it owns no element of it."""
        if self.shard is None or not self._placements[position].owned_by(self.rank):
            return None
        return self.shard[self._placements[position].in_slice(self.rank)]

    def cut(self, position: int, whole: torch.Tensor) -> torch.Tensor:
        """Return the part that this rank owns of a tensor with the parameter's shape."""
        owned = self._placements[position].owned_by(self.rank)
        return flat_view(in_layout_of(self._specs[position], whole))[owned.start : owned.stop]

    def hold(self, position: int, piece: torch.Tensor | None, local: torch.Tensor | None = None) -> None:
        """Take over a gradient that is reduced already; ``piece`` is what this rank owns of it."""
        if self.shard is None:
            self.shard = self._empty_slice().zero_()
        mine = self.own_piece(position)
        if mine is not None and piece is not None:
            mine.copy_(piece)
        self.stand_ins[position].local = local
        self.parameters[position].grad = self.stand_ins[position]

    def add(self, position: int, whole: torch.Tensor) -> None:
        """Add to a gradient that is held what was reduced outside of the bucket, whole on all ranks."""
        piece = self.own_piece(position)
        if piece is not None:
            piece.add_(self.cut(position, whole))

    def results(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return nothing: slices are moved by ``Sharding``."""
        return []

    def holds_result(self, index: int) -> bool:
        """See ``Bucket``."""
        grad = self.parameters[self._position[index]].grad
        return type(grad) is ShardedGradient and grad.local is None

    @torch.no_grad()
    def adopt(self, results: Mapping[int, torch.Tensor]) -> None:
        """Cut gradients that an earlier pass has left whole on all ranks."""
        for position, parameter in enumerate(self.parameters):
            result = results.get(id(parameter))
            if result is not None:
                self.hold(position, self.cut(position, result))

    def drop(self) -> None:
        """Forget the slice: its gradients are worth nothing any more."""
        if self.shard is not None:
            self._spare_slice, self.shard = self.shard, None

    def retire(self) -> None:
        """Free all memory now, not when the stand-ins, which know the bucket, are collected; another takes over."""
        self.shard = self._incoming = self._spare_slice = self._whole = self._buffer = None

    def _empty_slice(self) -> torch.Tensor:
        spare, self._spare_slice = self._spare_slice, None
        if spare is not None and storage_count(spare) == self._idle_count:
            return spare  # nobody has kept a gradient in it
        fresh = torch.empty(self.slice_numel, dtype=self.plan.dtype, device=self.plan.device)
        self._idle_count = storage_count(fresh)
        return fresh

    # ------------------------------------------------------------- one pass

    def start_pass(self, waiting: int) -> None:
        """See ``Bucket``; also forgets the slice if the user has dropped all gradients in it."""
        super().start_pass(waiting)
        self._whole = self._incoming = None
        if not any(type(p.grad) is ShardedGradient for p in self.parameters):
            self.drop()

    @torch.no_grad()
    def collect(self, touched: bytearray, scale: float) -> None:
        """Take the gradients off the parameters; missing ones count as zeros.

        Contributions of earlier passes are in the slices already: only what came since takes part.
        """
        grads: list[torch.Tensor | None] = []
        self._held = []
        for position, (index, parameter) in enumerate(zip(self.plan.indices, self.parameters, strict=True)):
            grad = parameter.grad
            if type(grad) is ShardedGradient:
                self._held.append(position)
                self._kept[position] = grad
                grad = grad.local
            elif grad is not None and not touched[index]:
                self._kept[position] = grad
            grads.append(grad)
        self.missing = [index for index, grad in zip(self.plan.indices, grads, strict=True) if grad is None]
        self._factor = scale
        self._whole = self._in_place(grads) if self._can_stay_in_place(grads) else self._copied(grads)
        for parameter in self.parameters:
            parameter.grad = None
        self.is_launched = True

    def launch(self) -> None:
        """Start to sum what was collected over the ranks."""
        assert self._whole is not None
        self._incoming = self._empty_slice()
        self.work = _Arrival(self, self.exchange.reduce_scatter(self._whole, self._incoming, 2 * self.number))

    def arrive(self, wait: Callable[[Pending], object]) -> None:
        """Have the sum waited for now, by ``wait``."""
        assert isinstance(self.work, _Arrival)
        self.work.arrive(wait)

    @property
    def num_bytes_on_the_way(self) -> int:
        """Memory that is held until the sum has arrived."""
        return 0 if self._whole is None else self._whole.numel() * self._whole.element_size()

    @torch.no_grad()
    def take(self) -> None:
        """Take note that this rank's slice of the sum has arrived; what was collected is free now."""
        assert self._incoming is not None
        if self._factor != 1.0:
            self._incoming.mul_(self._factor)
        self._whole = None

    def add_late(self, index: int, contribution: torch.Tensor) -> None:
        """See ``Bucket``."""
        position = self._position[index]
        assert self._incoming is not None
        if self._placements[position].owned_by(self.rank):
            self._incoming[self._placements[position].in_slice(self.rank)].add_(self.cut(position, contribution))

    def multiply(self, factor: float) -> None:
        """See ``Bucket``."""
        assert self._incoming is not None
        self._incoming.mul_(factor)

    @torch.no_grad()
    def write_back(self, is_used: Sequence[bool] | None) -> None:
        """Let each used parameter's ``grad`` stand for the slices; put back what the others had."""
        assert self._incoming is not None
        before, self.shard, self._incoming = self.shard, self._incoming, None
        self._spare_slice = before
        if before is not None:
            for position in self._held:
                where = self._placements[position].in_slice(self.rank)
                if is_used is None or is_used[position]:
                    self.shard[where].add_(before[where])
                else:
                    self.shard[where].copy_(before[where])
        for position, parameter in enumerate(self.parameters):
            if is_used is None or is_used[position]:
                self.stand_ins[position].local = None
                parameter.grad = self.stand_ins[position]
            else:
                parameter.grad = self._kept.get(position)
        self._kept = {}

    # ------------------------------------------------------------- where the gradients are sent from

    def _can_stay_in_place(self, grads: Sequence[torch.Tensor | None]) -> bool:
        grad, spec = grads[0], self._specs[0]
        return (
            len(grads) == 1
            and grad is not None
            and grad.layout is torch.strided
            and is_laid_out_as(spec, grad)
            and not self._scales_first
            and spec.flat_numel == self.num_sent
        )

    @property
    def _scales_first(self) -> bool:
        """Whether gradients are scaled before the sum, which could overflow; otherwise the slice is, which is less."""
        return self.plan.dtype == torch.float16 and self._factor != 1.0

    def _in_place(self, grads: Sequence[torch.Tensor | None]) -> torch.Tensor:
        assert grads[0] is not None
        return flat_view(grads[0])

    def _copied(self, grads: Sequence[torch.Tensor | None]) -> torch.Tensor:
        if len(grads) == 1:  # a large one, whose memory is not kept
            whole = self._allocate(self.num_sent, self.plan.dtype, self.plan.device)
            views = [view_at(whole, 0, self._specs[0])]
        else:
            whole, views = self.buffer.gradients, self.buffer.views
            absent = [view for view, grad in zip(views, grads, strict=True) if grad is None]
            if absent:
                torch._foreach_zero_(absent)
        present = [(view, grad) for view, grad in zip(views, grads, strict=True) if grad is not None]
        copy_all([view for view, _ in present], [grad for _, grad in present])
        if self._scales_first:
            whole.mul_(self._factor)
            self._factor = 1.0
        return whole


def num_sent(plan: BucketPlan, specs: Sequence[ParameterSpec], exchange: Exchange) -> int:
    """Return how many elements of a bucket travel; ``specs`` are those of its parameters."""
    return specs[0].flat_numel if len(specs) == 1 and exchange.takes_any_length else plan.numel


class _Arrival:
    """Waits for the sum of a bucket and hands it over; a second wait does nothing."""

    def __init__(self, bucket: ShardedBucket, pending: Pending) -> None:
        self._bucket = bucket
        self._pending: Pending | None = pending

    def wait(self, _timeout: Any = None) -> None:
        self.arrive(lambda pending: pending.wait())

    def arrive(self, wait: Callable[[Pending], object]) -> None:
        if self._pending is not None:
            pending, self._pending = self._pending, None
            wait(pending)
            self._bucket.take()
