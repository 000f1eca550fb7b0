"""Who is let into a meeting of the ranks of one host."""

import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from gradsync.comm import meeting
from gradsync.comm.segment import Segment
from gradsync.errors import BackendError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="UNIX sockets with the kernel's word on who is there")


def _meet(path: Path, rank: int, outcome: dict[int, object]) -> None:
    store = dist.FileStore(str(path), 2)  # type: ignore[attr-defined]
    try:
        outcome[rank] = meeting.meet(store, rank, 2, Segment(4096), timedelta(seconds=1))
    except BackendError as error:
        outcome[rank] = error


def _both(path: Path) -> dict[int, object]:
    outcome: dict[int, object] = {}
    threads = [threading.Thread(target=_meet, args=(path, rank, outcome)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcome


def test_processes_of_one_user_meet(tmp_path: Path) -> None:
    outcome = _both(tmp_path / "store")
    assert all(isinstance(each, meeting.Meeting) for each in outcome.values())
    for each in outcome.values():
        assert isinstance(each, meeting.Meeting)
        each.close()


def test_another_users_process_is_not_let_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "user_of", lambda connection: 4_000_000)
    outcome = _both(tmp_path / "store")
    assert all(isinstance(each, BackendError) for each in outcome.values())
    assert "did not connect" in str(outcome[0])


def test_a_rank_that_cannot_come_is_not_waited_for(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 2)  # type: ignore[attr-defined]
    with (
        pytest.raises(BackendError, match="rank 1 cannot take part in a group: .*no memory"),
        meeting.telling_absence(store, 1, "rank 1"),
    ):
        raise OSError("no memory")
    for wait in (
        lambda: meeting.meet(store, 0, 2, Segment(4096), timedelta(seconds=60)),
        lambda: meeting.exchange_hosts(store, 0, 2, timedelta(seconds=60)),
    ):
        with pytest.raises(BackendError, match="the group cannot be made: rank 1 cannot take part .*no memory"):
            wait()


def test_the_word_of_a_former_group_is_taken_back(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 2)  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="now"), meeting.telling_absence(store, 1, "rank 1"):
        raise ValueError("now")

    def come_later() -> None:
        time.sleep(2 * meeting._LOOK_S)
        with meeting.telling_absence(store, 1, "rank 1"):
            store.set("host/1", "here")

    thread = threading.Thread(target=come_later)
    thread.start()
    assert meeting.exchange_hosts(store, 0, 2, timedelta(seconds=60))[1] == "here"
    thread.join()
