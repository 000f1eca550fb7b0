"""The stack of another thread, which goes on running meanwhile.

[Note: The collector moves the stack] Python makes a frame object when somebody asks for it, and up to 3.11 that may
start a garbage collection, in which finalizers run and other threads get their turn: the thread looked at leaves the
frame for which the object was to be made, and the memory is overwritten (seen as crashes anywhere). Since 3.12
collections only begin between two instructions. So the collector is off here until all frame objects are there, and
that within one call into C, which no other thread interrupts: who turns the collector off or on elsewhere is not
disturbed.
"""

import gc
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, repeat, takewhile
from operator import call
from types import FrameType
from typing import Any

_COLLECTS_ANYWHERE = sys.version_info < (3, 12)


def frames_of(thread: int | None) -> list[FrameType]:
    """Return the frames of a thread, innermost first; none of one that has ended."""
    innermost = sys._current_frames().get(thread or 0)
    if innermost is None:
        return []
    outwards: Iterator[FrameType] = takewhile(bool, accumulate(repeat("f_back"), getattr, initial=innermost))
    if not _COLLECTS_ANYWHERE or not gc.isenabled():
        return list(outwards)
    steps: tuple[Callable[[], Any], ...] = (gc.disable, partial(list, outwards), gc.enable)
    _, frames, _ = tuple(map(call, steps))
    return frames  # type: ignore[no-any-return]
