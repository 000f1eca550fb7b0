"""How many ways a run is divided, checked before anything starts. Plain numbers; imports no torch."""

from dataclasses import dataclass
from typing import Literal

from gradsync.errors import ConfigError

Strategy = Literal["ddp", "zero", "fsdp"]
PipelineSchedule = Literal["1f1b", "gpipe", "interleaved"]


@dataclass(frozen=True)
class Degrees:
    """Replicas of the model, ranks that share each of its matrices, and stages that it is divided into."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1

    @property
    def world(self) -> int:
        """Ranks of the run."""
        return self.data * self.tensor * self.pipeline

    def data_rank(self, rank: int) -> int:
        """Return which sequences a rank sees; neighbours share a replica's matrices, see ``mesh``."""
        return rank // self.tensor % self.data


def resolve_degrees(world: int, data: int | None, tensor: int, pipeline: int) -> Degrees:
    """Return the degrees that multiply to ``world``; ``data=None`` takes what the others leave.

    Raises:
        ConfigError: they don't.
    """
    model = tensor * pipeline
    if world % model or data not in (None, world // model):
        given = "" if data is None else f"--dp {data} x "
        product = model if data is None else data * model
        wants = f"a multiple of {product}" if data is None else f"{product}"
        verb = "is" if world == 1 else "are"
        raise ConfigError(f"{given}--tp {tensor} x --pp {pipeline} needs {wants} processes, and there {verb} {world}")
    return Degrees(world // model, tensor, pipeline)


def check_strategy(strategy: Strategy, degrees: Degrees) -> None:
    """Check that a strategy works with these degrees.

    Raises:
        ConfigError: it doesn't; what does is named.
    """
    if strategy == "zero" and degrees.tensor * degrees.pipeline > 1:
        raise ConfigError(
            f"--strategy zero divides the optimizer of whole replicas, and with --tp {degrees.tensor} --pp "
            f"{degrees.pipeline} no rank holds a whole one; take --strategy fsdp, or --strategy ddp"
        )
