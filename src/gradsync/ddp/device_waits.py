"""How long a GPU's stream of computation stood still for each bucket: events, read when somebody asks.

Between the last gradient and the optimizer that stream does nothing but wait for one bucket after the other, so the
time between two events on it is what the communication of that bucket left exposed.
"""

import torch


class DeviceWaits:
    """Events of one pass: one after the last local gradient, and one after each bucket has been waited for."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """Put an event into the current stream."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append(event)

    def seconds(self) -> list[float]:
        """Return the time between each event and the next; waits for the last of them."""
        if not self._events:
            return []
        self._events[-1].synchronize()
        pairs = zip(self._events[:-1], self._events[1:], strict=True)
        return [before.elapsed_time(after) * 1e-3 for before, after in pairs]
