"""Runs of the whole training application inside one process: tiny, silent, on a text made for it."""

import json
from pathlib import Path
from typing import Any

import torch

from gradsync.observe.progress import Course, Silent
from gradsync.train.config import TrainConfig, resolve
from gradsync.train.interrupt import StopRequests
from gradsync.train.job import Job, Place
from gradsync.train.ranks import Alone, Group, Ranks
from gradsync.train.trainer import Outcome

TINY: dict[str, Any] = {
    "steps": 6,
    "context": 16,
    "batch_tokens": 16 * 8,
    "width": 16,
    "heads": 2,
    "layers": 1,
    "eval_tokens": 256,
    "eval_every": 3,
    "checkpoint_every": 3,
    "sample_tokens": 8,
    "warmup_steps": 2,
    "tensorboard": False,
}


class Notebook(Silent):
    """Keeps what is said to the user."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.course: Course | None = None

    def begin(self, course: Course) -> None:
        self.course = course

    def note(self, message: str) -> None:
        self.notes.append(message)


def write_text(folder: Path, repeats: int = 400) -> Path:
    path = folder / "text.txt"
    path.write_text("".join(f"The {n}th line of {n * n} lines.\n" for n in range(repeats)), encoding="utf-8")
    return path


def options_for(folder: Path, **options: Any) -> TrainConfig:
    return resolve({**TINY, "run": str(folder / "run"), "data": str(folder / "text.txt"), **options})


def train(
    config: TrainConfig, ranks: Ranks | None = None, view: Silent | None = None, requests: StopRequests | None = None
) -> Outcome:
    place = Place(ranks or Alone(), torch.device("cpu"), view or Silent(), requests or StopRequests())
    return Job(config, place).run()


def train_on_rank(rank: int, world: int, config: TrainConfig) -> Outcome:
    """For the pool of ranks."""
    return train(config, Group())


def metrics(config: TrainConfig) -> list[dict[str, Any]]:
    assert config.run is not None
    lines = (Path(config.run) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def losses(config: TrainConfig) -> list[float]:
    return [record["loss"] for record in metrics(config)]
