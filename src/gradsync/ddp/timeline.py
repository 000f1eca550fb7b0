"""What was recorded of the passes: moments, taken in one line each, at a cost that can stay on.

The engine calls a ``Timeline`` at the moments that matter; it only stores numbers. Turning them into records
is in ``passes``, what they mean is in ``report``. All times are ``time.perf_counter_ns``.

[Note: Window] What is recorded belongs to the window between two passes: the optimizer's step on the result of the
last one, the time until data has come and forward begins, forward (to the begin of backward, so with the loss), and
backward until its last local gradient. Ranks leave a pass together, so the length of the window up to there is
the rank's own time, whatever it waits for afterwards; that is what stragglers are told from.

[Note: Done] When a collective is complete is looked at without blocking: at every launch and before every wait, at
next to no cost but late; or, while somebody profiles, by a callback of its future, which costs some 20
microseconds a bucket. Collectives of a GPU complete on its own clock, so there only what the host sees is known.
"""

import enum
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

_KEPT_PASSES = 32


class Phase(enum.StrEnum):
    """What a rank does in a window; see [Note: Window]."""

    OPTIMIZER = "optimizer"
    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    FINISH = "finish"
    """From the last local gradient to the end of the pass: the last launch, and waiting."""


LOCAL_PHASES = (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
"""Those that the ranks tell each other the length of."""

Telemetry = tuple[tuple[float, ...], ...]
"""Every rank's seconds in each of the ``LOCAL_PHASES``."""
Spans = list[tuple[Phase, int, int]]


@dataclass
class RawPass:
    """The moments of one pass; 0 stands for one that was not seen. Lists are by bucket."""

    number: int
    began_ns: int
    num_buckets: int
    is_exact: bool
    spans: Spans = field(default_factory=list)
    ended_ns: int = 0
    telemetry: Telemetry = ()
    ready: list[int] = field(default_factory=list)
    launched: list[int] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    wait_began: list[int] = field(default_factory=list)
    wait_ended: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("ready", "launched", "done", "wait_began", "wait_ended"):
            setattr(self, name, [0] * self.num_buckets)


class Timeline:
    """Stores the moments of the running window, and keeps the last passes."""

    def __init__(self) -> None:
        self.passes: deque[RawPass] = deque(maxlen=_KEPT_PASSES)
        self.recorded: list[RawPass] = []
        self._num_to_record = 0
        self._mark = 0
        self._spans: Spans = []
        self._backward_began = 0
        self._unsynced_ns = 0
        self._pass: RawPass | None = None
        self._works: list[Any] = []

    def record(self, num_passes: int) -> None:
        """Record the next passes exactly, and keep them in ``recorded``; 0 stops."""
        if num_passes:
            self.recorded = []
        self._num_to_record = num_passes

    # ------------------------------------------------------------- the user's loop

    def forward_begins(self) -> None:
        """A training forward begins: what went before it was waiting for data."""
        self._close_unsynced()
        now = perf_counter_ns()
        if self._mark:
            self._spans.append((Phase.DATA, self._mark, now))
        self._mark = now

    def forward_ends(self) -> None:
        """The module has returned; the loss may still be to come."""
        now = perf_counter_ns()
        self._spans.append((Phase.FORWARD, self._mark, now))
        self._mark = now

    def gradient_unsynced(self) -> None:
        """A gradient has been accumulated without synchronisation; the last one ends that backward."""
        now = perf_counter_ns()
        if not self._backward_began:
            self._begin_backward(now)
        self._unsynced_ns = now

    def optimizer_begins(self) -> None:
        """An optimizer of these parameters steps."""
        self._close_unsynced()
        self._mark = perf_counter_ns()

    def optimizer_ends(self) -> None:
        """The step is taken."""
        now = perf_counter_ns()
        self._spans.append((Phase.OPTIMIZER, self._mark, now))
        self._mark = now

    # ------------------------------------------------------------- the pass

    def pass_begins(self, number: int, num_buckets: int) -> None:
        """Backward has begun, and is to be synchronised."""
        self._close_unsynced()
        now = perf_counter_ns()
        self._begin_backward(now)
        began = self._spans[0][1] if self._spans else now
        self._works = [None] * num_buckets
        self._pass = RawPass(number, began, num_buckets, self._num_to_record > 0)

    def bucket_ready(self, number: int) -> None:
        """The last gradient that this bucket waits for has arrived."""
        assert self._pass is not None
        self._pass.ready[number] = perf_counter_ns()

    def bucket_launched(self, number: int, work: Any) -> None:
        """Its collective is under way; ``work`` is a work, a future, or None for what cannot be looked at."""
        current = self._pass
        assert current is not None
        self._look()
        current.launched[number] = perf_counter_ns()
        if work is None:
            return
        if current.is_exact:
            _when_done(work, current.done, number)
        else:
            self._works[number] = work.is_completed if hasattr(work, "is_completed") else work.done

    def local_ends(self) -> None:
        """All gradients of this rank have arrived."""
        now = perf_counter_ns()
        self._spans.append((Phase.BACKWARD, self._backward_began, now))
        self._backward_began = 0
        self._mark = now

    def wait_begins(self, number: int) -> None:
        """The rank waits for a bucket from now on."""
        assert self._pass is not None
        self._look()
        self._pass.wait_began[number] = perf_counter_ns()

    def wait_ends(self, number: int) -> None:
        """The bucket has arrived."""
        assert self._pass is not None
        self._pass.wait_ended[number] = perf_counter_ns()

    def pass_ends(self, telemetry: Telemetry) -> None:
        """The gradients are in place; ``telemetry`` is what the ranks have told of this window."""
        current = self._pass
        if current is None:
            return
        now = perf_counter_ns()
        self._spans.append((Phase.FINISH, self._mark, now))
        current.spans, current.ended_ns, current.telemetry = self._spans, now, telemetry
        self.passes.append(current)
        if current.is_exact and self._num_to_record:
            self.recorded.append(current)
            self._num_to_record -= 1
        self._start_window(now)

    def pass_is_over(self) -> None:
        """Forget the running pass, if it has not ended well."""
        if self._pass is not None:
            self._start_window(perf_counter_ns())

    def local_times(self) -> tuple[float, ...]:
        """Return the seconds of this window in each of the ``LOCAL_PHASES``; to be asked after ``local_ends``."""
        totals = dict.fromkeys(Phase, 0)
        for phase, start, end in self._spans:
            totals[phase] += end - start
        return tuple(totals[phase] * 1e-9 for phase in LOCAL_PHASES)

    # ------------------------------------------------------------- inside

    def _start_window(self, now: int) -> None:
        self._pass = None
        self._works = []
        self._spans = []
        self._mark = now
        self._backward_began = self._unsynced_ns = 0

    def _begin_backward(self, now: int) -> None:
        """What lies between a forward and its backward is the loss, and belongs to the forward."""
        if self._spans and self._spans[-1][0] is Phase.FORWARD:
            self._spans[-1] = (Phase.FORWARD, self._spans[-1][1], now)
        self._backward_began = now

    def _close_unsynced(self) -> None:
        if self._unsynced_ns:
            self._spans.append((Phase.BACKWARD, self._backward_began, self._unsynced_ns))
            self._mark = self._unsynced_ns
            self._backward_began = self._unsynced_ns = 0

    def _look(self) -> None:
        """See [Note: Done]."""
        current = self._pass
        assert current is not None
        for number, is_done in enumerate(self._works):
            if is_done is not None and is_done():
                current.done[number] = perf_counter_ns()
                self._works[number] = None


def _when_done(work: Any, moments: list[int], number: int) -> None:
    """Have the moment noted, on whatever thread, when the work is complete."""
    future = work if hasattr(work, "add_done_callback") else work.get_future()

    def note(_: Any) -> None:
        moments[number] = perf_counter_ns()

    callback: Callable[[Any], None] = note
    future.add_done_callback(callback)
