"""Which backend a process group gets, and why. Knows the machine, not the model."""

import os
import sys
from dataclasses import dataclass
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from gradsync.comm import mpi, shm
from gradsync.comm.interfaces import leads_to_itself
from gradsync.errors import ConfigError, MissingExtraError

OF_ANY_THREAD = ("gloo", shm.NAME, mpi.NAME)
"""Backends whose groups another thread may make: a device is one thread's."""


@dataclass(frozen=True)
class BackendChoice:
    """A backend's name as ``torch.distributed`` spells it, and the reason in a few words."""

    name: str
    reason: str


def choose_backend(
    requested: str = "auto", launcher: str | None = None, device_type: str | None = None, on_one_host: bool = False
) -> BackendChoice:
    """Return the backend to use: the requested one, or the fastest that this machine has.

    ``launcher`` is who has started the ranks: under ``mpiexec`` CPU ranks get MPI, if mpi4py is there.
    ``device_type`` is where the tensors are, by default on a GPU where there is one; ``on_one_host`` says that all
    ranks are known to run on this host.

    Raises:
        ConfigError: the requested backend is not built into this torch.
    """
    if requested not in ("auto", None):
        return _take(requested)
    if torch.cuda.is_available() and device_type != "cpu":
        if dist.is_nccl_available():
            return BackendChoice("nccl", f"{torch.cuda.device_count()} CUDA device(s)")
        return BackendChoice("gloo", "CUDA devices, but this torch is built without NCCL")
    if launcher == "mpiexec" and mpi.is_available() is None:
        mpi.register()
        return BackendChoice(mpi.NAME, "CPU ranks that mpiexec has started")
    return _choose_for_cpu(on_one_host)


def _take(requested: str) -> BackendChoice:
    if requested == "mpi" and not dist.is_mpi_available():
        requested = mpi.NAME  # torch's wheels come without MPI
    _check_available(requested)
    if requested == mpi.NAME:
        mpi.register()
    if "shm" in requested:
        shm.register()
    return BackendChoice(requested, "asked for")


def _choose_for_cpu(on_one_host: bool) -> BackendChoice:
    if not dist.is_gloo_available():
        raise ConfigError(f"no backend for CPU tensors: this torch ({torch.__version__}) is built without gloo")
    if not on_one_host:
        return BackendChoice("gloo", f"CPU ranks on {sys.platform}, not known to be on one host")
    reason = shm.is_available()
    if reason is not None:
        return BackendChoice("gloo", f"CPU ranks; not shm: {reason}")
    shm.register()
    return BackendChoice(shm.NAME, "CPU ranks on one host")


def are_on_one_host(init_method: str | None, store: object) -> bool:
    """Whether it can be told, without asking them, that all ranks run on this host: the same on every rank."""
    if store is not None:
        return leads_to_itself(getattr(store, "host", ""))
    if init_method not in (None, "env://"):
        return leads_to_itself(urlsplit(init_method).hostname or "")
    world, local_world = os.environ.get("WORLD_SIZE"), os.environ.get("LOCAL_WORLD_SIZE")
    if local_world is not None:
        return world == local_world
    return leads_to_itself(os.environ.get("MASTER_ADDR", ""))


def _check_available(requested: str) -> None:
    reason = shm.is_available() if "shm" in requested else None
    if reason is not None:
        raise ConfigError(f"backend 'shm' was asked for, but {reason}; use backend 'auto'")
    if requested == "nccl" and dist.is_nccl_available() and not torch.cuda.is_available():
        raise ConfigError("backend 'nccl' was asked for, but there is no CUDA device here; use backend 'auto'")
    if requested == mpi.NAME and mpi.is_available() is not None:
        raise MissingExtraError(f"backend 'mpi' was asked for, but {mpi.is_available()}")
    probes = {"nccl": dist.is_nccl_available, "gloo": dist.is_gloo_available, "mpi": dist.is_mpi_available}
    for part in requested.split(","):
        name = part.split(":")[-1]
        if name not in dist.Backend.backend_list and name not in (shm.NAME, mpi.NAME):
            known = ", ".join(b for b in dist.Backend.backend_list if b != dist.Backend.UNDEFINED)
            raise ConfigError(f"backend {name!r} is unknown; there are auto, {shm.NAME}, {known}")
        probe = probes.get(name)
        if probe is not None and not probe():
            raise ConfigError(
                f"backend {name!r} was asked for, but this torch ({torch.__version__}) is built without it; "
                f"use backend 'auto'"
            )
