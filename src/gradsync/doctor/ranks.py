"""What every rank does for the doctor: tell what it sees of its host, measure the ways, try a group.

Every step has a time limit, and what fails becomes a finding; nothing here raises because of the network.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradsync.comm import mpi, shm
from gradsync.comm.backends import choose_backend
from gradsync.comm.interfaces import own_address
from gradsync.comm.launchers import adopt
from gradsync.comm.meeting import wait_for
from gradsync.comm.store import open_store
from gradsync.doctor.findings import Finding, Level, merged, note, ok, problem
from gradsync.doctor.host import Setting, examine_host
from gradsync.doctor.pairs import Card, Prober, Way
from gradsync.errors import GradsyncError

_torch: Any = dist  # for what torch's stubs leave out
_CLOCK_LIMIT_S = 0.5
_SLOW_BYTES_PER_S = 100e6
_SLOW_LATENCY_S = 1e-3


@dataclass(frozen=True)
class Visit:
    """What the doctor is to do on each rank."""

    timeout_s: float


@dataclass
class Diagnosis:
    """All that was found, the same on every rank that got so far."""

    findings: list[Finding] = field(default_factory=list)
    cards: list[Card] = field(default_factory=list)
    ways: list[Way] = field(default_factory=list)


def examine_rank(visit: Visit) -> Diagnosis:
    """Examine this rank and, where there are others, the ways to them; all ranks call it together."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    setting = Setting(os.environ, world, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
    own = examine_host(setting)
    try:
        store = _open_store(rank, world, visit.timeout_s)
        _answer_the_roll(store, rank, world, visit.timeout_s)
    except (RuntimeError, GradsyncError) as error:
        return Diagnosis([*own, _unmet(rank, world, error)])
    return _examine_together(store, rank, world, setting, own, visit.timeout_s)


def _examine_together(
    store: Any, rank: int, world: int, setting: Setting, own: list[Finding], timeout_s: float
) -> Diagnosis:
    address, error = _own_address(setting)
    prober = Prober(_torch.PrefixStore("ways", store), rank, world, address, timeout_s, error)
    limit = timedelta(seconds=timeout_s)
    try:
        prober.meet()
        by_rank = _exchange(store, "host", rank, world, own, limit)
        ways = prober.measure()
    except RuntimeError as lost:
        return Diagnosis([*own, _lost(world, lost)], prober.cards)
    finally:
        prober.close()
    found = [*merged(by_rank), *_alike(by_rank), *judge_ways(prober.cards, ways)]
    if not any(way.error for way in ways) and not any(card.error for card in prober.cards):
        found += _try_groups(store, rank, world, setting, limit)
    return Diagnosis(found, prober.cards, ways)


def judge_ways(cards: Sequence[Card], ways: Sequence[Way]) -> list[Finding]:
    """Return what is to be said of the ways between the ranks."""
    known = {card.error for card in cards}  # said by the rank itself already
    found = [problem("ways", way.error, _REMEDY_UNREACHED) for way in ways if way.error and way.error not in known]
    measured = [way for way in ways if not way.error]
    if measured and len(measured) == len(ways):
        found.append(ok("ways", f"the ranks reach each other ({len(measured)} pair(s) tried)"))
    slow = [way for way in measured if _is_slow(way)]
    if slow:
        names = ", ".join(f"{way.first}-{way.second}" for way in slow)
        remedy = "is it the right interface? compare with the link's rated speed; larger steps hide more of it"
        found.append(note("ways", f"slow between ranks {names} (see below)", remedy))
    apart = [way for way in measured if abs(way.clock_offset_s) > _CLOCK_LIMIT_S]
    if apart:
        worst = max(apart, key=lambda way: abs(way.clock_offset_s))
        hosts = f"{cards[worst.first].host} and {cards[worst.second].host}"
        text = f"the clocks of {hosts} are {worst.clock_offset_s:+.1f} s apart"
        found.append(note("clocks", text, "let NTP or chrony set them; logs and file times do not fit together"))
    elif measured:
        most = max(abs(way.clock_offset_s) for way in measured)
        found.append(ok("clocks", f"at most {most * 1e3:.2f} ms apart"))
    return found


def told_ways(cards: Sequence[Card], ways: Sequence[Way]) -> list[str]:
    """Return the measured ways as lines of a table."""
    lines = [f"{'ranks':<10} {'latency':>10} {'there':>12} {'back':>12} {'clock':>11}   hosts"]
    for way in ways:
        hosts = f"{cards[way.first].host} - {cards[way.second].host}"
        numbers = f"{'does not connect':>48}"
        if not way.error:
            rates = f"{_rate(way.there_bytes_per_s):>12} {_rate(way.back_bytes_per_s):>12}"
            numbers = f"{way.latency_s * 1e6:>7,.0f} us {rates} {way.clock_offset_s * 1e3:>+8.2f} ms"
        lines.append(f"{f'{way.first} - {way.second}':<10} {numbers}   {hosts}")
    return lines


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.2f} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e6:.1f} MB/s"


