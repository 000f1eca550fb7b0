"""The MPI backend: a process group over mpi4py, for programs that ``mpiexec`` or ``srun --mpi`` has started.

torch's wheels are built without MPI; this gives it back. ``register()`` makes it known to torch.distributed as
``mpi4py`` (torch keeps the name ``mpi`` for its own). This module says what each operation asks of MPI; how one
waits for it is in ``mpi_requests``, messages are in ``mpi_messages``. mpi4py is imported when the first group is
made, since that starts MPI.
"""

import atexit
import importlib.util
import sys
import time
from typing import Any

import torch.distributed as dist

from gradsync.errors import BackendError, MissingExtraError

NAME = "mpi4py"
_HAND_ON_S = 0.1  # for mpiexec to hand on what was printed


def register() -> None:
    """Make ``mpi4py`` known to torch.distributed as a backend for CPU tensors (again: no effect)."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


def is_available() -> str | None:
    """None if mpi4py is installed, else what is missing; does not start MPI."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed: pip install 'gradsync[mpi]', and an MPI (the package mpich brings one)"
    return None


def start() -> Any:
    """Start MPI, if that has not been done, and return mpi4py's module.

    Raises:
        MissingExtraError: mpi4py is not installed.
        BackendError: there is no MPI that it could load, or MPI cannot be called from several threads.
    """
    reason = is_available()
    if reason is not None:
        raise MissingExtraError(f"MPI was asked for, but {reason}")
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise BackendError(
            f"mpi4py finds no MPI library: {error}; install one (the package mpich brings one), or name it in "
            f"MPI4PY_LIBMPI"
        ) from error
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise BackendError(
            "this MPI was started without MPI_THREAD_MULTIPLE, which a process group needs as it works beside "
            "the backward pass; leave mpi4py.rc.threads alone, or use an MPI built with support for threads"
        )
    atexit.unregister(_leave)
    atexit.register(_leave)
    return MPI


def _leave() -> None:
    """Leave MPI while this process can still run Python; if it ends badly, end all of ``mpiexec``'s processes.

    Others would wait in MPI_Finalize for what never comes. mpi4py itself leaves MPI after the interpreter's end, at a
    moment at which other threads of the process may be half gone.
    """
    from mpi4py import MPI

    from gradsync.comm.mpi_requests import has_abandoned

    if MPI.Is_finalized():
        return
    # sys.last_value: the exception that has ended the program, if one has
    if has_abandoned() or getattr(sys, "last_value", None) is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(_HAND_ON_S)
        MPI.COMM_WORLD.Abort(1)
    MPI.Finalize()


def _create(options: Any, _backend_options: Any) -> Any:
    """What torch.distributed calls to make a group."""
    start()
    from gradsync.comm.mpi_group import MpiGroup

    global_ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    return MpiGroup(options.store, options.group_rank, global_ranks, options.timeout, str(options.group_id))
