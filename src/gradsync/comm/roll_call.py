"""The roll call before the process group: every rank says who and where it is, and learns who is missing.

A backend that cannot connect only says that it cannot. What each rank has said here is in the message then.
"""

import contextlib
import itertools
import json
import logging
import os
import socket
import sys
import time
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gradsync.comm.meeting import host_id
from gradsync.comm.store import resolve
from gradsync.errors import BackendError

_torch: Any = dist  # for what torch's stubs leave out
_NOTE_EVERY_S = 30.0
_LAST_TO_LEAVE_S = 1.0
_calls = itertools.count()

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
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    host = socket.gethostname()
    address = _address_of(interface) or resolve(host)
    return Card(host, address, os.getpid(), host_id() if sys.platform == "linux" else host)


def call_roll(store: Any, rank: int, world: int, timeout: timedelta) -> list[Card]:
    """Return every rank's card. Rank 0 is a little more patient: the store may be its own, and end with it.

    Raises:
        BackendError: some did not come in time, or two processes claim one rank; the message names them.
    """
    store = _torch.PrefixStore(f"gradsync/roll/{next(_calls)}", store)
    if store.add(f"claims/{rank}", 1) > 1:
        raise BackendError(
            f"rank {rank}: two processes claim this rank (this one is process {os.getpid()} on "
            f"{socket.gethostname()}); each needs a RANK of its own, and a MASTER_PORT that no other run uses"
        )
    store.set(f"card/{rank}", json.dumps(asdict(own_card())))
    started_s = time.monotonic()
    limit_s = timeout.total_seconds() + (_LAST_TO_LEAVE_S if rank == 0 else 0)
    while missing := _missing(store, world, rank, min(limit_s, _NOTE_EVERY_S)):
        waited_s = time.monotonic() - started_s
        if waited_s >= limit_s:
            raise BackendError(_complaint(store, rank, world, missing, waited_s))
        logger.warning("still waiting for rank(s) %s after %.0f s", ", ".join(map(str, missing)), waited_s)
    return [_card(store, other) for other in range(world)]


def describe(cards: list[Card]) -> str:
    """Return who is where, in one line a rank."""
    return "".join(
        f"\n  rank {rank}: {card.address} ({card.host}, process {card.pid})" for rank, card in enumerate(cards)
    )


def use_loopback_alone(cards: list[Card]) -> None:
    """Keep the backends off the network if all ranks are on this machine and nobody has chosen an interface."""
    if len({card.machine for card in cards}) > 1:
        return
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, loopback)


def _missing(store: Any, world: int, rank: int, patience_s: float) -> list[int]:
    """The ranks that have not come after this time, as far as one can tell."""
    keys = [f"card/{other}" for other in range(world)]
    try:
        store.wait(keys, timedelta(seconds=patience_s))
    except RuntimeError as error:
        try:
            return [other for other in range(world) if not store.check([keys[other]])]
        except RuntimeError:
            raise BackendError(
                f"rank {rank}: the store at {_endpoint()} was lost during start-up: {error}; rank 0 or the launcher "
                f"serves it, so look at their output"
            ) from error
    return []


def _complaint(store: Any, rank: int, world: int, missing: list[int], waited_s: float) -> str:
    names = ", ".join(map(str, missing))
    here = "".join(
        f"\n  rank {other}: {card.address} ({card.host}, process {card.pid})"
        for other in range(world)
        if other not in missing
        for card in [_card(store, other)]
    )
    return (
        f"rank {rank}: rank{'s' if len(missing) > 1 else ''} {names} of {world} did not come within {waited_s:.0f} s. "
        f"Present are{here}\nLook at the output of the missing ranks, and check that each was started with "
        f"WORLD_SIZE={world} and reaches {_endpoint()}"
    )


def _card(store: Any, rank: int) -> Card:
    return Card(**json.loads(store.get(f"card/{rank}")))


def _endpoint() -> str:
    return f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"


def _address_of(interface: str) -> str | None:
    """The address of a network interface, where the system tells it."""
    if not interface or sys.platform != "linux":
        return None
    import fcntl

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = interface.encode()[:15].ljust(256, b"\0")
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), 0x8915, request)[20:24])  # SIOCGIFADDR
    return None
