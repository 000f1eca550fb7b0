"""Optimizer state in pieces: whole again by parameter name, cut, and moved to other owners.

Tensors with one element for each element of a piece (momentum, say) are *sliced*: every owner holds its part.
Everything else (step counts, flags) is equal on all owners. Knows tensors by name; what they mean is the
optimizer's affair.
"""

import base64
import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gradsync.comm.groups import Group, broadcast_tensors, exchange_text
from gradsync.ddp.plan import ParameterSpec
from gradsync.ddp.shard_layout import Placement, flat_view, in_layout_of, shaped
from gradsync.errors import ConfigError, ContractError

_CHUNK_BYTES = 32 * 2**20

Layout = dict[str, tuple[ParameterSpec, Placement]]
"""Where each parameter lies, by name; the same on all ranks."""
PieceState = dict[str, dict[str, Any]]
"""What this rank holds for its pieces: by parameter name, by key."""


@dataclass(frozen=True)
class Links:
    """``group`` carries tensors, ``control_group`` what is said about them."""

    group: Group
    control_group: Group
    rank: int
    world_size: int


@dataclass(frozen=True)
class _Entry:
    name: str
    key: str
    dtype: torch.dtype


@dataclass(frozen=True)
class _Sliced:
    """In place of a sliced tensor when ranks tell each other what they hold."""

    dtype: torch.dtype


@dataclass(frozen=True)
class _Common:
    """A value that is equal on all owners; tensors on the CPU, whether or not they belong on the parameter's device."""

    value: Any
    is_on_device: bool = False

    def beside(self, device: torch.device) -> Any:
        """Return the value for use with parameters on this device; a copy, since optimizers count in place."""
        if not isinstance(self.value, torch.Tensor):
            return self.value
        return self.value.clone().to(device) if self.is_on_device else self.value.clone()


@dataclass
class _Catalogue:
    """What there is on all ranks together."""

    sliced: list[_Entry] = field(default_factory=list)
    common: dict[str, dict[str, _Common]] = field(default_factory=dict)


def redistribute(links: Links, state: PieceState, before: Layout, after: Layout) -> PieceState:
    """Return this rank's pieces of the state under another layout; collective. Nothing travels that stays."""
    if not before:
        return {}
    catalogue = _exchange_catalogue(links, state, before)
    result: PieceState = {}
    for name, values in catalogue.common.items():
        if name in after and after[name][1].owned_by(links.rank):
            device = after[name][0].device
            result[name] = {key: value.beside(device) for key, value in values.items()}
    staying = {name for name in before if name in after and before[name][1] == after[name][1]}
    for name in staying & state.keys():
        result.setdefault(name, {}).update(state[name])
    leaving = [entry for entry in catalogue.sliced if entry.name not in staying and entry.name in after]
    for entry, whole in _wholes(links, leaving, state, before):
        spec, placement = after[entry.name]
        owned = placement.owned_by(links.rank)
        if owned:
            part = whole[_flat_slice(owned, spec, entry.dtype)].clone()
            result.setdefault(entry.name, {})[entry.key] = _as_dtype(part, entry.dtype)
    return result


def consolidate(links: Links, state: PieceState, layout: Layout, to: int | None = None) -> PieceState:
    """Return the state of whole parameters, on the CPU; collective.

    With ``to``, only that rank gets it, and the others get nothing.
    """
    catalogue = _exchange_catalogue(links, state, layout)
    is_wanted = to is None or to == links.rank
    result: PieceState = {}
    if is_wanted:
        result = {name: {k: v.value for k, v in values.items()} for name, values in catalogue.common.items()}
    for entry, whole in _wholes(links, catalogue.sliced, state, layout):
        if is_wanted:
            spec = layout[entry.name][0]
            result.setdefault(entry.name, {})[entry.key] = shaped(whole.cpu(), spec, entry.dtype)
    return result


