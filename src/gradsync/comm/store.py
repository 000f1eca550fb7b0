"""The store through which the ranks meet: listens on the interface that was chosen and nowhere else.

torch's own store listens on every interface of the machine. Here the listening socket is made first, bound to one
address, and handed to it.
"""

import logging
import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_torch: Any = dist  # for what torch's stubs leave out
_BACKLOG = 2048

logger = logging.getLogger("gradsync")


def serve_store(address: str, port: int, world: int, timeout: timedelta) -> Any:
    """Return a store served by this process at one address only; port 0 takes any free one.

    Raises:
        OSError: the address is not one of this machine's, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    number: int = listener.getsockname()[1]
    return _torch.TCPStore(
        address,
        number,
        world,
        True,
        timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listener.detach(),
    )


def open_store(host: str, port: int, rank: int, world: int, timeout: timedelta) -> Any:
    """Return the store at an address; rank 0 serves it unless the launcher does."""
    address = resolve(host)
    if rank == 0 and not is_served_by_launcher():
        try:
            return serve_store(address, port, world, timeout)
        except OSError as error:
            # An address that is translated on the way here, or a port on which this process serves already.
            logger.debug("the store cannot listen on %s:%d alone: %s", address, port, error)
            return _torch.TCPStore(address, port, world, True, timeout, wait_for_workers=False, multi_tenant=True)
    store = _torch.TCPStore(address, port, world, False, timeout, wait_for_workers=False)
    if is_served_by_launcher():  # which may start the ranks again, and keeps what the former ones have written
        store = _torch.PrefixStore(f"start/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    return store


def number_of_visit(store: Any, rank: int) -> int:
    """Return how often this rank has come to a store: it may outlive a world of ranks, and its keys too.

    Counted in the store, since the processes may have been in other worlds before, or be new ones.
    """
    return int(store.add(f"gradsync/visits/{rank}", 1))


def is_served_by_launcher() -> bool:
    """Whether the store belongs to torchrun, or to our own launcher, and outlives the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)


def resolve(host: str) -> str:
    """Return the address behind a name, of the old kind where there is one, as all ranks do; the name if unknown."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return host
    by_family = {entry[0]: str(entry[4][0]) for entry in reversed(found)}
    return by_family.get(socket.AF_INET) or by_family.get(socket.AF_INET6) or host
