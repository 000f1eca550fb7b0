"""What a watch sees of a rank that waits for another one, for ever."""

from dataclasses import dataclass, field

from gradsync.errors import GradsyncError


@dataclass
class EndlessWait:
    """A wait of rank 0 or 1 for the other that has lasted for ever."""

    since_s: float = 0.0
    patient_until_s: float = 0.0
    limit_s: float = 0.2
    members: tuple[int, ...] = (0, 1)
    thread: int | None = None
    is_strict: bool = True
    answer_limits: float = 0.0
    interrupted: list[GradsyncError] = field(default_factory=list)

    def patience_with(self, places: object) -> float:
        return 0.0

    def interrupt(self, error: GradsyncError) -> None:
        self.interrupted.append(error)
