"""How far the clocks of the ranks are apart: a ping to each of them, and back.

``time.perf_counter`` starts anywhere; on one Linux host it is the same clock for all processes, between hosts it
is not.
"""

from time import perf_counter_ns

import torch

from gradsync.comm.groups import Group
from gradsync.comm.waits import waits_of

_NUM_PINGS = 8


def clock_offset(group: Group) -> float:
    """Return the seconds to add to this rank's ``perf_counter`` to get rank 0's; collective, on a group of the CPU.

    Of several pings the quickest counts: the other clock was read in the middle of it. The error is at most half
    of the time that this one took.

    Raises:
        RankFailedError: another rank has failed or is gone.
        StalledError: some rank did not come; the message says where all ranks are.
    """
    return waits_of(group).beside(lambda: _ping_all(group))  # messages know no end of their own


def _ping_all(group: Group) -> float:
    offset_ns = 0
    for peer in range(1, group.size()):
        if group.rank() == 0:
            _answer_with_offset(group, peer)
        elif group.rank() == peer:
            offset_ns = _ask_for_offset(group)
    return offset_ns * 1e-9


def _answer_with_offset(group: Group, peer: int) -> None:
    best: tuple[int, int] | None = None
    word = torch.zeros(1, dtype=torch.int64, device="cpu")
    for _ in range(_NUM_PINGS):
        sent = perf_counter_ns()
        group.send([word], peer, 0).wait()
        group.recv([word], peer, 0).wait()
        received = perf_counter_ns()
        sample = (received - sent, (sent + received) // 2 - int(word))
        best = sample if best is None else min(best, sample)
    assert best is not None
    group.send([torch.tensor([best[1]], dtype=torch.int64, device="cpu")], peer, 0).wait()


def _ask_for_offset(group: Group) -> int:
    word = torch.zeros(1, dtype=torch.int64, device="cpu")
    for _ in range(_NUM_PINGS):
        group.recv([word], 0, 0).wait()
        word.fill_(perf_counter_ns())
        group.send([word], 0, 0).wait()
    group.recv([word], 0, 0).wait()
    return int(word)
