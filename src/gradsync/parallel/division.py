"""Whether a model can be divided in some way, and in which ways it could. Plain numbers; imports no torch.

``Flow`` and ``num_stages`` are here for what checks and for what does it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from gradsync.errors import ConfigError
from gradsync.model.shape import GPT2Config
from gradsync.parallel.degrees import Degrees, PipelineSchedule, Strategy, check_strategy

INTERLEAVED_STAGES = 2
"""Stages of a rank in the interleaved schedule."""

_MOST_CHOICES = 12


@dataclass(frozen=True)
class Flow:
    """What goes through a replica in one step."""

    schedule: PipelineSchedule
    num_micro_batches: int
    micro_batch: int
    context: int
    cuts_sequences: bool = False
    """Whether ranks that share matrices divide the tokens of a sequence between those: sequence parallel."""


def num_stages(schedule: PipelineSchedule, degree: int) -> int:
    """Return the stages of the whole pipeline."""
    return degree * (INTERLEAVED_STAGES if schedule == "interleaved" else 1)


def check_division(config: GPT2Config, strategy: Strategy, degrees: Degrees, flow: Flow) -> None:
    """Check that a model can be divided in this way.

    Raises:
        ConfigError: it cannot.
    """
    check_strategy(strategy, degrees)
    if config.num_heads % degrees.tensor:
        raise ConfigError(
            f"--tp {degrees.tensor} does not divide the model's {config.num_heads} heads; take another --heads, or "
            f"another --tp"
        )
    if flow.cuts_sequences and flow.context % degrees.tensor:
        raise ConfigError(
            f"--sequence-parallel cuts each sequence into equal parts, and --tp {degrees.tensor} does not divide "
            f"--context {flow.context}; take another --context or --tp, or leave --sequence-parallel out"
        )
    if degrees.pipeline > 1:
        _check_stages(config, flow.schedule, degrees.pipeline)
        _check_micro_batches(flow, degrees.pipeline)


def choices(world: int, works: Callable[[Degrees], bool]) -> str:
    """Return the degrees that work for so many processes, as options; empty if there are none."""
    found = [
        f"--dp {world // (tensor * pipeline)} --tp {tensor} --pp {pipeline}"
        for pipeline in _divisors(world)
        for tensor in _divisors(world // pipeline)
        if works(Degrees(world // (tensor * pipeline), tensor, pipeline))
    ]
    more = f" and {len(found) - _MOST_CHOICES} more" if len(found) > _MOST_CHOICES else ""
    return "; ".join(found[:_MOST_CHOICES]) + more


def _check_stages(config: GPT2Config, schedule: PipelineSchedule, degree: int) -> None:
    stages = num_stages(schedule, degree)
    if config.num_layers < stages:
        raise ConfigError(
            f"--pp {degree} --schedule {schedule} makes {stages} stages, and the model has {config.num_layers} "
            f"layer(s); take more --layers, or another --pp"
        )


def _check_micro_batches(flow: Flow, degree: int) -> None:
    count = flow.num_micro_batches
    rounds = max(1, count // degree)
    if flow.schedule != "gpipe" and count < degree or flow.schedule == "interleaved" and count % rounds:
        need = f"a multiple of {degree}" if flow.schedule == "interleaved" else f"at least {degree}"
        raise ConfigError(
            f"--pp {degree} --schedule {flow.schedule} needs {need} micro-batches a step to keep every stage at work, "
            f"and there {'is' if count == 1 else 'are'} {count}; take a smaller --micro-batch, more --batch-tokens, or "
            f"--schedule gpipe"
        )


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]
