"""Which backend a process group gets, and why. Knows the machine, not the model."""

import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gradsync.comm import mpi, shm
from gradsync.errors import ConfigError, MissingExtraError


@dataclass(frozen=True)
class BackendChoice:
    """A backend's name as ``torch.distributed`` spells it, and the reason in a few words."""

    name: str
    reason: str


def choose_backend(requested: str = "auto", launcher: str | None = None) -> BackendChoice:
    """Return the backend to use: the requested one, or the fastest that this machine has.

    ``launcher`` is who has started the ranks: under ``mpiexec`` CPU ranks get MPI, if mpi4py is there.

    Raises:
        ConfigError: the requested backend is not built into this torch.
    """
    if requested == "mpi" and not dist.is_mpi_available():
        requested = mpi.NAME  # torch's wheels come without MPI
    if requested not in ("auto", None):
        _check_available(requested)
        if requested == mpi.NAME:
            mpi.register()
        if "shm" in requested:
            shm.register()
        return BackendChoice(requested, "asked for")
    if torch.cuda.is_available():
        if dist.is_nccl_available():
            return BackendChoice("nccl", f"{torch.cuda.device_count()} CUDA device(s)")
        return BackendChoice("gloo", "CUDA devices, but this torch is built without NCCL")
    if launcher == "mpiexec" and mpi.is_available() is None:
        mpi.register()
        return BackendChoice(mpi.NAME, "CPU ranks that mpiexec has started")
    if not dist.is_gloo_available():
        raise ConfigError(f"no backend for CPU tensors: this torch ({torch.__version__}) is built without gloo")
    return BackendChoice("gloo", f"CPU ranks on {sys.platform}")


def _check_available(requested: str) -> None:
    reason = shm.is_available() if "shm" in requested else None
    if reason is not None:
        raise ConfigError(f"backend 'shm' was asked for, but {reason}; use backend 'auto'")
    if requested == mpi.NAME and mpi.is_available() is not None:
        raise MissingExtraError(f"backend 'mpi' was asked for, but {mpi.is_available()}")
    probes = {"nccl": dist.is_nccl_available, "gloo": dist.is_gloo_available, "mpi": dist.is_mpi_available}
    for part in requested.split(","):
        name = part.split(":")[-1]
        probe = probes.get(name)
        if probe is not None and not probe():
            raise ConfigError(
                f"backend {name!r} was asked for, but this torch ({torch.__version__}) is built without it; "
                f"use backend 'auto'"
            )
