"""Evaluation mode for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class HasMode(Protocol):
    """A module, or what stands for several."""

    @property
    def training(self) -> bool:
        """Whether it is in training mode."""

    def train(self, mode: bool = True) -> object:
        """Change the mode."""


@contextmanager
def in_evaluation(model: HasMode) -> Iterator[None]:
    """Have the model in evaluation mode, and afterwards in the mode it was in."""
    was_training = model.training
    model.train(False)
    try:
        yield
    finally:
        model.train(was_training)
