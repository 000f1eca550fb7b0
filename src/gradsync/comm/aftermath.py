"""Which errors only tell that another rank is gone. Imports no torch: the launcher asks too."""

import re

from gradsync.errors import GradsyncError

# What torch and its backends say on the ranks that only notice that another one is gone.
_LOST_PEER_KINDS = {"DistError", "BackendError", "ReducerFailedError", "RankFailedError"}
_LOST_PEER = re.compile(r"peer|connection (closed|reset|refused)|broken pipe|gloo|nccl", re.IGNORECASE)


def is_aftermath(error: BaseException | None) -> bool:
    """Whether an exception, or one that caused it, is the echo of another rank's failure."""
    while error is not None:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        is_ours = isinstance(error, GradsyncError)
        if kinds & _LOST_PEER_KINDS or (not is_ours and _LOST_PEER.search(str(error))):
            return True
        error = error.__cause__ or error.__context__
    return False
