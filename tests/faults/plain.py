"""A rank that nobody launches or ends, so that it has to see for itself that another one is gone.

A process of multiprocessing's, as of torch's ``spawn``: those see to exceptions themselves.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

import gradsync

SOFT_LIMIT_S = 2.0  # less, and ranks of a busy machine are taken for late ones
_NUM_STEPS = 4


@dataclass(frozen=True)
class Task:
    """What a rank is to do; ``kind`` says what happens to the rank that is struck, ``where`` at which point."""

    where: str
    kind: str
    struck: int
    backend: str
    way: str
    output: Path


def fail() -> None:
    raise ValueError("the injected failure")


def wait_for_a_failed_thread() -> None:
    threading.Thread(target=fail).start()
    threading.Event().wait()


def strike(kind: str) -> None:
    strikes: dict[str, Callable[[], Any]] = {
        "raise": fail,
        "raise, with a clean-up": fail,
        "raise, clean up, go on": fail,
        "thread": wait_for_a_failed_thread,
        "hang": lambda: time.sleep(600),
        "exit": lambda: os._exit(3),
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "leave": lambda: sys.exit(0),
        "destroy": lambda: (dist.destroy_process_group(), sys.exit(0)),
        "late": lambda: time.sleep(5 * SOFT_LIMIT_S),
    }
    strikes[kind]()


def start(task: Task, rank: int, port: int) -> None:
    try:
        try:
            main(task, rank, port)
        finally:
            if task.kind in ("raise, with a clean-up", "raise, clean up, go on"):
                dist.destroy_process_group()
    except ValueError:
        if task.kind != "raise, clean up, go on":
            raise
        time.sleep(600)  # the connections are open for as long as the exception keeps the model


def main(task: Task, rank: int, port: int) -> None:
    with task.output.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")

    def reach(point: str) -> None:
        if point == task.where and rank == task.struck:
            strike(task.kind)

    if task.where == "while the group is made" and rank == task.struck:
        dist.init_process_group = lambda *_, **__: strike(task.kind)
    place = {} if task.way == "env://" else {"rank": rank, "world_size": 2}
    limit = timedelta(seconds=100)
    gradsync.init_process_group(task.backend, task.way, limit, soft_limit_s=SOFT_LIMIT_S, **place)
    reach("before a group of the user's")
    if task.where == "before a group of the user's":
        dist.new_group(backend="gloo")
        dist.barrier()
    model = gradsync.DistributedDataParallel(nn.Linear(4, 4))
    if task.where == "in torch's Join":
        with Join([model]):
            reach(task.where)
    for step in range(_NUM_STEPS):
        if step == _NUM_STEPS - 1:
            reach("in the loop")
        model(torch.ones(2, 4)).sum().backward()
    print("all have come", flush=True)
