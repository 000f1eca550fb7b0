"""The record that ``_get_ddp_logging_data`` returns, with torch's keys and ways of writing values.

Tests and frameworks read it; nothing in the engine does. Times are not in it: they belong to a recorder.
"""

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from gradsync.ddp.module import DistributedDataParallel

Record = dict[str, str | int]

_ENVIRONMENT = {
    "master_addr": "MASTER_ADDR",
    "master_port": "MASTER_PORT",
    "torch_distributed_debug": "TORCH_DISTRIBUTED_DEBUG",
    "cuda_visible_devices": "CUDA_VISIBLE_DEVICES",
}
_GLOO_ENVIRONMENT = {
    "gloo_socket_ifname": "GLOO_SOCKET_IFNAME",
    "gloo_device_transport": "GLOO_DEVICE_TRANSPORT",
}
_GLOO_THREADS = 2
_NCCL_ENVIRONMENT = {
    "nccl_socket_ifname": "NCCL_SOCKET_IFNAME",
    "nccl_debug": "NCCL_DEBUG",
    "nccl_nthreads": "NCCL_NTHREADS",
    "nccl_ib_timeout": "NCCL_IB_TIMEOUT",
    "nccl_blocking_wait": "TORCH_NCCL_BLOCKING_WAIT",
    "nccl_async_error_handling": "TORCH_NCCL_ASYNC_ERROR_HANDLING",
}
_DTYPE_NAMES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.complex64: "c10::complex<float>",
    torch.complex128: "c10::complex<double>",
}


class LoggingData:
    """Keeps the few facts that nobody else keeps; torch's methods that report errors call it ``logger``."""

    def __init__(self, ddp: "DistributedDataParallel") -> None:
        self.comm_hook = ""
        self.error = ""
        self.has_joined = False
        self._first_buckets = [bucket.num_bytes for bucket in ddp.reducer.plan.buckets]

    def set_error_and_log(self, message: str) -> None:
        """Remember an error that is about to be raised."""
        self.error = message

    def record(self, ddp: "DistributedDataParallel") -> Record:
        """Return everything that is known by now."""
        found = _about_construction(ddp) | _about_groups(ddp)
        found["bucket_sizes"] = _listed(self._first_buckets)
        if ddp.reducer.num_passes:
            found |= _about_passes(ddp)
        optional: Record = {
            "comm_hook": self.comm_hook,
            "error": self.error or ddp.reducer.failure or "",
            "has_error": int(bool(self.error or ddp.reducer.failure)),
            "static_graph": int(ddp.static_graph),
            "join_uneven_inputs": int(self.has_joined),
        }
        return found | {key: value for key, value in optional.items() if value}


def _about_construction(ddp: "DistributedDataParallel") -> Record:
    specs = ddp.reducer.specs
    return {
        "module_name": type(ddp.module).__name__,
        "dtypes": ", ".join(sorted({_DTYPE_NAMES.get(s.dtype, str(s.dtype)) for s in specs})),
        "num_parameter_tensors": len(specs),
        "total_parameter_size_bytes": sum(s.num_bytes for s in specs),
        "bucket_cap_bytes": ddp.bucket_bytes_cap,
        "find_unused_parameters": int(ddp.find_unused_parameters),
        "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
        "broadcast_buffers": int(ddp.forward_sync_buffers),
        "has_sync_bn": int(any(isinstance(m, nn.SyncBatchNorm) for m in ddp.module.modules())),
        "is_multi_device_module": int(ddp.is_multi_device_module),
        "device_ids": _listed(ddp.device_ids or ()),
        "output_device": -1 if ddp.output_device is None else ddp.output_device,
        "iteration": max(ddp.reducer.num_passes - 1, 0),
    }


def _about_groups(ddp: "DistributedDataParallel") -> Record:
    backend = dist.get_backend(ddp.process_group)
    found: Record = {
        "world_size": ddp.reducer.world_size,
        "rank": ddp.reducer.rank,
        "backend_name": backend,
        **_from_environment(_ENVIRONMENT),
    }
    if backend == "gloo":
        found |= {**_from_environment(_GLOO_ENVIRONMENT), "gloo_num_threads": _GLOO_THREADS}
    if backend == "nccl":
        found |= _from_environment(_NCCL_ENVIRONMENT)
    return found


def _about_passes(ddp: "DistributedDataParallel") -> Record:
    reducer = ddp.reducer
    buckets, words = reducer.plan.buckets, reducer.last_words
    unused = [s for s, used in zip(reducer.specs, words.used, strict=True) if not used] if words is not None else []
    return {
        "has_rebuilt_buckets": int(ddp._has_rebuilt_buckets),
        "num_buckets_reduced": len(buckets),
        "rebuilt_bucket_sizes": _listed(bucket.num_bytes for bucket in buckets),
        "rebuilt_per_bucket_param_indices": ", ".join(" ".join(map(str, bucket.indices)) for bucket in buckets),
        "prev_iteration_grad_ready_order_indices": _listed(i for bucket in buckets for i in bucket.indices),
        "unused_parameter_size": sum(s.num_bytes for s in unused),
    }


def _from_environment(names: dict[str, str]) -> Record:
    return {key: os.environ.get(name, "N/A") for key, name in names.items()}


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))
