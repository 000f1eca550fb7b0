"""A training run as one rank lives through it: set up, restored, trained, and what is due between steps.

Called with the process group (or none) already there. What can fail for a reason of the user's comes
before anything is written, and on all ranks together, so that all raise or none.
"""

import math
import platform
import socket
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from gradsync import __version__
from gradsync.comm.watches import excused, explaining
from gradsync.data.loader import evaluation_batches
from gradsync.errors import CheckpointError, NonFiniteError
from gradsync.observe.memory import resident_bytes
from gradsync.observe.metrics import Forgiving, Sink, forget_after, losses_of, open_sinks, read_metrics
from gradsync.observe.peaks import peak_flops
from gradsync.observe.progress import Course, View, smoothed
from gradsync.observe.records import StepRecord
from gradsync.train.assemble import Assembly, assemble, remarks
from gradsync.train.background import BackgroundWriter
from gradsync.train.build import build, check_same_data, fingerprint
from gradsync.train.checkpoint import CheckpointFolder, all_of, newest_intact, open_checkpoint
from gradsync.train.completions import completion_accuracy
from gradsync.train.config import TrainConfig
from gradsync.train.evaluate import Evaluation, evaluate
from gradsync.train.folderlock import FolderLock
from gradsync.train.initial import check_can_begin
from gradsync.train.interrupt import StopRequests
from gradsync.train.modes import Modes
from gradsync.train.optim import Schedule
from gradsync.train.outline import in_words
from gradsync.train.phases import Phases
from gradsync.train.ranks import Ranks, together
from gradsync.train.runfolder import RunFolder
from gradsync.train.sample import SampleOptions, stream_text
from gradsync.train.trainer import Outcome, Parts, Trainer
from gradsync.train.watching import NoWatch, Watch, watch_of


@dataclass(frozen=True)
class Place:
    """Where a rank is, whom it talks to, and who talks to it."""

    ranks: Ranks
    device: torch.device
    view: View
    requests: StopRequests


