"""Which MPI process each rank of a group is: told through the store, before MPI is asked for anything.

MPI's own way to make a communicator waits for ever for a rank that does not come; the store has a time-out.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from mpi4py import MPI

from gradsync.comm.meeting import wait_for
from gradsync.errors import ConfigError


@dataclass(frozen=True)
class Members:
    """The MPI rank and the host of every rank of a group, in its order."""

    mpi_ranks: list[int]
    hosts: list[str]

    def num_on_this_host(self, rank: int) -> int:
        """How many ranks share the host of ``rank``."""
        return self.hosts.count(self.hosts[rank])


def meet(store: Any, rank: int, global_ranks: Sequence[int], timeout: timedelta) -> Members:
    """Tell the others who this rank is for MPI, and learn it of them.

    Raises:
        BackendError: some rank did not come in time.
        ConfigError: the ranks were not all started by one ``mpiexec``.
    """
    world = MPI.COMM_WORLD
    store.set(f"member/{rank}", json.dumps([world.Get_rank(), MPI.Get_processor_name()]))
    keys = [f"member/{peer}" for peer in range(len(global_ranks))]
    wait_for(store, keys, timeout)
    told = [json.loads(store.get(key)) for key in keys]
    members = Members([mpi_rank for mpi_rank, _ in told], [host for _, host in told])
    if world.Get_size() < len(global_ranks) or len(set(members.mpi_ranks)) < len(global_ranks):
        raise ConfigError(
            f"rank {global_ranks[rank]} is one of {len(global_ranks)} ranks of a group over MPI, but MPI knows "
            f"{world.Get_size()} process(es): all ranks have to be started by one mpiexec (of the MPI that mpi4py "
            f"was built for), such as 'mpiexec -n {len(global_ranks)} python script.py'"
        )
    return members
