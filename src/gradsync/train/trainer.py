"""The training loop: one optimizer step, told in the order in which it happens, and what is due between steps.

What it works with was put together in ``job.py``; how the model is spread over ranks, and where gradients are
reduced, is the replica's.

[Note: Exact averaging] Every rank's loss is a sum over its tokens divided by the token count of the
whole step, and gradients are added up over the ranks without dividing. So each gradient is divided once, by one
number, and does not depend on how the batch was laid out over ranks and micro-batches.
"""

import math
import time
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from gradsync.data.loader import GlobalBatchLoader
from gradsync.ddp.sharded_optimizer import ZeroRedundancyOptimizer
from gradsync.errors import CheckpointError, ContractError, NonFiniteError
from gradsync.observe.records import StepRecord
from gradsync.parallel.replica import Replica
from gradsync.train.config import TrainConfig
from gradsync.train.interrupt import StopReason, StopRequests
from gradsync.train.modes import Modes
from gradsync.train.nonfinite import explain, find_parameter, find_sequences
from gradsync.train.optim import Schedule, set_lr
from gradsync.train.phases import BETWEEN, CHECKPOINT, COMPUTE, DATA, EVALUATION, NORM, OPTIMIZER, SAMPLE, Phases
from gradsync.train.ranks import Ranks
from gradsync.train.vote import StepVote, Verdict

MicroBatches = list[tuple[Tensor, Tensor]]

# A skipped step changes no weight: what fails this often for other sequences each time goes on failing.
_MOST_SKIPPED_IN_A_ROW = 20


@dataclass(frozen=True)
class Parts:
    """What a training loop works with on one rank."""

    ranks: Ranks
    device: torch.device
    replica: Replica
    optimizer: Optimizer
    schedule: Schedule
    loader: GlobalBatchLoader
    requests: StopRequests
    modes: Modes
    phases: Phases


class Chores(Protocol):
    """What is done between steps: all of it by all ranks, whatever each of them does there."""

    def evaluate(self) -> dict[str, float]:
        """Return what a validation finds, by the names of ``StepRecord``."""

    def sample(self, step: int) -> str | None:
        """Return a sample, on rank 0."""

    def save(self, step: int, val_loss: float | None) -> None:
        """Begin to write a checkpoint; the one before is finished."""

    def finish_saving(self) -> None:
        """Wait for the checkpoint under way; raise if it could not be written."""

    def tell(self, record: StepRecord) -> None:
        """Keep and show a finished step."""

    def note(self, message: str) -> None:
        """Say something to the user."""


@dataclass(frozen=True)
class Outcome:
    """How a start of a run ended, on every rank; the sample is there on rank 0 only."""

    run: str
    step: int
    total_steps: int
    reason: StopReason
    val_loss: float | None
    sample: str | None

    @property
    def is_finished(self) -> bool:
        """Whether all steps of the run were taken."""
        return self.step == self.total_steps