class Job:
    """One run on one rank; the trainer comes back to it for what is due between steps."""

    def __init__(self, config: TrainConfig, place: Place) -> None:
        assert config.run is not None
        self._config = config
        self._place = place
        self._folder = RunFolder(config.run)
        self._modes = Modes(config.dtype, place.device, config.compile)
        rank, world = place.ranks.rank, place.ranks.world
        self._material = together(place.ranks, lambda: build(config, rank, world, place.device, self._modes))
        check_same_data(place.ranks, self._material)
        self._lock = together(place.ranks, self._claim_folder)
        writers = place.ranks.twin() if config.async_checkpoints else place.ranks
        self._checkpoints = CheckpointFolder(self._folder.checkpoints, writers, config.keep_checkpoints)
        self._writer = BackgroundWriter(self._checkpoints, not config.async_checkpoints, self._tell_saved)
        self._peak_flops = peak_flops(_device_name(place.device), self._modes.dtype_name)
        self._sinks: list[Sink] = []
        self._phases = Phases()
        self._watch: Watch = NoWatch()
        self._assembly: Assembly

    def run(self) -> Outcome:
        """Train, from the start or from the newest intact checkpoint; all ranks together."""
        try:
            return self._run()
        finally:
            if self._lock is not None:
                self._lock.release()

    def _run(self) -> Outcome:
        self._checkpoints.clean()
        self._assembly = assemble(self._config, self._material, self._place.device)
        self._material = replace(self._material, model=None)
        self._watch = watch_of(
            self._place.ranks, self._assembly.replica, self._phases, self._config, self._folder.path, self.note
        )
        step = self._restore() if self._config.resume else 0
        smoothed_loss = together(self._place.ranks, lambda: self._open_records(step))
        self._announce()
        tokens_per_step = self._material.plan.tokens_per_step
        self._place.view.begin(Course(step, self._config.steps, tokens_per_step, smoothed_loss))
        try:
            with explaining():
                outcome = Trainer(self._config, self._parts(), self, step).run()
            self._watch.finish()
            return outcome
        finally:
            self._writer.abandon()
            for sink in self._sinks:
                sink.close()

    def evaluate(self) -> dict[str, float]:
        """Return the validation loss over all ranks, and the accuracy on completion tasks if there are any."""
        with self._modes.elsewhere():
            return {"val_loss": self._validate().loss, **self._accuracy()}

    def _validate(self) -> Evaluation:
        config, ranks, replica = self._config, self._place.ranks, self._assembly.replica
        batches = evaluation_batches(
            self._material.corpus.val,
            config.context,
            replica.data_rank,
            replica.data_world,
            self._material.plan.micro_batch,
            max_sequences=-(-config.eval_tokens // config.context) or None,
        )
        return evaluate(replica, batches, ranks, self._place.device)

    def _accuracy(self) -> dict[str, float]:
        material = self._material
        if not material.examples:
            return {}
        ranks, device = self._place.ranks, self._place.device
        found = completion_accuracy(self._assembly.replica, material.corpus.tokenizer, material.examples, ranks, device)
        return {"accuracy": found.by_sum, "accuracy_normalised": found.by_mean}

    def sample(self, step: int) -> str | None:
        """Write a sample into the run folder and return it, on rank 0; others run along if the model needs it."""
        is_first, replica = self._place.ranks.rank == 0, self._assembly.replica
        if not is_first and not replica.is_collective:
            return None
        config = self._config
        options = SampleOptions(config.sample_tokens, config.sample_temperature, config.sample_top_k, config.seed)
        tokenizer = self._material.corpus.tokenizer
        try:
            with self._modes.elsewhere(), excused("a sample"):
                pieces = stream_text(replica, tokenizer, config.sample_prompt, options, self._place.device)
                text = config.sample_prompt + "".join(pieces)
            if is_first:
                self._folder.write_sample(step, text)
        except (NonFiniteError, OSError) as error:
            self.note(f"warning: no sample of step {step}: {error}")
            return None
        return text if is_first else None

    def save(self, step: int, val_loss: float | None) -> None:
        """Begin to write a checkpoint."""
        material = self._material
        facts = {
            "model": asdict(material.shape),
            "tokenizer": material.corpus.tokenizer.name,
            "data": fingerprint(material.corpus.train),
            "loader": material.loader.state_dict(),
            "tokens": step * material.plan.tokens_per_step,
            "world": self._place.ranks.world,
            "layout": self._layout(),
            "val_loss": val_loss if val_loss is not None and math.isfinite(val_loss) else None,
        }
        self._writer.save(step, self._assembly.state.share(), facts)

    def finish_saving(self) -> None:
        """Wait for the checkpoint under way."""
        self._writer.finish()

    def tell(self, record: StepRecord) -> None:
        """Keep and show a finished step."""
        self._writer.poll()
        record = replace(record, late=self._watch.step(record.step))
        if self._peak_flops is not None:
            flops = record.tokens_per_s * self._material.flops_per_token
            record = replace(record, mfu=flops / (self._peak_flops * self._place.ranks.world))
        for sink in self._sinks:
            sink.write(record)
        self._place.view.step(record, self._memory_bytes())

    def note(self, message: str) -> None:
        """Say something to the user."""
        self._place.view.note(message)

    def _tell_saved(self, path: Path) -> None:
        self.note(f"saved {path}")

    def _claim_folder(self) -> FolderLock | None:
        return self._folder.create(self._config) if self._place.ranks.rank == 0 else None

    def _parts(self) -> Parts:
        config, place, material = self._config, self._place, self._material
        return Parts(
            ranks=place.ranks,
            device=place.device,
            replica=self._assembly.replica,
            optimizer=self._assembly.optimizer,
            schedule=Schedule(config.lr, config.min_lr_fraction, config.warmup_steps, config.steps),
            loader=material.loader,
            requests=place.requests,
            modes=self._modes,
            phases=self._phases,
        )

    def _restore(self) -> int:
        ranks = self._place.ranks
        path = ranks.from_first(together(ranks, self._find_checkpoint))
        if path is None:
            check_can_begin(self._config)
            self.note("no checkpoint yet: starting from step 0")
            return 0
        step = together(ranks, lambda: self._load(path))
        self.note(f"resumed from {path}")
        return step

    def _find_checkpoint(self) -> Path | None:
        if self._place.ranks.rank != 0:
            return None
        with excused("looking for an intact checkpoint"):
            checkpoint = newest_intact(self._folder.checkpoints, self.note)
        damaged = all_of(self._folder.checkpoints)
        if checkpoint is None and damaged:
            # To begin anew would throw away what may still be saved.
            raise CheckpointError(
                f"none of the {len(damaged)} checkpoint(s) in {self._folder.checkpoints} is intact; put back one that "
                f"is, or remove them to start again from step 0"
            )
        return checkpoint.folder if checkpoint else None

    def _load(self, path: Path) -> int:
        checkpoint, material = open_checkpoint(path), self._material
        if checkpoint.fact("data", dict) != fingerprint(material.corpus.train):
            raise CheckpointError(
                f"the text of {self._config.data} is not the one that run {self._folder.path} was trained on; "
                f"resume with that text, or start a new run"
            )
        self._assembly.state.restore(checkpoint.shapes(), checkpoint.load)
        material.loader.load_state_dict(checkpoint.fact("loader", dict))
        return checkpoint.step

    def _open_records(self, step: int) -> float | None:
        """Begin to keep records, on rank 0; returns the smoothed loss of the steps that were taken before."""
        if self._place.ranks.rank != 0:
            return None
        metrics = self._folder.metrics_file
        forget_after(metrics, step)
        smoothed_loss = smoothed(losses_of(read_metrics(metrics)))
        config = self._config
        sinks = open_sinks(self._folder.path, config.tensorboard, config.wandb, asdict(config))
        self._sinks = [Forgiving(sink, self.note) for sink in sinks]
        self._folder.keep_tokenizer(getattr(self._material.corpus.tokenizer, "path", None))
        self._folder.append_start(
            {
                "time": time.time(),
                "step": step,
                "ranks": self._place.ranks.world,
                "layout": self._layout(),
                "device": _device_name(self._place.device),
                "dtype": self._modes.dtype_name,
                "threads": torch.get_num_threads(),
                "host": socket.gethostname(),
                "platform": platform.platform(),
                "python": platform.python_version(),
                "torch": torch.__version__,
                "gradsync": __version__,
            }
        )
        return smoothed_loss

    def _announce(self) -> None:
        corpus, plan, degrees = self._material.corpus, self._material.plan, self._material.wanted.degrees
        shape = self._material.shape
        self.note(
            f"data: {corpus.name}; {corpus.train.num_tokens:,} tokens to train, {corpus.val.num_tokens:,} held back"
        )
        for line in corpus.notes:
            self.note(line)
        self.note(
            f"model: {shape.num_layers} layers, {shape.num_heads} heads, width {shape.width}, context {shape.context}; "
            f"{self._material.num_parameters:,} parameters"
        )
        if self._config.strategy != "ddp" or degrees.tensor * degrees.pipeline > 1:
            self.note(f"layout: {self._config.strategy}; {in_words(degrees, self._config.sequence_parallel)}")
        for line in remarks(self._config, self._material):
            self.note(line)
        self.note(
            f"step: {plan.tokens_per_step:,} tokens = {degrees.data} {self._word_for_replica()} x {plan.accumulation} "
            f"micro-batch(es) x {plan.micro_batch} sequences x {plan.context}; run folder {self._folder.path}"
        )

    def _layout(self) -> dict[str, Any]:
        wanted = self._material.wanted
        sequence = {"sequence_parallel": wanted.flow.cuts_sequences}
        return {"strategy": self._config.strategy, **asdict(wanted.degrees), **sequence}

    def _word_for_replica(self) -> str:
        return "rank(s)" if self._material.wanted.degrees.data == self._place.ranks.world else "replica(s)"

    def _memory_bytes(self) -> int:
        if self._place.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._place.device)
        return resident_bytes()


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
