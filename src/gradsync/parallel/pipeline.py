"""Pipeline parallelism: the blocks divided among stages, micro-batches passed through them by torch's schedules.

[Note: Scale] The loss of every micro-batch is its sum over the whole step's divisor, and the schedule adds gradients
without scaling: micro-batches are accumulation, and the mean is taken once.

[Note: Synchronisation] Backward of micro-batches accumulates on each rank. After the schedule has ended the two copies
of the tied weight add up their gradients, and then, once a step, the replicas do.

[Note: Tied weights] Embedding (first stage) and head (last stage) are one parameter of the model. They start equal,
get the same gradient and the same step, and so stay equal bit for bit.

Shapes: B sequences of a micro-batch, T tokens, S of them in this rank's slice, C channels, V vocabulary.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from gradsync.ddp.module import DistributedDataParallel
from gradsync.parallel.division import Flow, num_stages
from gradsync.parallel.held import Held, clip_global_norm
from gradsync.parallel.mesh import Mesh
from gradsync.parallel.replica import MicroBatches, Replica, same_everywhere
from gradsync.parallel.sequence import slices_of
from gradsync.parallel.stage import Stage
from gradsync.parallel.stage_clock import StageClock
from gradsync.parallel.vocabulary import Vocabulary


class Pipelined(Replica):
    """This rank's stages of a replica whose other stages are on other ranks."""

    is_collective = True

    def __init__(
        self,
        stages: Sequence[Stage],
        runnable: Sequence[nn.Module],
        held: dict[str, Held],
        mesh: Mesh,
        vocabulary: Vocabulary,
        flow: Flow,
    ) -> None:
        """``runnable`` are the stages as they are trained: wrapped."""
        self.config = stages[0].config
        self.held = held
        self.data_rank, self.data_world = mesh.data_rank, mesh.degrees.data
        self.stage = mesh.pipeline_rank
        self.speaks = stages[-1].is_last and mesh.tensor_rank == 0
        self._stages = stages
        self._wrappers = [module for module in runnable if isinstance(module, DistributedDataParallel)]
        self._mesh = mesh
        self._vocabulary = vocabulary
        self._flow = flow
        self._slices = slices_of(flow, mesh)
        self.sequence_slice = self._slices.own
        self._divisor = 1
        self._sums: list[Tensor] = []
        self.engines = self._wrappers
        self._clock = StageClock()
        self._schedule = self._make_schedule(runnable)

    @property
    def computed(self) -> Sequence[tuple[str, int, int]]:
        """See ``Replica``."""
        return list(self._clock.calls)

    def forward_backward(self, micro_batches: MicroBatches, divisor: int, on_loss: Callable[[Tensor], None]) -> None:
        """Run the schedule, then reduce the gradients; see the notes of this module."""
        self._divisor, self._sums = divisor, []
        inputs = torch.cat([inputs for inputs, _ in micro_batches])
        targets = torch.cat([targets for _, targets in micro_batches])
        arguments = (inputs,) if self._stages[0].is_first else ()
        with ExitStack() as stack:
            for wrapper in self._wrappers:
                stack.enter_context(wrapper.no_sync())
            stack.enter_context(self._vocabulary.losses())
            self._schedule.step(
                *arguments, target=targets if self._stages[-1].is_last else None, losses=[], return_outputs=False
            )
        on_loss(self._own_loss(inputs.device))
        self._add_up_tied()
        for wrapper in self._wrappers:
            wrapper.sync_gradients()

    def summed_loss(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Pass the sequences through all stages; the last one has the loss."""
        logits = self._pass_through(inputs)
        loss = torch.zeros((), device=inputs.device)
        if logits is not None:
            with self._vocabulary.losses():
                found = self._vocabulary.summed_loss(logits, targets)
            loss = found if self.speaks else loss
        return loss

    def logits(self, tokens: Tensor) -> Tensor:
        """Pass tokens through all stages, and the logits back to them."""
        own = self._pass_through(tokens)
        logits = torch.empty(*tokens.shape, self.config.vocab_size, device=tokens.device)
        if own is not None:
            logits.copy_(self._vocabulary.gathered(own))
        dist.broadcast(logits, group=self._mesh.pipeline_group, group_src=self._mesh.degrees.pipeline - 1)
        return logits

    def next_token_logits(self, tokens: Tensor) -> Tensor:
        """All ranks take the same numbers, so that none draws another token."""
        return same_everywhere(super().next_token_logits(tokens), self._mesh)

    def clip_gradients(self, limit: float) -> float:
        """See ``held.clip_global_norm``."""
        return clip_global_norm(self.held.values(), limit, self._mesh.device)

    def modules(self) -> list[nn.Module]:
        """Return this rank's stages."""
        return list(self._stages)

    def _make_schedule(self, runnable: Sequence[nn.Module]) -> Any:
        # Here, since its import takes a good part of a second that runs without a pipeline need not spend.
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

        flow, mesh = self._flow, self._mesh
        degree = mesh.degrees.pipeline
        total = num_stages(flow.schedule, degree)
        pipeline_stages = [
            PipelineStage(
                module,
                mesh.pipeline_rank + number * degree,
                total,
                mesh.device,
                input_args=self._example(is_tokens=stage.is_first),
                output_args=self._example(is_logits=stage.is_last),
                group=mesh.pipeline_group,
            )
            for number, (stage, module) in enumerate(zip(self._stages, runnable, strict=True))
        ]
        for number, pipeline_stage in enumerate(pipeline_stages if mesh.device.type == "cpu" else ()):
            self._clock.attach(pipeline_stage, f", part {number}" if len(pipeline_stages) > 1 else "")
        options: dict[str, Any] = {"loss_fn": self._loss_of_micro_batch, "scale_grads": False}
        if flow.schedule == "interleaved":
            return ScheduleInterleaved1F1B(pipeline_stages, flow.num_micro_batches, **options)  # type: ignore[arg-type]
        kind = ScheduleGPipe if flow.schedule == "gpipe" else Schedule1F1B
        return kind(pipeline_stages[0], flow.num_micro_batches, **options)

    def _example(self, is_tokens: bool = False, is_logits: bool = False) -> Tensor:
        """Return a tensor without memory, of the form of what goes into or out of a stage."""
        num_sequences, length = self._flow.micro_batch, self._flow.context
        if is_tokens:
            return torch.empty(num_sequences, length, dtype=torch.int64, device="meta")
        # Logits go nowhere, so their width does not matter.
        last = (length, 1) if is_logits else (self._slices.length(length), self.config.width)
        return torch.empty(num_sequences, *last, device="meta", requires_grad=True)

    def _loss_of_micro_batch(self, logits: Tensor, targets: Tensor) -> Any:
        """See [Note: Scale]."""
        loss = self._vocabulary.summed_loss(logits, targets)
        self._sums.append(loss.detach())
        return loss / self._divisor

    def _own_loss(self, device: torch.device) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=device)
        for loss in self._sums if self.speaks else ():
            total += loss
        return total

    @torch.no_grad()
    def _add_up_tied(self) -> None:
        """See [Note: Tied weights]."""
        group = self._mesh.ends_group
        if group is None:
            return
        first, last = self._stages[0], self._stages[-1]
        weight = first.transformer.wte.weight if first.is_first else last.lm_head.weight  # type: ignore[union-attr]
        if not weight.requires_grad:
            return
        grad = weight.grad
        dist.all_reduce(grad.to_local() if isinstance(grad, DTensor) else grad, group=group)  # type: ignore[arg-type]

    def _pass_through(self, tokens: Tensor) -> Tensor | None:
        """Run sequences through this rank's stages; returns the logits where the last stage is here.

        No stage waits for the next one, so a further call overlaps with what later stages do.
        """
        group, degree = self._mesh.pipeline_group, self._mesh.degrees.pipeline
        before, after = (self.stage - 1) % degree, (self.stage + 1) % degree
        x = self._slices.padded(tokens)
        shape = (len(tokens), self._slices.length(x.shape[1]), self.config.width)  # B, S, C
        for stage in self._stages:
            if not stage.is_first:
                x = torch.empty(shape, device=tokens.device)
                dist.recv(x, group=group, group_src=before)
            x = stage(x)
            if not stage.is_last:
                dist.send(x.contiguous(), group=group, group_dst=after)
        return x[:, : tokens.shape[1]] if self._stages[-1].is_last else None
