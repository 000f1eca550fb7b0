"""What an error does not say of itself: that this process has run out of open files.

Libraries tell it in other words, or look for an address, a name or a module in vain.
"""

import errno
import os


def add_remark(error: BaseException) -> None:
    """Note on an exception, which its traceback shows then, that no file could be opened any more."""
    # some have been closed meanwhile, perhaps
    remark = _full() if has_met_limit(error) or not _can_open() else ""
    if remark and remark not in getattr(error, "__notes__", ()):
        error.add_note(remark)


def has_met_limit(error: BaseException) -> bool:
    """Whether an error says that too many files are open; gloo tells it in a RuntimeError."""
    return os.strerror(errno.EMFILE) in str(error)


def file_limit() -> int:
    """Return how many files this process may have open."""
    import resource  # not on every system on which this module is imported

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def told(error: BaseException) -> str:
    """Return an exception's text with what was noted on it."""
    return str(error) + "".join(f" ({note})" for note in getattr(error, "__notes__", ()))


def in_a_line(error: BaseException) -> str:
    """Return an exception's class and text, as a traceback ends."""
    text = told(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _can_open() -> bool:
    try:
        os.close(os.dup(2))
    except OSError as refusal:
        return refusal.errno != errno.EMFILE
    return True


def _full() -> str:
    return f"this process has all {file_limit()} files open that it may: raise the limit (ulimit -n), or close some"
