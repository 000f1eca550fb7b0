"""What can be seen on one host without talking to another: versions, backends, devices, limits, interfaces."""

import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from gradsync import __version__
from gradsync.comm import mpi, shm
from gradsync.comm.interfaces import check_choices, chosen_interface, describe, interfaces, leads_to_itself, own_address
from gradsync.doctor.findings import Finding, note, ok, problem
from gradsync.errors import ConfigError

_OLDEST_TORCH = (2, 9)
_FILES_OF_A_PROCESS = 256  # libraries, data, logs
_FILES_OF_A_PEER = 8  # connections of a few groups, memory
_SHM_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Setting:
    """What a rank's surroundings are: its environment, and how many ranks there are."""

    environment: Mapping[str, str]
    world_size: int
    local_world_size: int

    @property
    def is_on_several_hosts(self) -> bool:
        """Whether some ranks are elsewhere: not if they meet at an address that leads nowhere else."""
        meets_here = leads_to_itself(self.environment.get("MASTER_ADDR", ""))
        return self.local_world_size < self.world_size and not meets_here


def examine_host(setting: Setting) -> list[Finding]:
    """Return what there is to say about this host."""
    return [
        *_versions(),
        *_backends(),
        *_devices(),
        *_threads(setting),
        *_files(setting),
        *_shared_memory(),
        *_interfaces(setting),
    ]


def _versions() -> list[Finding]:
    text = f"gradsync {__version__}, torch {torch.__version__}, Python {platform.python_version()}, {platform.system()}"
    number = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if number < _OLDEST_TORCH:
        wanted = ".".join(map(str, _OLDEST_TORCH))
        return [problem("versions", f"{text}: gradsync needs torch {wanted}", f"pip install 'torch>={wanted}'")]
    return [ok("versions", text)]


def _backends() -> list[Finding]:
    missing = {
        "nccl": None if dist.is_nccl_available() else "this torch is built without it",
        "gloo": None if dist.is_gloo_available() else "this torch is built without it",
        "shm": shm.is_available(),
        "mpi": mpi.is_available(),
    }
    there = [name for name, reason in missing.items() if reason is None]
    absent = "; ".join(f"no {name}: {reason}" for name, reason in missing.items() if reason is not None)
    text = f"{', '.join(there) or 'none'}{' (' + absent + ')' if absent else ''}"
    if missing["gloo"] is not None:
        return [problem("backends", text, "install a torch that has gloo; the ranks' hosts talk through it")]
    if torch.cuda.is_available() and missing["nccl"] is not None:
        return [note("backends", text, "GPUs without NCCL are slow together: install a CUDA build of torch for Linux")]
    return [ok("backends", text)]


def _devices() -> list[Finding]:
    if not torch.cuda.is_available():
        has_driver = Path("/dev/nvidiactl").exists()
        text = f"{_num_cores()} CPU cores, no CUDA device"
        if has_driver:
            remedy = "there is an NVIDIA driver: install a CUDA build of torch, and check CUDA_VISIBLE_DEVICES"
            return [note("devices", text, remedy)]
        return [ok("devices", text)]
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    text = f"{_num_cores()} CPU cores, {len(names)} CUDA device(s): {', '.join(dict.fromkeys(names))}"
    return [ok("devices", "\n".join([text, *_topology()])), *_peer_access(len(names))]


def _topology() -> list[str]:
    """The table of links between GPUs, as NVIDIA's tool draws it."""
    tool = shutil.which("nvidia-smi")
    if tool is None or torch.cuda.device_count() < 2:
        return []
    result = subprocess.run([tool, "topo", "-m"], capture_output=True, text=True, timeout=30)
    lines = [line.expandtabs(8).rstrip() for line in result.stdout.splitlines()]
    return [line for line in lines if line.startswith("GPU") or line.strip().startswith("GPU0")]


