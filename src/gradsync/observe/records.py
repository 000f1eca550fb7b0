"""What is known of one training step, as plain numbers: the unit of metrics, progress and reports."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step; ``step`` counts finished steps, so the first record has step 1."""

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_s: float
    val_loss: float | None = None
    accuracy: float | None = None
    accuracy_normalised: float | None = None
    mfu: float | None = None
    skipped: bool = False
    late: dict[str, Any] | None = None
    """The rank that the others wait for: ``rank``, ``phase`` and ``delay_s``."""

    def as_json(self) -> dict[str, Any]:
        """Return the object written to ``metrics.jsonl``; what does not apply is left out."""
        line: dict[str, Any] = {
            "step": self.step,
            "loss": self.loss,
            "lr": self.lr,
            "grad_norm": self.grad_norm,
            "tokens_per_s": round(self.tokens_per_s, 1),
        }
        for name in ("val_loss", "accuracy", "accuracy_normalised", "mfu", "late"):
            if getattr(self, name) is not None:
                line[name] = getattr(self, name)
        if self.skipped:
            line["skipped"] = True
        return line
