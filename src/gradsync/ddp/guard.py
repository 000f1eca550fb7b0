"""The guard against a step on gradients that were accumulated but never synchronised.

One global hook before every ``optimizer.step()`` asks the living reducers; it costs a look at a set
where nothing is amiss.
"""

import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gradsync.errors import ContractError

if TYPE_CHECKING:
    from gradsync.ddp.reducer import Reducer

_reducers: "weakref.WeakSet[Reducer]" = weakref.WeakSet()
_is_registered = False


class UnsynchronizedGradientsWarning(UserWarning):
    """An optimizer steps on gradients of this rank alone, so the replicas will drift apart."""


def watch(reducer: "Reducer") -> None:
    """Ask this reducer before every optimizer step from now on."""
    global _is_registered
    _reducers.add(reducer)
    if not _is_registered:
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(_after_step)
        _is_registered = True


def _before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    for reducer in list(_reducers):
        if _is_of(optimizer, reducer):
            reducer.timeline.optimizer_begins()
        if reducer.is_in_backward:
            _refuse(reducer, optimizer)
        elif any(reducer.touched):
            _report(reducer, optimizer)


def _after_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    for reducer in list(_reducers):
        if _is_of(optimizer, reducer):
            reducer.timeline.optimizer_ends()


def _is_of(optimizer: torch.optim.Optimizer, reducer: "Reducer") -> bool:
    """Whether the optimizer's first parameter is one of the reducer's."""
    groups = optimizer.param_groups
    return bool(groups and groups[0]["params"]) and id(groups[0]["params"][0]) in reducer.parameter_ids


def _refuse(reducer: "Reducer", optimizer: torch.optim.Optimizer) -> None:
    names = _stepped(reducer, optimizer, reducer.holding_gradients())
    if names:
        raise ContractError(
            f"rank {reducer.rank}: optimizer.step() in the middle of backward, on a gradient that is not "
            f"synchronised yet: {_some(names)}; step after backward, or use "
            f"torch.distributed.optim._apply_optimizer_in_backward, which gradsync runs on the synchronised gradients"
        )


def _report(reducer: "Reducer", optimizer: torch.optim.Optimizer) -> None:
    names = _stepped(reducer, optimizer, reducer.unsynchronized())
    if names:
        warnings.warn(
            f"rank {reducer.rank}: optimizer.step() on gradients that were accumulated but never synchronised: "
            f"{_some(names)}; the replicas will differ. Leave no_sync() for the last backward before the step, "
            f"or call sync_gradients()",
            UnsynchronizedGradientsWarning,
            stacklevel=4,
        )


def _stepped(reducer: "Reducer", optimizer: torch.optim.Optimizer, local: list[str]) -> list[str]:
    """Return which of these names are those of parameters of the optimizer."""
    if not local:
        return []
    by_name = dict(zip(reducer.names, reducer.parameters, strict=True))
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [name for name in local if id(by_name[name]) in stepped]


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''} ({len(names)} parameter(s))"
