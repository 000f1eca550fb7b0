"""Where processes listen: the addresses of their TCP and UDP sockets, read from the kernel's tables as ``ss`` does."""

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterable
from pathlib import Path

from gradsync.comm.interfaces import interfaces

_LISTENING = "0A"
_UNCONNECTED = "07"


def free_port() -> int:
    """A port on which nobody listens just now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def own_addresses() -> list[str]:
    """Every IPv4 address of this machine."""
    return [address for each in interfaces() for address in each.addresses if ":" not in address]


def addresses(pids: Iterable[int]) -> set[tuple[str, int]]:
    """The addresses and ports on which these processes take in what comes from elsewhere, each on its own network."""
    return {address for pid in pids for address in _addresses_of(pid)}


def _addresses_of(pid: int) -> set[tuple[str, int]]:
    mine = _sockets(pid)
    found = set()
    for table, state in (("tcp", _LISTENING), ("tcp6", _LISTENING), ("udp", _UNCONNECTED), ("udp6", _UNCONNECTED)):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == state and fields[9] in mine:
                    found.add(_address(fields[1]))
    return found


def beyond_loopback(pids: Iterable[int]) -> set[tuple[str, int]]:
    """Those of the addresses that other machines can reach."""
    return {(address, port) for address, port in addresses(pids) if not _is_loopback(address)}


def _is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    return (getattr(parsed, "ipv4_mapped", None) or parsed).is_loopback


def _sockets(pid: int) -> set[str]:
    inodes = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for entry in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{entry}")
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    return inodes


def _address(text: str) -> tuple[str, int]:
    digits, _, port = text.partition(":")
    words = [bytes.fromhex(digits[start : start + 8])[::-1] for start in range(0, len(digits), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, b"".join(words)), int(port, 16)
