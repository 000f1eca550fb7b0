"""Distributed data-parallel training for PyTorch in plain Python.

Names are imported when first used, so that ``import gradsync`` and ``gradsync --help`` do not pay
for importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradsync.comm.process import init_process_group as init_process_group
    from gradsync.ddp.module import DistributedDataParallel as DistributedDataParallel

__version__ = "0.1.0"

_HOMES = {
    "DistributedDataParallel": "gradsync.ddp.module",
    "init_process_group": "gradsync.comm.process",
}

__all__ = ["DistributedDataParallel", "init_process_group"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'gradsync' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
