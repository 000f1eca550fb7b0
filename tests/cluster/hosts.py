"""Hosts made of network namespaces: each has a name, an address and an interface, all meet at one bridge.

Needs root and iproute2. ``hosts`` removes everything again, also after a failure: processes first, then the
namespaces, and with them the cables.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

INTERFACE = "net0"
_SOURCE = Path(__file__).parents[2] / "src"
_SETTINGS = Path("/etc/netns")


@dataclass(frozen=True)
class Host:
    """One host; ``switch`` is the namespace of the bridge at the other end of its cable."""

    name: str
    namespace: str
    address: str
    switch: str

    def command(self, *arguments: str) -> list[str]:
        """A command line that runs on this host and sees its name."""
        naming = ["unshare", "--uts", "sh", "-c", f'hostname {self.name} && exec "$@"', "sh"]
        return ["ip", "netns", "exec", self.namespace, *naming, *arguments]

    def start(self, *arguments: str, **variables: str) -> "subprocess.Popen[str]":
        """Start a program of this Python on the host."""
        environment = {name: value for name, value in os.environ.items() if not name.endswith("SOCKET_IFNAME")}
        environment |= {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "PYTHONPATH": str(_SOURCE), **variables}
        return subprocess.Popen(
            self.command(sys.executable, *arguments),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def cut(self) -> None:
        """Pull the cable out at the far end: nothing arrives any more, and nobody is told."""
        _ip("-n", self.switch, "link", "set", self.name, "down")

    def slow_down(self, rate: str) -> None:
        """Limit what leaves this host, as ``tc`` writes rates: ``100mbit``."""
        shaper = ["tbf", "rate", rate, "burst", "128kb", "latency", "50ms"]
        subprocess.run(
            ["tc", "-n", self.namespace, "qdisc", "add", "dev", INTERFACE, "root", *shaper],
            check=True,
            capture_output=True,
        )

    def kill_everything(self) -> None:
        """End all processes of the host at once, as a power cut would."""
        listed = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True).stdout
        for pid in map(int, listed.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def hosts(num_hosts: int) -> Iterator[list[Host]]:
    """Make hosts that reach each other; skips the test, with the reason, where that can't be done."""
    if os.geteuid() != 0 or any(shutil.which(tool) is None for tool in ("ip", "tc", "unshare")):
        pytest.skip("hosts made of network namespaces need root, iproute2 (ip, tc) and unshare")
    mark = uuid.uuid4().hex[:6]
    switch = f"gradsync-{mark}-switch"
    made = [Host(f"node{n}", f"gradsync-{mark}-{n}", f"10.213.9.{n + 1}", switch) for n in range(num_hosts)]
    try:
        for namespace in (switch, *(host.namespace for host in made)):
            if subprocess.run(["ip", "netns", "add", namespace], capture_output=True).returncode:
                pytest.skip("this system does not allow network namespaces")
        _connect(switch, made)
        yield made
    finally:
        for host in made:
            host.kill_everything()
            shutil.rmtree(_SETTINGS / host.namespace, ignore_errors=True)
        for namespace in (*(host.namespace for host in made), switch):
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)
        with contextlib.suppress(OSError):
            _SETTINGS.rmdir()


def outputs(processes: Sequence["subprocess.Popen[str]"], timeout_s: float) -> list[str]:
    """What each process has said by its end; a process that doesn't end in time fails the test."""
    try:
        return [process.communicate(timeout=timeout_s)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()


def _connect(switch: str, made: list[Host]) -> None:
    _ip("-n", switch, "link", "add", "bridge", "type", "bridge")
    _ip("-n", switch, "link", "set", "bridge", "up")
    names = "127.0.0.1 localhost\n" + "".join(f"{host.address} {host.name}\n" for host in made)
    for host in made:
        near = ["name", INTERFACE, "netns", host.namespace]
        _ip("link", "add", host.name, "netns", switch, "type", "veth", "peer", *near)
        _ip("-n", switch, "link", "set", host.name, "master", "bridge", "up")
        _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", INTERFACE)
        for device in ("lo", INTERFACE):
            _ip("-n", host.namespace, "link", "set", device, "up")
        folder = _SETTINGS / host.namespace  # ``ip netns exec`` shows its files in /etc
        with contextlib.suppress(FileNotFoundError):  # another process of the tests may just have tidied up
            folder.mkdir(parents=True)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text(names)


def _ip(*arguments: str) -> Any:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True)
