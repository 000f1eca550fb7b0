"""Faults, and the points of a training run at which they strike.

``arm`` puts a call at the named point of this process; when it has been reached often enough the fault strikes once.
"""

import os
import random
import resource
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

POINTS = [
    "before rendezvous",
    "after rendezvous",
    "data",
    "forward",
    "backward",
    "between buckets",
    "optimizer",
    "saving",
    "evaluation",
    "shutdown",
]
KINDS = ["raise", "kill", "stop", "pause", "delay", "hang", "drop", "disk", "corrupt", "descriptors", "store"]

HARMLESS = {"pause", "delay", "store"}
"""After these a run goes on as if nothing had happened."""

PAUSE_S = 0.6
HANG_S = 120.0
STRUCK = "struck"
"""A file in the rank's folder, made when the fault strikes."""

_ONCE = {"before rendezvous", "after rendezvous", "evaluation", "shutdown"}
_MOMENTS = 12
"""How often saving is reached on rank 0: the folder, the tensors, their checksums, the manifest, before and after its
name, of two checkpoints. On other ranks: tensors and checksums of three."""
_MOMENTS_OF = ((1, 3, 5, 6, 8), (1, 2, 3))


class InjectedError(Exception):
    """Raised by a fault."""


@dataclass(frozen=True)
class Fault:
    """What happens, where, on which rank, and the how many-th time that the point is reached."""

    kind: str
    point: str
    rank: int = 1
    occurrence: int = 4

    @property
    def is_possible(self) -> bool:
        """Whether the fault means anything at its point."""
        if self.kind in ("disk", "corrupt"):
            return self.point == "saving"
        if self.kind in ("drop", "store"):  # until the first step groups are made through the store
            return self.point not in ("before rendezvous", "after rendezvous", "shutdown")
        return True

    @property
    def after(self) -> int:
        """How often the point is reached before the fault strikes."""
        return 1 if self.point in _ONCE else self.occurrence

    @property
    def may_be_survived(self) -> bool:
        """Whether a run may go on: a checkpoint that cannot be written is reported, and the next one is tried.

        Where descriptors run out while a checkpoint is being written beside the training, the file that is closed then
        leaves room for the next one.
        """
        return self.kind == "descriptors" or (self.point == "saving" and self.kind in ("raise", "disk"))

    def __str__(self) -> str:
        which = f" {self.after}" if self.point == "saving" else ""
        return f"{self.kind} at {self.point}{which} on rank {self.rank}"


def all_faults(rank: int = 1) -> list[Fault]:
    """Every kind at every point where it means something; in saving at several moments."""
    return [
        fault
        for point in POINTS
        for kind in KINDS
        for occurrence in (_MOMENTS_OF[min(rank, 1)] if point == "saving" else (4,))
        if (fault := Fault(kind, point, rank, occurrence)).is_possible
    ]


def draw(chance: random.Random) -> Fault:
    """Any fault, at any moment."""
    kind, point = "", ""
    while not kind or not Fault(kind, point).is_possible:
        kind, point = chance.choice(KINDS), chance.choice(POINTS)
    return Fault(kind, point, chance.randrange(2), chance.randrange(1, 1 + (_MOMENTS if point == "saving" else 6)))