def cut(key: str, value: Any, spec: ParameterSpec, owned: range) -> Any:
    """Return the part of a value that belongs to a piece: of a tensor with the parameter's shape the owned elements.

    Raises:
        ConfigError: the value belongs to a parameter of another shape.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if value.dim() == 0 and (key == "step" or spec.shape):
        return value.clone()  # optimizers count in place, and what was loaded is the caller's
    if tuple(value.shape) != spec.shape:
        raise ConfigError(
            f"the state to load has {key!r} of shape {tuple(value.shape)} for {spec.name!r}, whose shape is "
            f"{spec.shape}; it was saved from another model"
        )
    part = flat_view(in_layout_of(spec, value))[_flat_slice(owned, spec, value.dtype)]
    return _as_dtype(part.clone(), value.dtype)


def plain_optimizer_state(
    state_dict: Mapping[str, Any], optimizer: torch.optim.Optimizer, module: nn.Module
) -> dict[str, Any]:
    """Turn a ``ZeroRedundancyOptimizer``'s state, keyed by parameter names, into one that a plain optimizer loads.

    ``optimizer`` holds parameters of ``module`` (the bare module, not its wrapper) in the same groups as the sharded
    one did, in any order: ``optimizer.load_state_dict(plain_optimizer_state(saved, optimizer, module))``.

    Raises:
        ConfigError: the optimizer's parameters or groups are not those of the saved state.
    """
    names = {id(p): name for name, p in module.named_parameters()}
    group_of = {name: group for group in state_dict["param_groups"] for name in group["params"]}
    state: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    number = 0
    for position, group in enumerate(optimizer.param_groups):
        own = [names.get(id(p), "") for p in group["params"]]
        saved = [group_of.get(name) for name in own]
        if any(s is None for s in saved) or any(s is not saved[0] for s in saved):
            raise ConfigError(
                f"parameter group {position} of the optimizer does not hold parameters of one group of the saved "
                f"state; build it with the same groups as the ZeroRedundancyOptimizer that saved it"
            )
        options = {} if not saved else {k: v for k, v in (saved[0] or {}).items() if k != "params"}
        groups.append({**options, "params": list(range(number, number + len(own)))})
        state.update(
            {number + i: state_dict["state"][name] for i, name in enumerate(own) if name in state_dict["state"]}
        )
        number += len(own)
    return {"state": state, "param_groups": groups}


# ----------------------------------------------------------------- what there is, and how it becomes whole


def _exchange_catalogue(links: Links, state: PieceState, layout: Layout) -> _Catalogue:
    """Learn what all ranks hold; collective.

    Raises:
        ContractError: on all ranks, if the owners of a parameter hold different things.
    """
    mine: dict[str, dict[str, _Sliced | _Common]] = {}
    for name, values in state.items():
        spec, placement = layout[name]
        shape = (len(placement.owned_by(links.rank)) // (2 if spec.dtype.is_complex else 1),)
        mine[name] = {key: _described(value, shape) for key, value in values.items()}
    everyone = [mine] if links.world_size == 1 else _exchange(links, mine)
    catalogue = _Catalogue()
    for name in layout:
        owners = [rank for rank in range(links.world_size) if layout[name][1].owned_by(rank)]
        found = [everyone[rank].get(name, {}) for rank in owners]
        if any(other.keys() != found[0].keys() for other in found[1:]):
            raise ContractError(
                f"rank {links.rank}: ranks {', '.join(map(str, owners))} hold different optimizer state for {name!r}; "
                f"step, load and change parameters on all ranks alike"
            )
        for key, value in found[0].items() if found else ():
            if isinstance(value, _Sliced):
                catalogue.sliced.append(_Entry(name, key, value.dtype))
            else:
                catalogue.common.setdefault(name, {})[key] = value
    return catalogue


def _described(value: Any, piece_shape: tuple[int, ...]) -> _Sliced | _Common:
    if not isinstance(value, torch.Tensor):
        return _Common(value)
    if tuple(value.shape) == piece_shape:
        return _Sliced(value.dtype)
    return _Common(value.detach().cpu().clone(), value.device.type != "cpu")


def _exchange(links: Links, mine: Any) -> list[Any]:
    text = base64.b64encode(pickle.dumps(mine)).decode()
    everyone = exchange_text(links.control_group, text, torch.device("cpu"))
    return [pickle.loads(base64.b64decode(theirs)) for theirs in everyone]


def _wholes(
    links: Links, entries: Iterable[_Entry], state: PieceState, layout: Layout
) -> Iterator[tuple[_Entry, torch.Tensor]]:
    """Yield each sliced tensor whole, flat and real, on all ranks; collective, some at a time to save memory."""
    for chunk in _chunks(entries, layout):
        specs = [layout[entry.name][0] for entry in chunk]
        wholes = [_empty_whole(entry, spec) for entry, spec in zip(chunk, specs, strict=True)]
        for source in range(links.world_size):
            owned = [layout[entry.name][1].owned_by(source) for entry in chunk]
            targets = [
                whole[_flat_slice(r, spec, entry.dtype)]
                for entry, spec, whole, r in zip(chunk, specs, wholes, owned, strict=True)
                if r
            ]
            parts = targets
            if source == links.rank:
                parts = [flat_view(state[e.name][e.key]) for e, r in zip(chunk, owned, strict=True) if r]
            if parts and links.world_size > 1:
                parts = broadcast_tensors(links.group, parts, source)
            for part, target in zip(parts, targets, strict=True):
                target.copy_(part)
        yield from zip(chunk, wholes, strict=True)


def _chunks(entries: Iterable[_Entry], layout: Layout) -> Iterator[list[_Entry]]:
    chunk: list[_Entry] = []
    num_bytes = 0
    for entry in entries:
        chunk.append(entry)
        num_bytes += layout[entry.name][0].flat_numel * _real(entry.dtype).itemsize
        if num_bytes >= _CHUNK_BYTES:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk


def _empty_whole(entry: _Entry, spec: ParameterSpec) -> torch.Tensor:
    numel = spec.numel * (2 if entry.dtype.is_complex else 1)
    return torch.empty(numel, dtype=_real(entry.dtype), device=spec.device)


def _flat_slice(owned: range, spec: ParameterSpec, dtype: torch.dtype) -> slice:
    """Return where a tensor of this dtype has the owned elements; beside complex parameters it may be real."""
    if spec.dtype.is_complex and not dtype.is_complex:
        return slice(owned.start // 2, owned.stop // 2)
    return slice(owned.start, owned.stop)


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _as_dtype(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.view_as_complex(flat.view(-1, 2)) if dtype.is_complex else flat
