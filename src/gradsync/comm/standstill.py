"""Whether a thread stands still, and in which collective: seen from another thread, at no cost to the one looked at.

What it sees is the Python stack and how many operations each process group has issued; it waits for nobody and says
nothing. What follows from it is ``watch``'s part.

[Note: In a collective] torch's collectives, and our groups', wait in C++ or in ``gradsync.comm``; the innermost Python
frame is then one of a few files of theirs. A thread that is in the very same call as at the last look, while no group
has issued anything, has waited in it since then. Looks that happen to fall into the same line of two calls are told
apart by the groups' numbers.

[Note: Collectives of training] torch's ``Join`` and its SyncBatchNorm (on GPUs) issue collectives for which every rank
has to come in its next step, as for the engine's own.

[Note: On a GPU] There the host runs ahead of the collectives and waits where it reads a number of the device. That it
does is told from the line it stands in.
"""

import linecache
import os
import re
import threading
import time
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from gradsync.comm.frames import frames_of

_STACK_LINES = 6
_COMM = os.path.join(Path(__file__).parent, "")
_ENGINE = (_COMM, os.path.join(Path(__file__).parents[1], "ddp", ""))
_TORCH = os.path.join(Path(torch.__file__).parent, "")
_DISTRIBUTED = os.path.join(_TORCH, "distributed", "")
_COMPUTES = os.path.join(_DISTRIBUTED, "tensor", "")
"""DTensor's files run the local operations, too; its collectives are functional ones, in a file of theirs."""
_JOIN = os.path.join(_DISTRIBUTED, "algorithms", "join.py")
_BATCHNORM = os.path.join(_TORCH, "nn", "modules", "_functions.py")
_OPERATORS = os.path.join(_TORCH, "_ops.py")
_COMPILERS = (
    os.path.join(_TORCH, "_dynamo", "convert_frame.py"),
    os.path.join(_TORCH, "_inductor", "compile_fx.py"),
)
_INNER_NAMES = {"wrapper", "wait", "__call__"}
_DEVICE = "a call that waits for the device"
_READS_DEVICE = re.compile(r"\.(item|tolist|cpu|synchronize|numpy)\(|\b(float|int|bool)\(")


class Standstill:
    """Looks at one thread every so often; all times are ``time.monotonic``."""

    def __init__(self, thread: int | None) -> None:
        self._thread = thread
        now = time.monotonic()
        self.since_s = now
        """Since when the thread has been in the present call."""
        self.progressed_s = now
        """When it last began another thing or issued an operation, as far as was seen."""
        self.collective = ""
        """The collective that the thread has been in since ``since_s``; empty if it is elsewhere or just came."""
        self.is_of_training = False
        """See [Note: Collectives of training]."""
        self.is_compiling = False
        self._mark: Any = None
        self._call: tuple[tuple[int, int], ...] = ()

    def look(self, mark: object) -> None:
        """See what the thread does now; ``mark`` is what it says itself of what it does."""
        now = time.monotonic()
        mark = (mark, _issued())
        frames = _frames_outside(self._thread)
        call = tuple((id(frame), frame.f_lasti) for frame in frames)
        name = _collective_of(frames)
        self.is_of_training = any(frame.f_code.co_filename == _JOIN or _is_batchnorm(frame) for frame in frames)
        self.is_compiling = any(frame.f_code.co_filename in _COMPILERS for frame in frames)
        if mark != self._mark:
            self._mark, self.progressed_s = mark, now
            self.since_s, self.collective = now, ""
        elif call != self._call:
            self.since_s, self.collective = now, ""
        else:
            self.collective = name
        self._call = call


def is_in_collective(thread: int | None) -> bool:
    """Whether a thread is in some collective at this moment."""
    return bool(_collective_of(_frames_outside(thread)))


def stack_of(thread: int | None) -> tuple[str, ...]:
    """Return the last lines of a thread's stack, outermost first; the inside of torch and the engine is left out."""
    lines: list[str] = []
    for frame in frames_of(thread):
        path, number, name = frame.f_code.co_filename, _line_of(frame), frame.f_code.co_name
        is_inside = path.startswith(_ENGINE) or (path.startswith(_TORCH) and bool(lines))
        if not is_inside and not path.startswith("<frozen") and path != threading.__file__:
            source = linecache.getline(path, number).strip()
            lines.append(f"{Path(path).name}:{number} in {name}{': ' if source else ''}{source}")
        if len(lines) == _STACK_LINES:
            break
    return tuple(reversed(lines))


def _issued() -> tuple[int, ...]:
    """Return how many operations every group of this process has issued."""
    return tuple(map(_num_issued, list(dist.distributed_c10d._world.pg_map)))


def _num_issued(group: Any) -> int:
    own = getattr(group, "num_issued", None)  # of a group written in Python
    if own is not None:
        return int(own)
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:  # a backend that does not count
        return 0


def _frames_outside(thread: int | None) -> list[FrameType]:
    """Return the frames of a thread, innermost first; what is inside our own groups counts as one frame."""
    frames = frames_of(thread)
    inside = list(takewhile(lambda frame: frame.f_code.co_filename.startswith(_COMM), frames))
    return inside[-1:] + frames[len(inside) :]


def _collective_of(frames: list[FrameType]) -> str:
    """See [Note: In a collective]; the name is that of the function which a user would know, as far as there is one."""
    rest = iter(frames)
    frame = next(rest, None)
    is_ours = frame is not None and frame.f_code.co_filename.startswith(_COMM)
    while frame is not None and frame.f_code.co_filename.startswith((_COMM, _OPERATORS)):
        frame = next(rest, None)
    if frame is None or not (is_ours or _waits(frame)):
        return _DEVICE if frame is not None and _reads_device(frame) else ""
    names = []
    while frame is not None and frame.f_code.co_filename.startswith(_DISTRIBUTED):
        names.append(frame.f_code.co_name)
        frame = next(rest, None)
    return next((name for name in names if name not in _INNER_NAMES), "a collective")


def _waits(frame: FrameType) -> bool:
    path = frame.f_code.co_filename
    if _is_batchnorm(frame):
        return True  # it picks the ranks that had input, for which the device has to know them
    if path.startswith(_DISTRIBUTED):
        return not path.startswith(_COMPUTES)
    # compiled code calls the operators of functional collectives itself
    return "c10d_functional" in linecache.getline(path, _line_of(frame))


def _is_batchnorm(frame: FrameType) -> bool:
    return frame.f_code.co_filename == _BATCHNORM and frame.f_code.co_qualname.startswith("SyncBatchNorm.")


def _reads_device(frame: FrameType) -> bool:
    """See [Note: On a GPU]."""
    path = frame.f_code.co_filename
    is_on_gpu: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return is_on_gpu and bool(_READS_DEVICE.search(linecache.getline(path, _line_of(frame))))


def _line_of(frame: FrameType) -> int:
    return frame.f_lineno or frame.f_code.co_firstlineno  # None while a function is being entered
