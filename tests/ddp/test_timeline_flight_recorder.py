"""torch's Flight Recorder sees the engine's collectives, under the name of the engine's group."""

import json
import multiprocessing
import os

import torch
import torch.distributed as dist
from torch import nn

from gradsync.ddp.module import DistributedDataParallel


def record_flights(rank, folder):
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"  # read when the first group is made
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    ddp = DistributedDataParallel(nn.Linear(200, 200))
    for _ in range(3):
        ddp(torch.ones(2, 200)).sum().backward()
    flights = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(True, False))
    (folder / f"{rank}.json").write_text(json.dumps(flights["entries"]))
    dist.destroy_process_group()


def test_flights_are_recorded(tmp_path):
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=record_flights, args=(rank, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    for rank in range(2):
        entries = json.loads((tmp_path / f"{rank}.json").read_text())
        mine = [e["profiling_name"] for e in entries if e["process_group"][1] == "gradsync engine"]
        assert mine.count("gloo:all_reduce") == 3
