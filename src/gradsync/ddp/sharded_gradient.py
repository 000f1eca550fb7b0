"""What stands in ``param.grad`` while the gradient is spread over the ranks."""

from typing import TYPE_CHECKING, Any

import torch

from gradsync.errors import ShardedGradientError

if TYPE_CHECKING:
    from gradsync.ddp.sharded_bucket import ShardedBucket

_ops = torch.ops.aten
_SCALINGS = {_ops.mul_.Tensor, _ops.mul_.Scalar, _ops.div_.Tensor, _ops.div_.Scalar}


class ShardedGradient(torch.Tensor):
    """Says that a parameter has a gradient, of which each rank holds a slice; it has no values of its own.

    It looks like the gradient (shape, dtype, device), can be dropped, zeroed, and multiplied by a number, and
    takes in what a further backward adds (``local``: the part that is this rank's alone until the next pass).
    Everything that would need its values raises, so that nothing is computed from a part of them by mistake.
    """

    local: torch.Tensor | None
    _bucket: "ShardedBucket"
    _position: int

    # Below autograd, where its own accumulation arrives too.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, parameter: torch.Tensor, bucket: "ShardedBucket", position: int) -> "ShardedGradient":
        """Make the stand-in for the gradient of one parameter of a bucket."""
        self: ShardedGradient = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )
        self.local = None
        self._bucket = bucket
        self._position = position
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedGradient({self._bucket.name_of(self._position)!r}, shape={tuple(self.shape)})"

    def own_piece(self) -> torch.Tensor | None:
        """Return this rank's part of the gradient, flat; None if it owns none.

        A view, unless this rank has added something since: then a sum made for the caller. Looking takes nothing
        away, since the next pass needs the whole of what was added, for the slices of other ranks too.
        """
        piece = self._bucket.own_piece(self._position)
        if self.local is None or piece is None:
            return piece
        return piece + self._bucket.cut(self._position, self.local)

    def take_local(self) -> torch.Tensor | None:
        """Return what is this rank's alone; the caller's from now on."""
        local, self.local = self.local, None
        return local

    def add_reduced(self, whole: torch.Tensor) -> None:
        """Add what was reduced elsewhere, whole on all ranks."""
        self._bucket.add(self._position, whole)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Do what needs no values; raise for everything else."""
        first = args[0] if args else None
        if isinstance(first, ShardedGradient):
            if func is _ops.detach.default:
                return first
            if func is _ops.zero_.default:
                return first._apply(lambda part: part.zero_())
            if func is _ops.add_.Tensor and not isinstance(args[1], ShardedGradient):
                return first._absorb(args[1], (kwargs or {}).get("alpha", 1))
            if func in _SCALINGS and _is_number(args[1]):
                return first._apply(lambda part: func(part, args[1]))
        raise ShardedGradientError(_message(func, args))

    def _apply(self, change: Any) -> "ShardedGradient":
        for part in (self._bucket.own_piece(self._position), self.local):
            if part is not None:
                change(part)
        return self

    def _absorb(self, addition: torch.Tensor, alpha: float) -> "ShardedGradient":
        if self.local is None:
            self.local = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        self.local.add_(addition, alpha=alpha)
        return self


def _is_number(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or value.dim() == 0


def _message(func: Any, args: Any) -> str:
    flat = [x for a in args for x in (a if isinstance(a, list | tuple) else [a])]
    found = next((x for x in flat if isinstance(x, ShardedGradient)), None)
    which = "a parameter" if found is None else repr(found._bucket.name_of(found._position))
    rank = "?" if found is None else found._bucket.rank
    return (
        f"rank {rank}: {func} was called on the gradient of {which}, but with a ZeroRedundancyOptimizer no rank holds "
        f"a whole gradient after backward; step and clip through the optimizer (optimizer.step(), "
        f"optimizer.clip_grad_norm_()), and look at values with optimizer.full_gradient(parameter) on all ranks"
    )
