"""Waiting for the word of all ranks: it ends when all are there, or with its limit, and says nothing meanwhile."""

from datetime import timedelta

import pytest
import torch.distributed as dist

from gradsync.comm.notices import _Notices


def test_a_wait_that_reaches_its_limit_raises_without_a_warning_of_torchs_own(capfd):
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False)
    store.set("0", "here")
    notices = _Notices(store, ["0", "1"])
    with pytest.raises(RuntimeError, match="has not come within 0.3 s"):
        notices.wait(timedelta(seconds=0.3))
    assert not notices.is_completed()
    store.set("1", "here")
    notices.wait(timedelta(seconds=0.3))
    assert notices.is_completed()
    assert capfd.readouterr().err == ""
