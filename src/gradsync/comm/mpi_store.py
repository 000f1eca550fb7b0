"""The store through which the ranks of ``mpiexec`` meet, at an address that MPI itself hands round.

So no address or port has to be chosen beforehand, whatever backend is to be used afterwards.
"""

import os
import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from gradsync.comm import mpi
from gradsync.comm.interfaces import LOOPBACK, own_address
from gradsync.errors import BackendError, GradsyncError

_torch: Any = dist  # for what torch's stubs leave out


def store_through_mpi(timeout: timedelta) -> Any:
    """Return a store that rank 0 serves; all processes of ``mpiexec`` call it together.

    It listens on the loopback device if all are on one host, and else on the address under which rank 0's host is
    reached (``GLOO_SOCKET_IFNAME`` chooses it).

    Raises:
        BackendError: rank 0 cannot listen, on every rank.
        MissingExtraError: mpi4py is not installed.
    """
    world = mpi.start().COMM_WORLD
    names = world.allgather(mpi.start().Get_processor_name())
    is_first, size = world.Get_rank() == 0, world.Get_size()
    told: Any = None
    store: Any = None
    if is_first:
        try:
            address = LOOPBACK if len(set(names)) == 1 else own_address(os.environ)
            listener = socket.create_server((address, 0))
            port = listener.getsockname()[1]
            store = _torch.TCPStore(
                address, port, size, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach()
            )
            told = (address, port)
        except (OSError, RuntimeError, GradsyncError) as error:
            told = str(error)
    told = world.bcast(told)
    if isinstance(told, str):
        raise BackendError(f"rank 0 on host {names[0]} cannot listen for the others: {told}")
    if not is_first:
        store = _torch.TCPStore(*told, size, False, timeout, wait_for_workers=False)
    return store
