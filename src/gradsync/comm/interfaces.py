"""The network interfaces of this host, and the address under which other hosts reach it.

Read from the system (Linux; elsewhere only what resolving the host's name tells). Sends nothing. Pure of
torch: the doctor looks here before anything else works.
"""

import contextlib
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gradsync.errors import ConfigError

_SIOCGIFADDR = 0x8915
_CHOICES = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Interface:
    """A network interface: its name, its addresses, and whether it is up."""

    name: str
    is_up: bool
    addresses: list[str] = field(default_factory=list)

    @property
    def is_loopback(self) -> bool:
        """Whether it leads nowhere but to this host."""
        return self.name == "lo" or all(map(leads_to_itself, self.addresses))


def leads_to_itself(host: str) -> bool:
    """Whether a name or an address is, on every host, that host itself."""
    return host in ("localhost", "::1") or host.startswith("127.")


def interfaces() -> list[Interface]:
    """Return the interfaces of this host that have an address."""
    found = []
    for _, name in socket.if_nameindex():
        addresses = [*_ipv4_addresses(name), *_ipv6_addresses(name)]
        if addresses:
            found.append(Interface(name, _is_up(name), addresses))
    return found


def chosen_interface(environment: Mapping[str, str], variable: str = "GLOO_SOCKET_IFNAME") -> Interface | None:
    """Return the first interface that a variable names; None where it names none.

    Raises:
        ConfigError: there is no such interface on this host, or it has no address; the message says what there is.
    """
    text = environment.get(variable, "")
    if not text or text[0] in "^=":  # NCCL's way to exclude, and to name exactly
        return None
    known = {each.name: each for each in interfaces()}
    for name in text.split(","):
        if name not in known and not any(each.startswith(name) for each in known if variable.startswith("NCCL")):
            raise ConfigError(
                f"{variable} is {text!r}, but host {socket.gethostname()} has no interface {name!r} with an address; "
                f"it has {describe(list(known.values()))}: correct the variable on this host, or leave it out"
            )
    return known.get(text.split(",")[0])


def check_choices(environment: Mapping[str, str]) -> None:
    """Check every variable that names an interface.

    Raises:
        ConfigError: one of them names what this host doesn't have.
    """
    for variable in _CHOICES:
        chosen_interface(environment, variable)


def describe(found: list[Interface]) -> str:
    """Return interfaces and their addresses in one line."""
    return ", ".join(f"{each.name} ({each.addresses[0]})" for each in found) or "none"


def own_address(environment: Mapping[str, str]) -> str:
    """Return the address under which other hosts should reach this one.

    That of the chosen interface; else what the host's name resolves to, if that leads anywhere; else that of
    the interface through which packets leave.
    """
    chosen = chosen_interface(environment)
    if chosen is not None:
        return chosen.addresses[0]
    with contextlib.suppress(OSError):
        named = socket.gethostbyname(socket.gethostname())
        if not leads_to_itself(named) and named in {a for each in interfaces() for a in each.addresses}:
            return named
    outward = [each for each in interfaces() if each.is_up and not each.is_loopback]
    return _outgoing_address() or (outward[0].addresses[0] if outward else LOOPBACK)


def _outgoing_address() -> str | None:
    """The address that a packet to a far place would carry; connecting a datagram socket sends nothing."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        address = str(probe.getsockname()[0])
        return None if leads_to_itself(address) else address
    return None


def _ipv4_addresses(name: str) -> list[str]:
    if not sys.platform.startswith("linux"):
        return []
    import fcntl

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        return [socket.inet_ntoa(answer[20:24])]
    return []


def _ipv6_addresses(name: str) -> list[str]:
    found = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text(encoding="ascii").splitlines():
            digits, *_, owner = line.split()
            if owner == name and not digits.startswith("fe80"):
                found.append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)))
    return found


def _is_up(name: str) -> bool:
    try:
        state = Path(f"/sys/class/net/{name}/operstate").read_text(encoding="ascii").strip()
    except OSError:
        return True  # the system doesn't tell
    return state in ("up", "unknown")
