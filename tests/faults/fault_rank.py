"""One rank of a run that a fault strikes: trains with the real application, and writes down how it ended."""

import contextlib
import json
import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from injector import Fault, Trap, arm

from training_jobs import options_for, train

SOFT_LIMIT_S = 3.0
START_LIMIT_S = 12.0


@dataclass(frozen=True)
class Assignment:
    """What a rank is to do."""

    folder: Path
    rank: int
    world: int
    backend: str
    port: int
    store_pid: int | None
    """The process that serves the store; None: rank 0 does."""
    fault: Fault | None
    is_resumed: bool
    options: dict[str, Any]


def config_of(folder: Path, is_resumed: bool = False, **options: Any) -> Any:
    return options_for(
        folder,
        run=str(folder / "run"),
        resume=is_resumed,
        steps=6,
        checkpoint_every=2,
        eval_every=3,
        keep_checkpoints=9,
        layers=2,
        dropout=0.1,
        sample_tokens=0,
        **options,
    )


def main(task: Assignment) -> None:
    """Train, and end the process with an exit code."""
    os.setsid()  # so that whatever this rank has started can be found
    end = _prepare(task)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(task.port), RANK=str(task.rank))
    os.environ.update(WORLD_SIZE=str(task.world), LOCAL_RANK=str(task.rank))
    if task.store_pid is not None:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    _train_to_the_end(task, end)
    os._exit(0)


def under_mpiexec(task: Assignment) -> None:
    """Train as one of the ranks that ``mpiexec`` has started, and end as such a process does."""
    task = replace(task, rank=int(os.environ["PMI_RANK"]))
    _train_to_the_end(task, _prepare(task))


def _prepare(task: Assignment) -> Callable[[BaseException], None]:
    """Have what is said kept; returns what ends the process with an error, which is written down."""
    torch.set_num_threads(1)
    pipe = os.dup(2)
    with (task.folder / f"output-{task.rank}.txt").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)

    def end(error: BaseException) -> None:
        record = {"kind": type(error).__name__, "text": str(error)}
        with contextlib.suppress(OSError):
            traceback.print_exception(error)
        try:
            (task.folder / f"outcome-{task.rank}.json").write_text(json.dumps(record))
        except OSError:  # with a full disk, or without descriptors
            os.write(pipe, json.dumps(record).encode())
        os._exit(1)

    return end


def _train_to_the_end(task: Assignment, end: Callable[[BaseException], None]) -> None:
    try:
        _train(task, end)
    except BaseException as error:  # noqa: BLE001 - written down for the test
        from gradsync.comm.last_words import tell

        tell(error)
        end(error)


def _train(task: Assignment, end: Callable[[BaseException], None]) -> None:
    import gradsync.ddp.module as module
    from gradsync.comm.process import destroy_process_group, init_process_group
    from gradsync.comm.watches import watch_of_world
    from gradsync.train.ranks import Group

    trap = None if task.fault is None else Trap(task.fault, task.store_pid, task.folder)
    point = "" if task.fault is None or task.fault.rank != task.rank else task.fault.point

    def reach(name: str) -> None:
        if trap is not None and point == name:
            trap()

    module.caps_from_mib = lambda *_: [4096.0]  # several buckets, small as the model is
    reach("before rendezvous")
    init_process_group(task.backend, timeout=timedelta(seconds=START_LIMIT_S), soft_limit_s=SOFT_LIMIT_S)
    watch = watch_of_world()
    assert watch is not None
    watch.when_stuck = end
    reach("after rendezvous")
    if trap is not None:
        arm(point, trap)
    train(config_of(task.folder, task.is_resumed, **task.options), Group())
    reach("shutdown")
    destroy_process_group()
