"""What the options make of a run, and what can be wrong with them: found before anything is started.

One check for the command, its dry run, and every rank. Takes the number of processes and the kind of device as plain
values. Imports torch only where ``--init-from`` has to be looked into.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradsync.data.corpus import tokenizer_of
from gradsync.data.inputs import STDLIB
from gradsync.data.tokenizer import Tokenizer
from gradsync.errors import ConfigError
from gradsync.model.shape import GPT2Config
from gradsync.parallel.degrees import Degrees, resolve_degrees
from gradsync.parallel.division import Flow, check_division, choices
from gradsync.train.batch import BatchPlan, micro_batch_limit, plan_batch
from gradsync.train.config import TrainConfig


@dataclass(frozen=True)
class Outline:
    """A run before it is one: how it is divided, and the shape of its model."""

    degrees: Degrees
    plan: BatchPlan
    flow: Flow
    shape: GPT2Config


def check_files(config: TrainConfig) -> None:
    """Check that what the options name is there.

    Raises:
        ConfigError: it is not.
    """
    check_texts(config.data, config.hellaswag)
    source = config.init_from
    if source is not None and not config.resume and not Path(source).exists():  # a resumed run can do without
        raise ConfigError(f"--init-from {source} does not exist; give a run folder or a Hugging Face folder")


def check_texts(data: str | None, hellaswag: str | None) -> None:
    """Check that the texts that ``--data`` and ``--hellaswag`` name are there.

    Raises:
        ConfigError: one is not.
    """
    if data not in (None, STDLIB) and not Path(data).exists():
        raise ConfigError(f"--data {data} does not exist; give a text file, a folder, or '{STDLIB}'")
    if hellaswag is not None and not Path(hellaswag).is_file():
        raise ConfigError(f"--hellaswag {hellaswag}: there is no such file")


def check_options(config: TrainConfig, world: int, device_type: str) -> Outline:
    """Check all that one process can by itself, before anything is started; the run folder apart.

    Raises:
        ConfigError: an option cannot work, or not with the others or with so many processes.
        GradsyncError: a file that an option names is damaged, or a package is missing.
    """
    check_files(config)
    return outline(config, world, device_type, shape_of(config, tokenizer_of(config.data, config.tokenizer)))


def outline(config: TrainConfig, world: int, device_type: str, shape: GPT2Config) -> Outline:
    """Divide a model of this shape, and the steps of its training, among ``world`` processes.

    Raises:
        ConfigError: they cannot be divided in this way; the ways that work for so many processes are named.
    """

    def works(degrees: Degrees) -> bool:
        try:
            plan = plan_of(config, degrees, device_type)
            check_division(shape, config.strategy, degrees, flow_of(config, plan))
        except ConfigError:
            return False
        return True

    try:
        degrees = resolve_degrees(world, config.dp, config.tp, config.pp)
    except ConfigError as error:
        raise ConfigError(f"{error}{_alternatives(choices(world, works), world)}") from None
    plan = plan_of(config, degrees, device_type)
    flow = flow_of(config, plan)
    try:
        check_division(shape, config.strategy, degrees, flow)
    except ConfigError as error:
        raise ConfigError(f"{error}{_alternatives(choices(world, works), world)}") from None
    return Outline(degrees, plan, flow, shape)


def plan_of(config: TrainConfig, degrees: Degrees, device_type: str) -> BatchPlan:
    """Divide a step over the replicas.

    Raises:
        ConfigError: it does not divide; the nearest numbers of tokens that do are named.
    """
    limit = micro_batch_limit(config.max_micro_batch, config.context, device_type)
    return plan_batch(config.batch_tokens, config.context, degrees.data, config.micro_batch, limit, degrees.pipeline)


def flow_of(config: TrainConfig, plan: BatchPlan) -> Flow:
    """Return what goes through a replica in one step."""
    return Flow(config.schedule, plan.accumulation, plan.micro_batch, plan.context, config.sequence_parallel)


def shape_of(config: TrainConfig, tokenizer: Tokenizer) -> GPT2Config:
    """Return the shape of the model that is to be trained.

    Raises:
        ConfigError: the options give none, or not one that ``--init-from`` has.
    """
    if config.init_from is not None:
        from gradsync.train.initial import starting_shape

        return starting_shape(config, tokenizer)
    given = {"num_layers": config.layers, "num_heads": config.heads, "width": config.width}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return GPT2Config.preset(
        config.preset,
        vocab_size=tokenizer.vocab_size,
        context=config.context,
        dropout=config.dropout,
        **changes,
    )


def in_words(degrees: Degrees, cuts_sequences: bool) -> str:
    """Return what a run is divided into, for the user."""
    of = "tensors and sequences" if cuts_sequences and degrees.tensor > 1 else "tensors"
    return f"{degrees.data} replica(s) x {degrees.tensor} slice(s) of {of} x {degrees.pipeline} stage(s)"


def _alternatives(found: str, world: int) -> str:
    none = f"with {world} no degrees work for this model and this step"
    return f"; what works with {world}: {found}" if found else f"; {none}"
