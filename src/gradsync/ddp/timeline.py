"""What was recorded of the passes: moments, taken in one line each, at a cost that can stay on.

The engine calls a ``Timeline`` at the moments that matter; it only stores numbers, and never fails. Turning them into
records is in ``passes``, what they mean is in ``report``. All times are ``time.perf_counter_ns``.

[Note: Window] What is recorded belongs to the window between two passes: the optimizer's step on the result of the
last one, the time until data has come and forward begins, forward (to the begin of backward, so with the loss), and
backward until its last local gradient. Ranks leave a pass together, so the length of the window up to there is
the rank's own time, whatever it waits for afterwards; that is what stragglers are told from.

[Note: Done] When a collective is complete is looked at without blocking: at every launch and before every wait, at
next to no cost but late; or, while somebody records, by a callback of its future, which costs some 20
microseconds a bucket. On a GPU the host never waits; there events on the stream of the computation tell, while somebody
records, how long that stood still for each bucket (``device_waits``), and otherwise nothing is known.
"""

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter_ns
from typing import Any

from gradsync.ddp.device_waits import DeviceWaits

_KEPT_PASSES = 32

PHASES = ("data", "forward", "backward", "optimizer", "finish")
"""What a rank does in a window; *finish* goes from the last local gradient to the end of the pass."""
DATA, FORWARD, BACKWARD, OPTIMIZER, FINISH = range(len(PHASES))
LOCAL_PHASES = PHASES[:FINISH]
"""Those that the ranks tell each other the length of; see [Note: Window]."""

Telemetry = tuple[tuple[float, ...], ...]
"""Every rank's seconds in each of the ``LOCAL_PHASES``."""


@dataclass
class RawPass:
    """The moments of one pass; 0 stands for one that was not seen. Lists are by bucket."""

    number: int
    began_ns: int
    num_buckets: int
    is_exact: bool
    device_waits: DeviceWaits | None = None
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    """Phase, begin and end."""
    ended_ns: int = 0
    telemetry: Telemetry = ()
    ready: list[int] = field(init=False)
    launched: list[int] = field(init=False)
    done: list[int] = field(init=False)
    wait_began: list[int] = field(init=False)
    wait_ended: list[int] = field(init=False)

    def __post_init__(self) -> None:
        nothing = [0] * self.num_buckets
        self.ready, self.launched, self.done = nothing, nothing[:], nothing[:]
        self.wait_began, self.wait_ended = nothing[:], nothing[:]


