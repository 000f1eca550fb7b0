"""Synchronised batch norm on the CPU, where torch's own module refuses to run.

The wrapper turns ``torch.nn.SyncBatchNorm`` modules on the CPU into this subclass, in place: same
parameters, same state, same type checks. Ranks may hold different numbers of samples, also none.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradsync.comm.waits import Waits
from gradsync.comm.watches import watch_of_world


class CPUSyncBatchNorm(nn.SyncBatchNorm):
    """``torch.nn.SyncBatchNorm`` that also runs on CPU tensors."""

    soft_limit_s: float | None = None
    """How long a rank waits for the others; None: as ``init_process_group`` says."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise ``input`` (N, C, ...) by the statistics of all ranks; in evaluation by the running ones."""
        group = self.process_group or dist.group.WORLD
        # like torch's, it never waits for the other ranks in evaluation, even without running statistics
        if input.device.type != "cpu" or not self.training or group is None or group.size() == 1:
            return self._local_forward(input)
        self._check_input_dim(input)
        exchange = _Exchange(group, self.soft_limit_s)
        output, mean, variance, count = _Normalize.apply(input, self.weight, self.bias, self.eps, exchange)  # type: ignore[no-untyped-call]
        if self.track_running_stats:
            self._update_running_statistics(mean, variance, float(count))
        result: torch.Tensor = output
        return result

    def _local_forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.device.type != "cpu":
            result: torch.Tensor = super().forward(input)
            return result
        return nn.modules.batchnorm._BatchNorm.forward(self, input)

    def _check_non_zero_input_channels(self, input: torch.Tensor) -> None:
        if input.size(1) == 0:
            raise ValueError("SyncBatchNorm number of input channels should be non-zero")

    @torch.no_grad()
    def _update_running_statistics(self, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
        assert self.running_mean is not None and self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / max(count - 1, 1.0))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


class _Exchange:
    """What goes between the ranks, each time with the end that every wait of the engine has."""

    def __init__(self, group: Any, soft_limit_s: float | None) -> None:
        self._group = group
        self._waits = Waits(group, watch_of_world(), soft_limit_s)

    def gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        """Return every rank's tensor."""
        everyone = [torch.empty_like(mine) for _ in range(self._group.size())]
        self._waits.wait(dist.all_gather(everyone, mine, group=self._group, async_op=True))
        return everyone

    def sum(self, tensor: torch.Tensor) -> None:
        """Sum a tensor over the ranks, in place."""
        self._waits.wait(dist.all_reduce(tensor, group=self._group, async_op=True))


class _Normalize(torch.autograd.Function):
    """Batch normalisation over all ranks: one exchange of statistics forward, one of sums backward."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        exchange: _Exchange,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        axes = [0, *range(2, input.dim())]
        mean, variance, count = _global_statistics(input, axes, exchange)
        inverse_std = torch.rsqrt(variance + eps)
        normalized = (input - _over_channels(mean, input)) * _over_channels(inverse_std, input)
        output = normalized if weight is None else normalized * _over_channels(weight, input)
        if bias is not None:
            output = output + _over_channels(bias, input)
        ctx.save_for_backward(normalized, inverse_std, count, weight)
        ctx.axes, ctx.exchange, ctx.has_bias = axes, exchange, bias is not None
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:  # type: ignore[override]
        normalized, inverse_std, count, weight = ctx.saved_tensors
        grad_bias = grad.sum(ctx.axes)
        grad_weight = (grad * normalized).sum(ctx.axes)
        sums = torch.cat([grad_bias, grad_weight])
        ctx.exchange.sum(sums)
        mean_grad, mean_product = (sums / count).chunk(2)
        scale = inverse_std if weight is None else inverse_std * weight
        centred = grad - _over_channels(mean_grad, grad) - normalized * _over_channels(mean_product, grad)
        grad_input = centred * _over_channels(scale, grad)
        return (
            grad_input,
            None if weight is None else grad_weight,
            grad_bias if ctx.has_bias else None,
            None,
            None,
        )


def _global_statistics(
    input: torch.Tensor, axes: list[int], exchange: _Exchange
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return mean, variance and count over all ranks, in float64: sums of squares would lose digits in float32.

    Combines each rank's mean and sum of squared differences (Chan, Golub and LeVeque, 1979).
    """
    values = input.detach().double()
    count = input.numel() // max(input.size(1), 1)
    mean = values.mean(axes) if count else values.new_zeros(input.size(1))
    squares = (values - _over_channels(mean, values)).square().sum(axes)
    mine = torch.cat([mean, squares, values.new_tensor([count])])
    table = torch.stack(exchange.gather(mine))
    counts = table[:, -1:]
    means, squares_by_rank = table[:, :-1].chunk(2, dim=1)
    total = counts.sum().clamp(min=1.0)
    global_mean = (counts * means).sum(0) / total
    global_squares = (squares_by_rank + counts * (means - global_mean).square()).sum(0)
    dtype = input.dtype if input.dtype == torch.float64 else torch.float32
    return global_mean.to(dtype), (global_squares / total).to(dtype), total.to(dtype)


def _over_channels(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))


def run_on_cpu(module: nn.Module, soft_limit_s: float | None = None) -> None:
    """Let every ``torch.nn.SyncBatchNorm`` of the module run on CPU tensors, and wait for other ranks only so long."""
    for part in module.modules():
        if type(part) is nn.SyncBatchNorm:
            part.__class__ = CPUSyncBatchNorm
        if isinstance(part, CPUSyncBatchNorm) and soft_limit_s is not None:
            part.soft_limit_s = soft_limit_s
