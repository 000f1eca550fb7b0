"""What a wrapper counts between two passes: its *window*, however many forwards and unsynchronised backwards that is.

Kept apart from the wrapper itself, since a module takes microseconds to set an attribute, and these change in every
forward.
"""

from dataclasses import dataclass


@dataclass(slots=True)
class Window:
    """Forwards since the last pass, and what the running one has still to do."""

    forwards_since_backward: int = 0
    forwards: int = 0
    has_unsynced_forward: bool = False
    is_timed: bool = False
    """Whether the running forward is one of training."""
    sends_buffers_after_forward: bool = False
    _seen_backwards: int = 0
    _seen_passes: int = 0

    def look(self, num_backwards: int, num_passes: int) -> None:
        """Begin anew where a backward or a pass has run since the last look."""
        if num_backwards != self._seen_backwards:
            self._seen_backwards = num_backwards
            self.forwards_since_backward = 0
        if num_passes != self._seen_passes:
            self._seen_passes = num_passes
            self.forwards = 0
            self.has_unsynced_forward = False

    def count_forward(self, synchronizes: bool) -> None:
        """Take note of a training forward."""
        self.forwards_since_backward += 1
        self.forwards += 1
        self.has_unsynced_forward |= not synchronizes
