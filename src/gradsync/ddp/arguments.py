"""The constructor's arguments: which combinations mean something, checked before any collective.

Spelled and, where torch checks too, worded so that programs that match on torch's errors keep working.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradsync.ddp.settings import Reduction
from gradsync.errors import ConfigError


def check_module(module: Any) -> None:
    """Raise TypeError for something that is not an instance of ``torch.nn.Module``."""
    if isinstance(module, nn.Module):
        return
    got = f"the class {module.__name__}; make an instance of it" if isinstance(module, type) else type(module).__name__
    raise TypeError(f"DistributedDataParallel wraps a torch.nn.Module, but got {got}")


def resolve_group(process_group: Any, device_mesh: Any) -> Any:
    """Return the group whose ranks hold the replicas.

    Raises:
        ValueError: there is no process group.
        RuntimeError: both arguments were given, or the mesh has more than one axis.
    """
    is_group = process_group in (None, dist.GroupMember.NON_GROUP_MEMBER) or hasattr(process_group, "rank")
    if not is_group:
        raise TypeError(f"process_group is a torch.distributed.ProcessGroup, but got {process_group!r}")
    if device_mesh is not None and not isinstance(device_mesh, dist.device_mesh.DeviceMesh):
        raise TypeError(f"device_mesh is a torch.distributed.device_mesh.DeviceMesh, but got {device_mesh!r}")
    if process_group is not None and device_mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
        return device_mesh.get_group(mesh_dim=0)
    if process_group is None:
        if not dist.is_initialized():
            raise ValueError(
                "Default process group has not been initialized; call gradsync.init_process_group() first, "
                "or start the script with torchrun"
            )
        return dist.distributed_c10d._get_default_group()
    if process_group is dist.GroupMember.NON_GROUP_MEMBER or process_group.rank() < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is no member of the process group it was given; wrap the module only on the "
            f"ranks of the group"
        )
    return process_group


def first_problem(*checks: Callable[[], object]) -> Exception | None:
    """Return the first error that the checks raise, instead of raising it; None if there is none."""
    for check in checks:
        try:
            check()
        except (TypeError, ValueError, RuntimeError) as error:
            return error
    return None


def check_types(device_ids: Any, mixed_precision: Any, forward_sync_buffers: Any, cap_mb_list: Any) -> None:
    """Raise TypeError for arguments that are not of the kind that the constructor reads."""
    for name, value in (("device_ids", device_ids), ("bucket_cap_mb_list", cap_mb_list)):
        if value is not None and (isinstance(value, str) or not isinstance(value, Sequence)):
            raise TypeError(f"{name} is a list or None, but got {value!r}")
    if mixed_precision is not None and not hasattr(mixed_precision, "param_dtype"):
        raise TypeError(
            f"mixed_precision is a torch.nn.parallel.distributed._MixedPrecision or None, but got {mixed_precision!r}"
        )
    if not isinstance(forward_sync_buffers, bool):
        raise TypeError(
            f"forward_sync_buffers and broadcast_buffers are True, False or None, but got {forward_sync_buffers!r}"
        )


def check_delay(named_parameters: Any, trigger: Any, known: Iterable[torch.Tensor]) -> None:
    """Check the two arguments about delayed parameters; ``known`` are the parameters of the module.

    Raises:
        ValueError: only one of them was given, or a parameter is not the module's and would stay local.
    """
    if (named_parameters is None) != (trigger is None):
        raise ValueError("delay_all_reduce_named_params and param_to_hook_all_reduce need to be set at the same time.")
    identities = {id(p) for p in known}
    for name, parameter in named_parameters or ():
        if id(parameter) not in identities:
            raise ValueError(
                f"delay_all_reduce_named_params names {name!r}, which is no parameter of the module and would never be "
                f"synchronised; register it in the module, or leave it out"
            )


def check_devices(parameters: Sequence[torch.Tensor], device_ids: Sequence[Any] | None, output_device: Any) -> None:
    """Check that there is something to train, on devices that fit together.

    Raises:
        RuntimeError: no parameter requires a gradient.
        ValueError: parameters on devices of several types, or ``device_ids`` that contradict them.
    """
    if not any(p.requires_grad for p in parameters):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient: "
            "all of them are frozen, or there are none"
        )
    devices = {p.device for p in parameters}
    types = {d.type for d in devices}
    if len(types) > 1:
        raise ValueError(
            f"DistributedDataParallel's input module must be on the same type of devices, "
            f"but its parameters are on {types}."
        )
    if device_ids is not None and len(device_ids) > 1:
        raise ValueError("device_ids can only be None or contain a single element.")
    if (device_ids or output_device) and (types == {"cpu"} or len(devices) > 1):
        raise ValueError(
            "DistributedDataParallel device_ids and output_device arguments only work with "
            "single-device/multiple-device GPU modules or CPU modules, "
            f"but got device_ids {device_ids}, output_device {output_device}, and module parameters {devices}."
        )


def check_soft_limit(limit_s: float | None) -> None:
    """Raise ConfigError for a limit that is no number of seconds."""
    if limit_s is not None and (isinstance(limit_s, bool) or not isinstance(limit_s, int | float) or not limit_s >= 0):
        raise ConfigError(f"soft_limit_s is a number of seconds, or 0 for none, but got {limit_s!r}")


def check_caps(cap_mb: float | str | None, cap_mb_list: Sequence[float] | None) -> None:
    """Raise ConfigError for bucket limits that are no positive numbers."""
    if cap_mb == "auto" and cap_mb_list is None:
        return
    given = list(cap_mb_list) if cap_mb_list is not None else ([] if cap_mb is None else [cap_mb])
    for value in given:
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ConfigError(
                f"a bucket limit is a positive number of MiB, but got {value!r}; "
                "leave bucket_cap_mb out for the default, or give bucket_cap_mb='auto'"
            )
    if cap_mb_list is not None and not given:
        raise ConfigError("bucket_cap_mb_list is empty; give at least one limit in MiB, or leave it out")


def check_reduction(reduction: str) -> Reduction:
    """Return the reduction of this name, or raise ConfigError with the names there are."""
    try:
        return Reduction(reduction)
    except ValueError:
        names = ", ".join(repr(str(r)) for r in Reduction)
        raise ConfigError(f"reduction is one of {names}, but got {reduction!r}") from None


def check_interval(check_replicas_every: int | None) -> None:
    """Raise ConfigError for something that is no number of passes."""
    if check_replicas_every is not None and (not isinstance(check_replicas_every, int) or check_replicas_every < 0):
        raise ConfigError(
            f"check_replicas_every is a number of passes, 0 for never or None, but got {check_replicas_every!r}"
        )


def ignored_names(module: nn.Module) -> set[str]:
    """Return the names that ``_set_params_and_buffers_to_ignore_for_model`` has left on the module.

    They are written ``{module}.{parameter}``, so those of the root module itself may begin with a dot.
    """
    return {name.removeprefix(".") for name in getattr(module, "_ddp_params_and_buffers_to_ignore", ())}


def warn_deprecated(check_reduction: bool) -> None:
    """Warn about the argument that torch has deprecated."""
    if check_reduction:
        warnings.warn(
            "The `check_reduction` argument in `DistributedDataParallel` module is deprecated; leave it out.",
            FutureWarning,
            stacklevel=3,
        )


def resolve_buffer_sync(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> bool:
    """Return whether buffers are synchronised before a forward; warns about the deprecated spelling."""
    if broadcast_buffers is not None:
        advice = (
            "both were given, so it is ignored"
            if forward_sync_buffers is not None
            else "use `forward_sync_buffers` (either way buffers are synchronised once at construction)"
        )
        warnings.warn(f"`broadcast_buffers` is deprecated: {advice}.", FutureWarning, stacklevel=4)
    if forward_sync_buffers is not None:
        return forward_sync_buffers
    return True if broadcast_buffers is None else broadcast_buffers


def warn_lonely_group(group: Any) -> None:
    """Warn when the group has one rank but the world has more: gradients would stay local by mistake."""
    if group.size() == 1 and dist.get_world_size() > 1:
        warnings.warn(
            f"rank {dist.get_rank()}: the process group has size 1 (this rank alone) in a world of "
            f"{dist.get_world_size()}, so no gradient is synchronised; pass the group of all replicas, or none",
            UserWarning,
            stacklevel=4,
        )
