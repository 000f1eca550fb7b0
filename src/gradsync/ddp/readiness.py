"""When the gradient of a parameter is complete, learned from the pass before.

A parameter is *ready* when its hook has fired as often as in the previous pass; one that did not fire
then is expected not to fire now. Both are guesses: a wrong one makes a contribution *late*, which costs
one more collective and never a wrong value. A parameter that was once late is not guessed about again;
its bucket waits for the end of backward.
"""

from gradsync.ddp.plan import Plan


class Readiness:
    """Counts of hook firings, of this pass and as expected from the one before."""

    def __init__(self, num_parameters: int) -> None:
        self.counts = [0] * num_parameters
        self.expected: list[int] | None = None
        self.order: list[int] = []
        self._erratic: set[int] = set()
        self._awaited: tuple[Plan, list[int]] | None = None

    @property
    def is_learned(self) -> bool:
        """Whether a whole pass has been seen since the plan was made."""
        return self.expected is not None

    def start_pass(self) -> None:
        """Forget the counts of the pass before."""
        self.counts = [0] * len(self.counts)
        self.order = []

    def num_awaited(self, plan: Plan) -> list[int]:
        """For each bucket the number of parameters that its launch waits for (one more if it must wait for the end)."""
        if self.expected is None:
            return [len(bucket.indices) + 1 for bucket in plan.buckets]
        if self._awaited is not None and self._awaited[0] is plan:
            return self._awaited[1]
        expected, erratic = self.expected, self._erratic
        awaited = [
            sum(1 for index in bucket.indices if expected[index]) + any(index in erratic for index in bucket.indices)
            for bucket in plan.buckets
        ]
        self._awaited = (plan, awaited)
        return awaited

    def learn(self, late: set[int]) -> None:
        """Take this pass as the expectation for the next one."""
        if late or self.counts != self.expected:
            self._awaited = None
        self.expected = self.counts
        self._erratic |= late

    def ready_order(self) -> list[int]:
        """Return all parameters in the order of their last firing in this pass; those that did not fire come last."""
        last_first = list(dict.fromkeys(reversed(self.order)))
        fired = list(reversed(last_first))
        silent = set(range(len(self.counts))).difference(fired)
        return fired + sorted(silent, reverse=True)
