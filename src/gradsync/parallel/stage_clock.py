"""When the stages of a pipeline computed which micro-batch: torch's schedule calls them, this notes the moments.

Only where computing is over when a call returns, so on CPUs. What a stage receives has arrived before it is called, so
no waiting is in these times, but for what a tensor-parallel stage exchanges inside.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from time import perf_counter_ns
from typing import Any

_KEPT = 10_000


class StageClock:
    """The calls of this rank's stages, as name, begin and end (``time.perf_counter_ns``)."""

    def __init__(self) -> None:
        self.calls: deque[tuple[str, int, int]] = deque(maxlen=_KEPT)

    def attach(self, stage: Any, suffix: str) -> None:
        """Note the calls of one of torch's pipeline stages from now on."""
        stage.forward_one_chunk = partial(self._call, stage.forward_one_chunk, "forward", suffix)
        stage.backward_one_chunk = partial(self._call, stage.backward_one_chunk, "backward", suffix)

    def _call(self, function: Callable[..., Any], what: str, suffix: str, chunk: int, *args: Any, **kwargs: Any) -> Any:
        began = perf_counter_ns()
        try:
            return function(chunk, *args, **kwargs)
        finally:
            self.calls.append((f"{what} {chunk}{suffix}", began, perf_counter_ns()))