class Trainer:
    """Takes steps until the run is finished or asked to stop; the same decisions on every rank."""

    def __init__(self, config: TrainConfig, parts: Parts, chores: Chores, step: int) -> None:
        self._config = config
        self._parts = parts
        self._chores = chores
        self._phases = parts.phases
        self.step = step
        self._end = config.steps if config.stop_after is None else min(config.steps, step + config.stop_after)
        self._reason = StopReason.NONE
        self._val_loss: float | None = None
        self._evaluated_step = -1
        self._saved_step = step  # what a resumed run has begun from
        self._skipped_in_a_row = 0

    def run(self) -> Outcome:
        """Train to the end of this start, save, and say how it ended."""
        sample = None
        while self.step < self._end and self._reason is StopReason.NONE:
            record = self._evaluate_if_due(self._train_step())
            self._phases.begin(BETWEEN, self.step)
            self._chores.tell(record)
            self._save_if_due()
            sample = self._sample_if_due()
        self._phases.end()
        run = self._config.run or ""
        return Outcome(run, self.step, self._config.steps, self._reason, self._val_loss, sample)

    def _train_step(self) -> StepRecord:
        parts, number = self._parts, self.step + 1
        self._phases.begin(DATA, number)
        started_s = time.perf_counter()
        lr = parts.schedule.lr_at(self.step)
        set_lr(parts.optimizer, lr)
        numbers = parts.loader.upcoming()
        micro_batches = parts.loader.next_step()
        self._phases.begin(COMPUTE, number)
        vote = self._forward_backward(micro_batches)
        self._phases.begin(NORM, number)
        grad_norm = self._clip_gradients()
        verdict = vote.result()
        self._phases.begin(OPTIMIZER, number)
        is_finite = not verdict.non_finite_ranks and math.isfinite(grad_norm)
        if is_finite:
            parts.optimizer.step()
        else:
            self._refuse(micro_batches, numbers, verdict, grad_norm)
        self._skipped_in_a_row = 0 if is_finite else self._skipped_in_a_row + 1
        parts.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self._reason = verdict.reason
        tokens = parts.loader.tokens_per_step
        tokens_per_s = tokens / (time.perf_counter() - started_s)
        return StepRecord(self.step, verdict.loss_sum / tokens, lr, grad_norm, tokens_per_s, skipped=not is_finite)

    def _forward_backward(self, micro_batches: MicroBatches) -> StepVote:
        """Accumulate and reduce the gradients; the vote starts as soon as the loss is known."""
        parts = self._parts
        votes: list[StepVote] = []

        def vote(loss_sum: Tensor) -> None:
            votes.append(StepVote(parts.ranks, loss_sum, parts.requests.reason))

        on_device = [(inputs.to(parts.device), targets.to(parts.device)) for inputs, targets in micro_batches]
        # See [Note: Exact averaging].
        try:
            parts.replica.forward_backward(on_device, parts.loader.tokens_per_step, vote)
        except ContractError as error:  # the engine counts passes since this start
            raise ContractError(f"step {self.step + 1}: {error}") from error
        return votes[0]

    def _clip_gradients(self) -> float:
        limit, optimizer = self._config.clip or math.inf, self._parts.optimizer
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            return float(optimizer.clip_grad_norm_(limit))
        return self._parts.replica.clip_gradients(limit)

    def _refuse(self, micro_batches: MicroBatches, numbers: range, verdict: Verdict, grad_norm: float) -> None:
        """Say where a step went wrong; stop there, on all ranks, unless such steps are to be skipped."""
        parts = self._parts
        with parts.modes.elsewhere():
            found = find_sequences(parts.replica, micro_batches, numbers, parts.device)
            place = find_parameter(parts.replica, micro_batches, parts.device) if found else ""
        message = explain(parts.ranks, self.step + 1, found, grad_norm, verdict.non_finite_ranks, place)
        if self._config.non_finite == "stop":
            raise NonFiniteError(
                f"{message}; {self._last_checkpoint()}. Lower --lr, or skip such steps with --non-finite skip"
            )
        if self._skipped_in_a_row + 1 >= _MOST_SKIPPED_IN_A_ROW:
            raise NonFiniteError(
                f"{message}; it would be the {_MOST_SKIPPED_IN_A_ROW}th in a row that is skipped, so the weights "
                f"are of no use any more. Lower --lr, and start from an earlier checkpoint with --init-from"
            )
        self._chores.note(f"{message}; skipped")

    def _evaluate_if_due(self, record: StepRecord) -> StepRecord:
        if not self._is_due(self._config.eval_every):
            return record
        self._phases.begin(EVALUATION, self.step)
        found = self._chores.evaluate()
        self._val_loss, self._evaluated_step = found["val_loss"], self.step
        return replace(record, **found)  # type: ignore[arg-type]

    def _save_if_due(self) -> None:
        """Save every so often, where a failure is reported and the run goes on, and at the end of this start."""
        every = self._config.checkpoint_every
        is_last = self.step == self._end or self._reason is not StopReason.NONE
        if not is_last and not (every and self.step % every == 0):
            return
        self._phases.begin(CHECKPOINT, self.step)
        try:
            self._chores.finish_saving()
        except CheckpointError as error:
            self._chores.note(f"warning: {error}; training goes on, the next checkpoint is tried as usual")
        try:
            self._chores.save(self.step, self._val_loss if self._evaluated_step == self.step else None)
            self._saved_step = self.step
            if is_last:
                self._chores.finish_saving()
        except CheckpointError as error:
            raise CheckpointError(
                f"{error}; mend that (often: make room on the disk), and go on from the newest checkpoint with --resume"
            ) from error

    def _last_checkpoint(self) -> str:
        return (
            f"the last checkpoint is that of step {self._saved_step}" if self._saved_step else "no checkpoint is there"
        )

    def _sample_if_due(self) -> str | None:
        if self._config.sample_tokens == 0 or not self._is_due(self._config.sample_every):
            return None
        self._phases.begin(SAMPLE, self.step)
        return self._chores.sample(self.step)

    def _is_due(self, every: int) -> bool:
        is_finished = self.step == self._config.steps
        return is_finished or (every > 0 and self.step % every == 0)
