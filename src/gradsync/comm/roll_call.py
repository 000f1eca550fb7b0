"""The roll call before the process group: every rank says who and where it is, and learns who is missing.

A backend that cannot connect only says that it cannot. What each rank has said here is in the message then. Whatever
way torch knows for ranks to meet is taken here, too.
"""

import json
import logging
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist

from gradsync.comm.interfaces import own_address
from gradsync.comm.ledger import can_hold_ledger
from gradsync.comm.meeting import host_id
from gradsync.comm.store import is_served_by_launcher, number_of_visit, open_store
from gradsync.errors import BackendError, ConfigError

_torch: Any = dist  # for what torch's stubs leave out
_NOTE_EVERY_S = 30.0
_LAST_TO_LEAVE_S = 1.0

logger = logging.getLogger("gradsync")


@dataclass(frozen=True)
class Card:
    """What a rank says of itself."""

    host: str
    address: str
    """The address under which the others will try to reach it."""
    pid: int
    machine: str
    """Equal for the ranks of one machine."""


def own_card() -> Card:
    """Return this rank's card."""
    host = socket.gethostname()
    return Card(host, own_address(os.environ), os.getpid(), host_id() if sys.platform == "linux" else host)


@dataclass(frozen=True)
class Meeting:
    """The ranks have met: their store, who this one is, and who the others are (empty if they cannot be asked)."""

    store: Any
    rank: int
    world: int
    cards: list[Card]
    serves_store: bool
    """Whether the store ends with this process."""


def meet(init_method: str | None, store: Any, rank: int, world: int, timeout: timedelta) -> Meeting:
    """Find the others as torch's ``init_process_group`` would, and see who is there before a backend connects them.

    Raises:
        BackendError: rank 0 was not reached, or some rank did not come in time.
        ConfigError: the place to meet is none.
    """
    endpoint = None if store is not None else _endpoint(init_method, rank, world)
    where, serves_store = "the store", False
    if endpoint is not None and endpoint[1] == 0 and world > 1:
        raise ConfigError(
            f"rank {rank}: the ranks are to meet at port 0 of {endpoint[0]}, which stands for any that is free, so the "
            f"others could not know which; name one (torchrun: --master-port 29500, or --standalone)"
        )
    if endpoint is not None:
        where, serves_store = "{}:{}".format(*endpoint), rank == 0 and not is_served_by_launcher()
        try:
            store = open_store(*endpoint, rank, world, timeout)
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise BackendError(
                f"rank {rank}: the ranks could not meet: rank 0 was not reached at {where} ({error}); check that "
                f"rank 0 runs, the address, the port and the firewall"
            ) from error
    elif store is None:
        where = str(init_method)
        store, rank, world = next(_torch.rendezvous(init_method, rank, world, timeout=timeout))
        store.set_timeout(timeout)
    if rank < 0 or world < 2 or not can_hold_ledger(store):
        return Meeting(store, rank, world, [], serves_store)
    store = _torch.PrefixStore(f"gradsync/world/{number_of_visit(store, rank)}", store)
    cards = call_roll(store, rank, world, timeout, where)
    use_loopback_alone(cards)
    return Meeting(store, rank, world, cards, serves_store)


def _endpoint(init_method: str | None, rank: int, world: int) -> tuple[str, int] | None:
    """Return where rank 0 serves a store, if the way to meet says so and leaves nothing else open."""
    if init_method in (None, "env://"):
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    url = urlsplit(init_method)
    if url.scheme != "tcp" or url.hostname is None or url.port is None or url.query or rank < 0 or world < 1:
        return None
    return url.hostname, url.port


def no_connection(error: RuntimeError, cards: list[Card]) -> str:
    """Return what to say when the store was reached, but a backend could not connect the ranks."""
    addresses = f" The ranks advertise these addresses:{_lines(dict(enumerate(cards)))}\n" if cards else " "
    return (
        f"the ranks could not meet: {error}.{addresses}Each rank must be reachable at its address from all others: "
        f"check the firewall, and choose the network interface (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME) if it is the "
        f"wrong one"
    )


def call_roll(store: Any, rank: int, world: int, timeout: timedelta, where: str = "the store") -> list[Card]:
    """Return every rank's card; ``where`` is what to call the place at which they meet.

    Rank 0 is a little more patient: the store may be its own, and end with it.

    Raises:
        BackendError: some did not come in time, or two processes claim one rank; the message names them.
    """
    store = _torch.PrefixStore("roll", store)
    if store.add(f"claims/{rank}", 1) > 1:
        raise BackendError(
            f"rank {rank}: two processes claim this rank (this one is process {os.getpid()} on "
            f"{socket.gethostname()}); each needs a rank of its own, and a place to meet (here: {where}) that no other "
            f"run uses or has left behind"
        )
    store.set(f"card/{rank}", json.dumps(asdict(own_card())))
    started_s = time.monotonic()
    limit_s = timeout.total_seconds() + (_LAST_TO_LEAVE_S if rank == 0 else 0)
    while missing := _missing(store, world, rank, min(limit_s, _NOTE_EVERY_S), where):
        waited_s = time.monotonic() - started_s
        if waited_s >= limit_s:
            raise BackendError(_complaint(store, rank, world, missing, waited_s, where))
        logger.warning("still waiting for rank(s) %s after %.0f s", ", ".join(map(str, missing)), waited_s)
    return [_card(store, other) for other in range(world)]


def use_loopback_alone(cards: list[Card]) -> None:
    """Keep the backends off the network if all ranks are on this machine and nobody has chosen an interface."""
    if len({card.machine for card in cards}) > 1:
        return
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, loopback)


def _missing(store: Any, world: int, rank: int, patience_s: float, where: str) -> list[int]:
    """The ranks that have not come after this time, as far as one can tell."""
    keys = [f"card/{other}" for other in range(world)]
    try:
        store.wait(keys, timedelta(seconds=patience_s))
    except RuntimeError as error:
        try:
            return [other for other in range(world) if not store.check([keys[other]])]
        except RuntimeError:
            raise BackendError(
                f"rank {rank}: the store at {where} was lost during start-up: {error}; rank 0 or the launcher "
                f"serves it, so look at their output"
            ) from error
    return []


def _complaint(store: Any, rank: int, world: int, missing: list[int], waited_s: float, where: str) -> str:
    names = ", ".join(map(str, missing))
    here = {other: _card(store, other) for other in range(world) if other not in missing}
    return (
        f"rank {rank}: rank{'s' if len(missing) > 1 else ''} {names} of {world} did not come within {waited_s:.0f} s. "
        f"Present are{_lines(here)}\nLook at the output of the missing ranks, and check that each was started with "
        f"WORLD_SIZE={world} and reaches {where}"
    )


def _lines(cards: dict[int, Card]) -> str:
    return "".join(f"\n  rank {rank}: {card.address} ({card.host}, process {card.pid})" for rank, card in cards.items())


def _card(store: Any, rank: int) -> Card:
    return Card(**json.loads(store.get(f"card/{rank}")))
