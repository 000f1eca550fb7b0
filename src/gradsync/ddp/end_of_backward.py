"""Telling a reducer that the backward it takes part in is over, or that it raised.

[Note: End of backward] Only autograd knows when a backward is over, so what is due then is done by a callback
queued on it. It is queued once a pass, as early as possible: from the hook on the output it lands on the
outermost backward even when reentrant checkpoints run backwards inside. Autograd owns the callback; one
that dies without being called tells that the backward raised.

[Note: Several wrappers] Two wrapped models may share one backward, and reach it in another order on each rank.
So the first callback serves all of them, in the order of their construction, and launches everything before it
waits for anything.
"""

import weakref
from collections.abc import Callable
from typing import Protocol

import torch
from torch.autograd import Variable


class Participant(Protocol):
    """What takes part in a backward."""

    serial: int
    """Counts the participants of this process in the order of their construction."""

    def end_backward(self) -> bool:
        """Launch what is left; returns whether there is something to finish."""

    def finish_backward(self) -> None:
        """Wait for what was launched."""

    def abandon_backward(self) -> None:
        """Take note that the backward raised."""


class Attendance:
    """One participant's part in one backward; autograd holds it, and with it the participant, until the end."""

    def __init__(self, participant: Participant, task: int) -> None:
        self._participant: Participant | None = participant
        self._task = task

    def __call__(self) -> None:
        """Serve every participant of this backward, if none of the other callbacks has done so already."""
        together = sorted(_attending.pop(self._task, []), key=lambda p: p.serial)
        unfinished = [p for p in together if p.end_backward()]
        errors = [error for p in unfinished if (error := _error_of(p.finish_backward)) is not None]
        if errors:
            raise errors[0]  # only after all: the others' collectives are under way


def _error_of(step: Callable[[], None]) -> BaseException | None:
    try:
        step()
    except BaseException as error:
        return error
    return None


_attending: dict[int, list[Participant]] = {}


def attend(participant: Participant) -> "weakref.ref[Attendance]":
    """Have the participant told when the running backward is over; the reference dies with that backward."""
    task = torch._C._current_graph_task_id()
    attendance = Attendance(participant, task)
    Variable._execution_engine.queue_callback(attendance)  # type: ignore[attr-defined]
    _attending.setdefault(task, []).append(participant)
    return weakref.ref(attendance, _telling_of_the_end(participant, task))


def _telling_of_the_end(participant: Participant, task: int) -> Callable[[object], None]:
    alive = weakref.ref(participant)

    def abandoned(_: object) -> None:
        _attending.pop(task, None)
        reducer = alive()
        if reducer is not None:
            reducer.abandon_backward()

    return abandoned
