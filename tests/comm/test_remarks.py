"""A process without file descriptors says so, whatever the error that came of it."""

import errno
import os
import resource
from collections.abc import Iterator

import pytest

from gradsync.comm.remarks import add_remark, told


@pytest.fixture
def full() -> Iterator[int]:
    """This process can open nothing more; returns the limit."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    number = os.dup(0)
    os.close(number)
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, before[1]))
    yield number
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_an_error_for_want_of_descriptors_is_noted_once(full: int) -> None:
    error = RuntimeError("cannot resolve 127.0.0.1")
    add_remark(error)
    add_remark(error)
    remark = f"this process has all {full} files open that it may: raise the limit (ulimit -n), or close some"
    assert told(error) == f"cannot resolve 127.0.0.1 ({remark})"


def test_an_error_that_has_met_the_limit_is_noted_though_files_were_closed_since() -> None:
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE), "/proc/self/statm")
    add_remark(error)
    assert "files open that it may: raise the limit (ulimit -n)" in told(error)


def test_other_errors_are_told_as_they_are() -> None:
    error = ValueError("no such batch")
    add_remark(error)
    assert told(error) == "no such batch"
