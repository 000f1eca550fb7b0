"""What the training loop is doing: the phases of a step, one after the other, the same in every layout.

The loop says it once; whoever wants to know reads it here or, on other ranks, from the watch.
"""

from gradsync.comm.watch import note_loop

PHASES = ("data", "forward and backward", "optimizer", "evaluation", "checkpoint", "sample", "between steps")
DATA, COMPUTE, OPTIMIZER, EVALUATION, CHECKPOINT, SAMPLE, BETWEEN = PHASES


class Phases:
    """Where this rank's loop is."""

    def begin(self, phase: str, step: int) -> None:
        """A phase begins, and with it the one before has ended; ``step`` counts from 1."""
        note_loop(f"step {step}, {phase}")

    def end(self) -> None:
        """The loop is over."""
        note_loop("")
