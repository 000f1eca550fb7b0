"""How the launcher and its ranks find each other: a store on the loopback interface, reachable from nowhere else.

torch's own rendezvous for one machine listens on all interfaces.
"""

from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousParameters
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry as registry
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from gradsync.comm.interfaces import LOOPBACK
from gradsync.comm.store import serve_store

NAME = "gradsync-local"
_TIMEOUT = timedelta(seconds=300)


class LocalRendezvous(RendezvousHandler):
    """One agent on one machine: nobody else is to be met."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store: Any = None
        self._round = 0

    def get_backend(self) -> str:
        """Return the name of this kind of rendezvous."""
        return NAME

    @property
    def use_agent_store(self) -> bool:
        """The ranks use the store that this process serves."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store; the ranks of each start get keys of their own."""
        if self._store is None:
            self._store = serve_store(LOOPBACK, 0, 1, _TIMEOUT)
        self._round += 1
        store = PrefixStore(f"{self._run_id}/{self._round}", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._store.port))

    def is_closed(self) -> bool:
        """A rendezvous of one is never closed."""
        return False

    def set_closed(self) -> None:
        """Do nothing."""

    def num_nodes_waiting(self) -> int:
        """Nobody waits."""
        return 0

    def get_run_id(self) -> str:
        """Return the name of the run."""
        return self._run_id

    def shutdown(self) -> bool:
        """Nothing has to be undone."""
        return True


def register() -> None:
    """Make this kind of rendezvous known to torch's launcher (again: no effect)."""
    registry.register(NAME, _create)


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    return LocalRendezvous(parameters.run_id)
