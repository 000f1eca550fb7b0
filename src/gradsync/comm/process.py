"""Start-up and shutdown of the default process group.

Thin on purpose: torch's own ``init_process_group`` makes the group; this adds the choice of a backend and one line that
says what was chosen, and names who does not come (``roll_call``, ``starting``).
"""

import logging
import os
import signal
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from gradsync.comm import last_words, mpi
from gradsync.comm.backends import OF_ANY_THREAD, are_on_one_host, choose_backend
from gradsync.comm.interfaces import check_choices
from gradsync.comm.launchers import adopt
from gradsync.comm.parent import end_with_parent
from gradsync.comm.roll_call import Meeting, meet, no_connection
from gradsync.comm.starting import make_watched
from gradsync.comm.watches import DEFAULT_SOFT_LIMIT_S, set_soft_limit, stop_all
from gradsync.errors import BackendError, ConfigError, GradsyncError

logger = logging.getLogger("gradsync")

_LAST_LOOK_S = 1.0
_ENVIRONMENT = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


@dataclass(frozen=True)
class RankInfo:
    """Who this process is: its rank among all processes and among those of its host."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that speaks to the user."""
        return self.rank == 0


def rank_info() -> RankInfo:
    """Return this process's place in the default group, or that of a lone process without one."""
    if not dist.is_initialized():
        return RankInfo(0, 1, 0, 1)
    rank, world = dist.get_rank(), dist.get_world_size()
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    return RankInfo(rank, world, local_rank, int(os.environ.get("LOCAL_WORLD_SIZE", world)))


def init_process_group(
    backend: str | None = "auto",
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    *,
    device_type: str | None = None,
    soft_limit_s: float = DEFAULT_SOFT_LIMIT_S,
    **kwargs: Any,
) -> None:
    """Start the default process group; the arguments are those of ``torch.distributed.init_process_group``.

    ``backend="auto"`` takes NCCL where there are CUDA devices, MPI where ``mpiexec`` has started the ranks (and
    mpi4py is installed), shared memory (``shm``) for CPU ranks that are known to run on one Linux host, and gloo
    elsewhere; ``device_type="cpu"`` asks for what fits CPU tensors where there are GPUs. What was chosen is logged on
    rank 0 (logger ``gradsync``, level INFO). The place among the ranks comes from the environment as torchrun sets it,
    or from that of Slurm's ``srun`` or of ``mpiexec``. Where the ranks meet through ``MASTER_ADDR`` or ``tcp://``, the
    store listens on that address alone, and ranks that are all on one machine open no port beyond it.

    An exception that nobody catches is told to the other ranks from now on. Started by torchrun, this process gets
    SIGTERM when torchrun is gone.

    Args:
        backend: a name as torch spells it, or ``"auto"``.
        init_method: see torch.
        timeout: how long a collective may take, and how long the ranks may take to come.
        world_size: see torch.
        rank: see torch.
        store: see torch.
        device_type: of the tensors to come, where it is not the machine's best.
        soft_limit_s: how long a rank may wait for the others in the engine before all of them raise an error that says
            where each one is; 0 for no limit but the group's.
        **kwargs: see torch.

    Raises:
        ConfigError: the backend is not available, or the environment lacks what ``env://`` needs.
        BackendError: the ranks did not find each other within the time-out; those that are missing are named.
        RankFailedError: another rank has failed while the group was made, or is gone.
        StalledError: a rank that had come did not go on within the soft limit.
    """
    if not soft_limit_s >= 0:
        raise ConfigError(f"soft_limit_s is a number of seconds, or 0 for none, but got {soft_limit_s!r}")
    if store is not None and init_method is not None:
        raise ConfigError("the ranks meet by init_method or through a store, but got both; leave one out")
    check_choices(os.environ)
    # While the ranks meet there is nothing to save, and torch's C++ code, which waits for them, runs no handler.
    is_bound = "TORCHELASTIC_RUN_ID" in os.environ and end_with_parent(signal.SIGKILL, yields=True)
    is_by_environment = store is None and init_method in (None, "env://")
    place = adopt(os.environ) if is_by_environment else None
    launcher = None if place is None else place.launcher
    choice = choose_backend(backend or "auto", launcher, device_type, are_on_one_host(init_method, store))
    if launcher == "mpiexec" and "MASTER_ADDR" not in os.environ:
        store, rank = _meet_through_mpi(timeout), int(os.environ["RANK"])
        met = Meeting(store, rank, int(os.environ["WORLD_SIZE"]), [], serves_store=rank == 0)
    else:
        if is_by_environment:
            _check_environment(world_size, rank)
            rank = rank if rank >= 0 else int(os.environ["RANK"])
            world_size = world_size if world_size >= 0 else int(os.environ["WORLD_SIZE"])
        met = meet(init_method, store, rank, world_size, timeout or default_pg_timeout)
    if choice.name == "nccl" and "device_id" not in kwargs:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", max(met.rank, 0))) % torch.cuda.device_count())
    set_soft_limit(soft_limit_s)
    try:
        _make(choice.name, met, soft_limit_s, timeout, kwargs)
    finally:
        last_words.install(met.serves_store)
    if is_bound:
        end_with_parent(signal.SIGTERM)
    if dist.get_rank() == 0:
        logger.info("process group: %s, %d rank(s) (%s)", choice.name, dist.get_world_size(), choice.reason)


def _make(backend: str, met: Meeting, soft_limit_s: float, timeout: timedelta | None, options: dict[str, Any]) -> None:
    if backend == mpi.NAME:
        mpi.start()  # whoever starts it has to leave it, too

    def make() -> None:
        dist.init_process_group(
            backend, timeout=timeout, world_size=met.world, rank=met.rank, store=met.store, **options
        )

    try:
        make_watched(met.store, met.rank, met.world, soft_limit_s, backend in OF_ANY_THREAD, make)
    except dist.DistNetworkError as error:
        raise BackendError(no_connection(error, met.cards)) from error
    except GradsyncError:
        raise
    except RuntimeError as error:
        if "connect" not in str(error).lower():
            raise
        raise BackendError(no_connection(error, met.cards)) from error


def _meet_through_mpi(timeout: timedelta | None) -> Any:
    reason = mpi.is_available()
    if reason is not None:
        raise ConfigError(
            f"mpiexec has started this process, and the ranks would agree on an address through MPI, but {reason}; "
            f"or set MASTER_ADDR to the name of rank 0's host and MASTER_PORT to a free port there"
        )
    from gradsync.comm.mpi_store import store_through_mpi

    return store_through_mpi(timeout or default_pg_timeout)


def _check_environment(world_size: int, rank: int) -> None:
    given = {"WORLD_SIZE": world_size >= 0, "RANK": rank >= 0}
    missing = [name for name in _ENVIRONMENT if name not in os.environ and not given.get(name, False)]
    if missing:
        raise ConfigError(
            f"init_process_group reads {', '.join(_ENVIRONMENT)} from the environment, but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set; start the script with torchrun, set them, or pass "
            f"init_method or store"
        )


def destroy_process_group() -> None:
    """Shut the default process group down, and with it all others; harmless when there is none."""
    if dist.is_initialized():
        stop_all(_LAST_LOOK_S)
        dist.destroy_process_group()
