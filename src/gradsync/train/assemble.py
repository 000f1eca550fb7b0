"""What the ranks put together of what each has built: the divided model, its optimizer, and its state. Collective."""

from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from gradsync.parallel.apply import parallelize
from gradsync.parallel.replica import Replica
from gradsync.train.build import Material
from gradsync.train.config import MAX_SEED, TrainConfig
from gradsync.train.optim import make_optimizer
from gradsync.train.state import Standing, TrainingState


@dataclass(frozen=True)
class Assembly:
    """What a rank trains."""

    replica: Replica
    optimizer: Optimizer
    state: TrainingState


def assemble(config: TrainConfig, material: Material, device: torch.device) -> Assembly:
    """Spread the model over the ranks; all of them together."""
    assert material.model is not None
    replica = parallelize(material.model, material.wanted, device)
    # The weights are the same for every rank, the dropout masks are not.
    torch.manual_seed(dropout_seed(config.seed, replica.data_rank, replica.stage, replica.sequence_slice))
    optimizer = make_optimizer(config, replica, device)
    standing = Standing(
        replica.data_rank, replica.data_world, replica.stage, replica.sequence_slice, config.strategy == "fsdp"
    )
    return Assembly(replica, optimizer, TrainingState(replica.held, optimizer, standing, device))


def dropout_seed(seed: int, data_rank: int, stage: int = 0, sequence_slice: int = 0) -> int:
    """Return the seed of the masks; ranks that hold the same activations of a replica must draw the same ones."""
    return (seed * 1_000_003 + data_rank + 1 + (stage << 40) + (sequence_slice << 52)) % (MAX_SEED + 1)


def remarks(config: TrainConfig, material: Material) -> list[str]:
    """Return what the user probably did not mean."""
    degrees = material.wanted.degrees
    found = []
    if config.warmup_steps >= config.steps:
        found.append(
            f"note: the learning rate still rises when the run ends (--warmup-steps {config.warmup_steps}, --steps "
            f"{config.steps})"
        )
    if config.nproc not in (None, degrees.world):
        found.append(
            f"warning: --nproc {config.nproc} has no effect: a launcher has started {degrees.world} process(es)"
        )
    if config.strategy != "ddp" and degrees.data == 1:
        found.append(
            f"warning: --strategy {config.strategy} divides what replicas hold alike, and there is one replica: it has "
            f"no effect (--tp {degrees.tensor} --pp {degrees.pipeline} on {degrees.world} process(es))"
        )
    if config.sequence_parallel and degrees.tensor == 1:
        found.append(
            "warning: --sequence-parallel divides what the ranks of --tp hold alike, and --tp is 1: it has no effect"
        )
    return found
