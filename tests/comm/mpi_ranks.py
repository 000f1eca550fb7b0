"""What one process of ``mpiexec`` runs in the tests of the MPI backend: jobs by name, one after the other.

The jobs of the shm backend's tests say what a process group has to do; here they get a group over MPI.
"""

import importlib
import os
import sys
import traceback
from datetime import timedelta
from typing import Any

import shm_jobs
import torch
import torch.distributed as dist

import gradsync
from gradsync.comm.process import destroy_process_group


def new_group(timeout_s: float = 90.0, ranks: list[int] | None = None) -> Any:
    """An MPI group of all ranks (or some); its memory is nobody else's."""
    group: Any = dist.new_group(ranks, backend="mpi4py", timeout=timedelta(seconds=timeout_s))
    if group is not dist.GroupMember.NON_GROUP_MEMBER:
        group.allocate = lambda numel, dtype: torch.zeros(numel, dtype=dtype)
    return group


shm_jobs.new_group = new_group


def main(jobs: list[str]) -> None:
    torch.set_num_threads(1)
    gradsync.init_process_group(os.environ.get("GRADSYNC_TEST_BACKEND", "auto"), timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    for job in jobs:
        module, _, name = job.partition(":")
        name, _, argument = name.partition("=")
        try:
            getattr(importlib.import_module(module), name)(rank, world, *([eval(argument)] if argument else []))
        except BaseException:
            print(f"--- {job} failed on rank {rank}", flush=True)
            traceback.print_exc()
            raise
        if rank == 0:
            print(f"passed {job}", flush=True)
    destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