class Timeline:
    """Stores the moments of the running window, and keeps the last passes.

    ``is_on_host`` says that the collectives are complete when the host has waited for them.
    """

    def __init__(self, is_on_host: bool = True) -> None:
        self.is_on_host = is_on_host
        self.has_one_stream = True
        """Whether all buckets are waited for on one device; else what a device waits for is not known."""
        self.passes: deque[RawPass] = deque(maxlen=_KEPT_PASSES)
        self.recorded: list[RawPass] = []
        self._num_to_record = 0
        self._pass: RawPass | None = None
        self._mark = 0
        """When the last phase ended."""
        self._backward_began = 0
        self._unsynced_ns = 0
        self._start_window(0)

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
            self._add(DATA, self._mark, now)
        self._mark = now

    def forward_ends(self) -> None:
        """The module has returned; the loss may still be to come."""
        now = perf_counter_ns()
        self._add(FORWARD, self._mark, now)
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
        self._add(OPTIMIZER, self._mark, now)
        self._mark = now

    # ------------------------------------------------------------- the pass

    def pass_begins(self, number: int, num_buckets: int) -> None:
        """Backward has begun, and is to be synchronised."""
        self._close_unsynced()
        now = perf_counter_ns()
        self._begin_backward(now)
        began = self._spans[0][1] if self._spans else now
        is_exact = self._num_to_record > 0
        waits = DeviceWaits() if is_exact and not self.is_on_host and self.has_one_stream else None
        self._pass = RawPass(number, began, num_buckets, is_exact, waits)

    def bucket_ready(self, number: int) -> None:
        """The last gradient that this bucket waits for has arrived."""
        if self._pass is not None:
            self._pass.ready[number] = perf_counter_ns()

    def bucket_launched(self, number: int, work: Any) -> None:
        """Its collective is under way; ``work`` is a work, a future, or something that cannot be looked at."""
        current = self._pass
        if current is None or number >= current.num_buckets:
            return
        self._look()
        current.launched[number] = perf_counter_ns()
        if not self.is_on_host:
            return
        if current.is_exact:
            _when_done(work, current.done, number)
        elif (is_done := _glance(work)) is not None:
            self._looked_at.append((number, is_done))

    def local_ends(self) -> None:
        """All gradients of this rank have arrived; only the first call in a pass counts."""
        if not self._backward_began:
            return
        now = perf_counter_ns()
        self._add(BACKWARD, self._backward_began, now)
        self._backward_began = 0
        self._mark = now
        if self._pass is not None and self._pass.device_waits is not None:
            self._pass.device_waits.mark()

    def wait_begins(self, number: int) -> None:
        """The rank waits for a bucket from now on."""
        if self._pass is not None:
            self._look()
            self._pass.wait_began[number] = perf_counter_ns()

    def wait_ends(self, number: int) -> None:
        """The bucket has arrived."""
        if self._pass is not None:
            self._pass.wait_ended[number] = now = perf_counter_ns()
            if self.is_on_host and not self._pass.done[number]:
                self._pass.done[number] = now  # the callback of a future may come a little after who waits
            if self._pass.device_waits is not None:
                self._pass.device_waits.mark()

    def pass_ends(self, telemetry: Telemetry) -> None:
        """The gradients are in place; ``telemetry`` is what the ranks have told of this window."""
        current = self._pass
        if current is None:
            return
        now = perf_counter_ns()
        self._add(FINISH, self._mark, now)
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
        data, forward, backward, optimizer, _ = self._totals
        return data * 1e-9, forward * 1e-9, backward * 1e-9, optimizer * 1e-9

    # ------------------------------------------------------------- inside

    def _start_window(self, now: int) -> None:
        self._pass = None
        self._looked_at: list[tuple[int, Any]] = []
        self._spans: list[tuple[int, int, int]] = []
        self._totals = [0] * len(PHASES)
        self._mark = now
        self._backward_began = self._unsynced_ns = 0

    def _add(self, phase: int, start: int, end: int) -> None:
        self._spans.append((phase, start, end))
        self._totals[phase] += end - start

    def _begin_backward(self, now: int) -> None:
        """What lies between a forward and its backward is the loss, and belongs to the forward."""
        if self._spans and self._spans[-1][0] == FORWARD:
            _, start, end = self._spans.pop()
            self._totals[FORWARD] -= end - start
            self._add(FORWARD, start, now)
        self._backward_began = now

    def _close_unsynced(self) -> None:
        if self._unsynced_ns:
            self._add(BACKWARD, self._backward_began, self._unsynced_ns)
            self._mark = self._unsynced_ns
            self._backward_began = self._unsynced_ns = 0

    def _look(self) -> None:
        """See [Note: Done]."""
        if not self._looked_at or self._pass is None:
            return
        under_way = []
        for number, is_done in self._looked_at:
            if is_done():
                self._pass.done[number] = perf_counter_ns()
            else:
                under_way.append((number, is_done))
        self._looked_at = under_way


def _glance(work: Any) -> Any:
    """Return a function that tells whether the work is complete and changes nothing, or None.

    A group written in Python would call a thread to its help if it were asked ``is_completed``.
    """
    if hasattr(work, "is_finished"):
        return partial(getattr, work, "is_finished")
    return getattr(work, "is_completed", None) or getattr(work, "done", None)


def _when_done(work: Any, moments: list[int], number: int) -> None:
    """Have the moment noted, on whatever thread, when the work is complete."""
    future = work if hasattr(work, "add_done_callback") else getattr(work, "get_future", lambda: None)()

    def note(_: Any) -> None:
        if not moments[number]:
            moments[number] = perf_counter_ns()

    if future is not None:
        future.add_done_callback(note)
