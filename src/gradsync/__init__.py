"""Distributed data-parallel training for PyTorch in plain Python.

Names are imported when first used, so that ``import gradsync`` and ``gradsync --help`` do not pay
for importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradsync.comm.process import init_process_group as init_process_group
    from gradsync.ddp.compression import bf16_compress_hook as bf16_compress_hook
    from gradsync.ddp.compression import fp16_compress_hook as fp16_compress_hook
    from gradsync.ddp.module import DistributedDataParallel as DistributedDataParallel
    from gradsync.ddp.replace import replace_torch_ddp as replace_torch_ddp
    from gradsync.ddp.sharded_optimizer import ZeroRedundancyOptimizer as ZeroRedundancyOptimizer
    from gradsync.ddp.sharded_state import plain_optimizer_state as plain_optimizer_state
    from gradsync.train.profiling import profile as profile

__version__ = "0.1.0"

_HOMES = {
    "DistributedDataParallel": "gradsync.ddp.module",
    "ZeroRedundancyOptimizer": "gradsync.ddp.sharded_optimizer",
    "bf16_compress_hook": "gradsync.ddp.compression",
    "fp16_compress_hook": "gradsync.ddp.compression",
    "init_process_group": "gradsync.comm.process",
    "plain_optimizer_state": "gradsync.ddp.sharded_state",
    "profile": "gradsync.train.profiling",
    "replace_torch_ddp": "gradsync.ddp.replace",
}

__all__ = [
    "DistributedDataParallel",
    "ZeroRedundancyOptimizer",
    "bf16_compress_hook",
    "fp16_compress_hook",
    "init_process_group",
    "plain_optimizer_state",
    "profile",
    "replace_torch_ddp",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'gradsync' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