def _peer_access(count: int) -> list[Finding]:
    apart = [
        f"{one}-{other}"
        for one in range(count)
        for other in range(one + 1, count)
        if not torch.cuda.can_device_access_peer(one, other)
    ]
    if not apart:
        return []
    remedy = "their traffic goes through the host's memory; on virtual machines ask for peer access (ACS off)"
    return [note("devices", f"GPUs {', '.join(apart)} cannot read each other's memory", remedy)]


def _threads(setting: Setting) -> list[Finding]:
    cores, ranks = _num_cores(), setting.local_world_size
    given = setting.environment.get("OMP_NUM_THREADS")
    per_rank = int(given) if given and given.isdigit() else None
    if per_rank is None:
        return [ok("threads", f"OMP_NUM_THREADS is not set; a rank takes its share of {cores} cores")]
    text = f"OMP_NUM_THREADS is {per_rank}, for {ranks} rank(s) on {cores} cores"
    share = max(1, cores // ranks)
    if per_rank * ranks > cores and per_rank > 1:
        return [note("threads", f"{text}: they are in each other's way", f"set OMP_NUM_THREADS={share}")]
    if per_rank * ranks * 2 <= cores and not torch.cuda.is_available():
        return [note("threads", f"{text}: cores stay idle", f"set OMP_NUM_THREADS={share} (torchrun sets 1 by itself)")]
    return [ok("threads", text)]


def _files(setting: Setting) -> list[Finding]:
    if sys.platform == "win32":
        return []
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES_OF_A_PROCESS + _FILES_OF_A_PEER * setting.world_size
    text = f"a process may have {soft} files and connections open"
    if soft != resource.RLIM_INFINITY and soft < needed:
        remedy = f"ulimit -n {min(needed * 2, hard) if hard > 0 else needed * 2} before the start"
        return [problem("files", f"{text}; {setting.world_size} ranks need about {needed}", remedy)]
    return [ok("files", text)]


def _shared_memory() -> list[Finding]:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return []
    total = shutil.disk_usage(folder).total
    text = f"/dev/shm holds {total / 2**20:,.0f} MiB"
    if total < _SHM_BYTES:
        remedy = (
            "NCCL and workers of data loaders want more: docker run --shm-size=1g, or a memory volume in Kubernetes"
        )
        return [note("memory", text, remedy)]
    return [ok("memory", text)]


def _interfaces(setting: Setting) -> list[Finding]:
    found = interfaces()
    try:
        check_choices(setting.environment)
    except ConfigError as error:
        return [problem("interfaces", str(error), "name an interface of this host, or leave the variable out")]
    address = own_address(setting.environment)
    text = f"{socket.gethostname()} advertises {address}; it has {describe(found)}"
    if not setting.is_on_several_hosts:
        return [ok("interfaces", text)]
    if leads_to_itself(address):
        remedy = "other hosts can't reach that: GLOO_SOCKET_IFNAME=the interface that leads to them"
        return [problem("interfaces", text, remedy)]
    chosen = chosen_interface(setting.environment)
    outward = [each for each in found if each.is_up and not each.is_loopback]
    if chosen is None and len(outward) > 1:
        remedy = "if it is the wrong one, name the right one in GLOO_SOCKET_IFNAME (and NCCL_SOCKET_IFNAME)"
        return [note("interfaces", f"{text}: one of several", remedy), *_name(setting)]
    return [ok("interfaces", text), *_name(setting)]


def _name(setting: Setting) -> list[Finding]:
    """gloo advertises what the host's name resolves to, unless an interface is named."""
    if setting.environment.get("GLOO_SOCKET_IFNAME"):
        return []
    name = socket.gethostname()
    remedy = f"put {name} with its address into DNS or /etc/hosts, or set GLOO_SOCKET_IFNAME"
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return [problem("name", f"the name {name} resolves to nothing, so gloo advertises no address of it", remedy)]
    if leads_to_itself(address):
        return [problem("name", f"the name {name} resolves to {address}, which gloo would advertise", remedy)]
    return [ok("name", f"{name} resolves to {address}")]


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