class Trap:
    """Counts how often its point is reached, and strikes."""

    def __init__(self, fault: Fault, store_pid: int | None, folder: Path) -> None:
        self._fault = fault
        self._store_pid = store_pid
        self._folder = folder
        self._left = fault.after

    def __call__(self) -> None:
        """The point was reached."""
        self._left -= 1
        if self._left == 0:
            self._strike()

    def _strike(self) -> None:
        (self._folder / STRUCK).touch()
        strikes: dict[str, Callable[[], object]] = {
            "raise": _raise,
            "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
            "pause": lambda: os.kill(os.getpid(), signal.SIGSTOP),
            "delay": lambda: time.sleep(PAUSE_S),
            "hang": lambda: time.sleep(HANG_S),
            "drop": _drop_connections,
            "disk": _fill_disk,
            "corrupt": self._corrupt,
            "descriptors": _exhaust_descriptors,
            "store": self._stop_store,
        }
        strikes[self._fault.kind]()

    def _stop_store(self) -> None:
        assert self._store_pid is not None, "whoever stops that store stops rank 0"
        os.kill(self._store_pid, signal.SIGSTOP)

    def _corrupt(self) -> None:
        """Damage every checkpoint that is complete but the oldest, then die."""
        for folder in sorted((self._folder / "run" / "checkpoints").glob("step-*"))[1:]:
            for path in folder.glob("*.distcp"):
                content = bytearray(path.read_bytes())
                content[len(content) // 2] ^= 0xFF
                path.write_bytes(content)
        os.kill(os.getpid(), signal.SIGKILL)


def _raise() -> None:
    raise InjectedError("the injected failure")


def _drop_connections() -> None:
    for entry in os.listdir("/proc/self/fd"):
        try:
            is_socket = os.readlink(f"/proc/self/fd/{entry}").startswith("socket:")
        except OSError:
            continue
        if is_socket:
            connection = socket.socket(fileno=os.dup(int(entry)))
            try:
                connection.getpeername()  # fails for one that listens, which may belong to a launcher as well
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            finally:
                connection.close()


def _fill_disk() -> None:
    """From now on no file of this process can grow; Python ignores the signal that comes of it."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))


def _exhaust_descriptors() -> None:
    number = os.dup(0)
    os.close(number)
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def arm(point: str, trap: Callable[[], None]) -> None:
    """Have ``trap`` called whenever this process reaches the point; those of start-up and end are the rank's."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    from gradsync.data.loader import GlobalBatchLoader
    from gradsync.model.gpt2 import GPT2
    from gradsync.train import checkpoint
    from gradsync.train.job import Job

    if point == "data":
        _before(GlobalBatchLoader, "next_step", trap)
    elif point == "forward":
        _before(GPT2, "forward", trap)
    elif point == "backward":
        _after_forward(GPT2, lambda model, loss: loss.register_hook(lambda grad: trap()))
    elif point == "between buckets":
        _after_forward(GPT2, _hook_in_the_middle(trap))
    elif point == "optimizer":
        begun: list[bool] = []  # a sharded optimizer steps to learn its state before there is anything to train
        _before(GlobalBatchLoader, "next_step", lambda: begun.append(True))
        register_optimizer_step_pre_hook(lambda *_: trap() if begun else None)
    elif point == "saving":
        for owner, name in (
            (checkpoint, "_make_empty"),
            (FileSystemWriter, "write_data"),
            (checkpoint.CheckpointFolder, "_describe_own"),
            (checkpoint.CheckpointFolder, "_publish"),
            (checkpoint, "_sync_folder"),
        ):
            _before(owner, name, trap)
    elif point == "evaluation":
        _before(Job, "evaluate", trap)


def _before(owner: Any, name: str, trap: Callable[[], None]) -> None:
    original = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        trap()
        return original(*args, **kwargs)

    setattr(owner, name, wrapped)


def _after_forward(owner: type, then: Callable[[Any, torch.Tensor], object]) -> None:
    original = owner.forward

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        loss = result[1] if isinstance(result, tuple) else result
        if isinstance(loss, torch.Tensor) and loss.requires_grad:
            then(self, loss)
        return result

    owner.forward = wrapped


def _hook_in_the_middle(trap: Callable[[], None]) -> Callable[[Any, torch.Tensor], None]:
    hooked = []

    def hook(model: Any, loss: torch.Tensor) -> None:
        if not hooked:
            parameters = list(model.parameters())
            parameters[len(parameters) // 2].register_hook(lambda grad: trap())
            hooked.append(model)

    return hook