def _is_slow(way: Way) -> bool:
    return min(way.there_bytes_per_s, way.back_bytes_per_s) < _SLOW_BYTES_PER_S or way.latency_s > _SLOW_LATENCY_S


def _own_address(setting: Setting) -> tuple[str, str]:
    try:
        return ("127.0.0.1" if not setting.is_on_several_hosts else own_address(setting.environment)), ""
    except GradsyncError as error:
        return "", str(error)


def _open_store(rank: int, world: int, timeout_s: float) -> Any:
    if "MASTER_ADDR" not in os.environ:
        from gradsync.comm.mpi_store import store_through_mpi

        return store_through_mpi(timedelta(seconds=timeout_s))
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return open_store(address, port, rank, world, timedelta(seconds=timeout_s))


def _answer_the_roll(store: Any, rank: int, world: int, timeout_s: float) -> None:
    """Raise if some rank does not come; the store alone waits for nobody."""
    store.set(f"here/{rank}", "")
    wait_for(store, [f"here/{peer}" for peer in range(world)], timedelta(seconds=timeout_s))


def _exchange(store: Any, key: str, rank: int, world: int, own: list[Finding], limit: timedelta) -> list[list[Finding]]:
    store.set(f"{key}/{rank}", json.dumps([{**asdict(each), "level": each.level.name} for each in own]))
    keys = [f"{key}/{peer}" for peer in range(world)]
    wait_for(store, keys, limit)
    told = [json.loads(store.get(each)) for each in keys]
    return [[Finding(**{**each, "level": Level[each["level"]]}) for each in findings] for findings in told]


def _alike(by_rank: list[list[Finding]]) -> list[Finding]:
    """Different versions of torch or gradsync rarely work together."""
    versions = {finding.text for findings in by_rank for finding in findings if finding.topic == "versions"}
    if len(versions) == 1:
        return []
    return [problem("versions", "the ranks differ in versions (see above)", "install the same on every host")]


def _try_groups(store: Any, rank: int, world: int, setting: Setting, limit: timedelta) -> list[Finding]:
    device = torch.device("cpu")
    backends = {"gloo": device}
    if setting.local_world_size == setting.world_size and shm.is_available() is None:
        backends["shm"] = device
    place = adopt(os.environ)
    if place is not None and choose_backend("auto", place.launcher, "cpu").name == mpi.NAME:
        backends[mpi.NAME] = device
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    if dist.is_nccl_available() and local_rank < torch.cuda.device_count():
        backends["nccl"] = torch.device("cuda", local_rank)
    return [
        _try_group(name, _torch.PrefixStore(name, store), rank, world, where, limit) for name, where in backends.items()
    ]


def _try_group(name: str, store: Any, rank: int, world: int, device: torch.device, limit: timedelta) -> Finding:
    try:
        if name == "shm":
            shm.register()
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(name, store=store, rank=rank, world_size=world, timeout=limit)
        ones = torch.ones(1024, device=device)
        dist.all_reduce(ones)
        is_right = bool((ones == world).all())
        dist.destroy_process_group()
    except (RuntimeError, GradsyncError) as error:
        remedy = "see the findings above, and docs/clusters.md: interface, firewall"
        return problem("groups", f"{name} does not work: {str(error).splitlines()[0]}", remedy)
    if not is_right:
        return problem("groups", f"{name} computes a wrong sum", "report it, with the versions above")
    return ok("groups", f"{name} works over {world} rank(s)")


def _unmet(rank: int, world: int, error: Exception) -> Finding:
    address = os.environ.get("MASTER_ADDR")
    where = f"at {address}:{os.environ.get('MASTER_PORT')}" if address is not None else "through MPI"
    text = f"rank {rank} of {world} did not meet the others {where}: {str(error).splitlines()[0]}"
    return problem("ranks", text, "start all ranks; check MASTER_ADDR, MASTER_PORT, the interface and the firewall")


def _lost(world: int, error: Exception) -> Finding:
    text = f"not all of {world} ranks came to the examination: {str(error).splitlines()[0]}"
    return problem("ranks", text, "look at the output of the others")


_REMEDY_UNREACHED = (
    "is it the right interface (GLOO_SOCKET_IFNAME)? open the firewall between the hosts for all ports above 1024"
)
