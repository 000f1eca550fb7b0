"""What kind of backward is running: the one question that autograd's hooks do not answer.

A hook on an output fires in ``torch.autograd.grad`` too, which asks for some gradients and accumulates
none; that is no pass. Where gradient hooks fire, the difference shows by itself; where none did, the
caller is looked up on the Python stack of the thread that started the backward.
"""

import sys
import threading
from collections.abc import Iterable, Iterator
from types import FrameType

import torch
import torch.distributed as dist

from gradsync.comm.frames import frames_of

_BACKWARD = torch.autograd.backward.__code__
_GRAD = torch.autograd.grad.__code__


def is_accumulating(forward_thread: int) -> bool:
    """Whether the innermost running backward accumulates into the ``grad`` of all leaves.

    False for ``torch.autograd.grad`` and for ``backward(inputs=...)``. ``forward_thread`` is the thread that ran
    forward, looked at when autograd calls from a thread of its own.
    """
    here = _innermost(_outwards(sys._getframe()))
    if here is None and threading.get_ident() != forward_thread:
        here = _innermost(frames_of(forward_thread))
    if here is None:
        return True
    return here.f_code is _BACKWARD and here.f_locals.get("inputs") is None


def in_distributed_autograd() -> bool:
    """Whether this thread is inside ``torch.distributed.autograd.context``, which keeps gradients to itself."""
    if not (dist.rpc.is_available() and torch._C._distributed_rpc._is_current_rpc_agent_set()):  # type: ignore[attr-defined]
        return False
    try:
        torch._C._distributed_autograd._current_context()  # type: ignore[attr-defined]
    except RuntimeError:
        return False
    return True


def _innermost(frames: Iterable[FrameType]) -> FrameType | None:
    return next((frame for frame in frames if frame.f_code in (_BACKWARD, _GRAD)), None)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
