"""What a checkpoint holds of a run, as tensors by name, and how it is put back.

Names are those of the bare model, whatever wraps or divides it: ``model.<parameter>``,
``optimizer.<parameter>.<key>``, ``random.<data rank>[.stage<n>][.slice<n>].<device>``. A rank that holds only a part of
a tensor gives its pieces with their places in the whole (``parallel.pieces``), so a checkpoint does not depend on the
layout. Where the tensors are stored is the business of ``checkpoint.py``.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gradsync.ddp.sharded_optimizer import ZeroRedundancyOptimizer
from gradsync.errors import CheckpointError
from gradsync.parallel.held import Held, bare_name, held_whole, local_shape, named_tensors
from gradsync.parallel.pieces import Cut, Pieces, cut_flat

State = dict[str, Tensor | Pieces]
T = TypeVar("T")


@dataclass(frozen=True)
class Standing:
    """Which part of a run a rank is: its number among those that see other data, its stage of a pipeline, its slice."""

    data_rank: int = 0
    data_world: int = 1
    stage: int = 0
    sequence_slice: int = 0
    is_fully_sharded: bool = False
    """Whether the ranks that see other data hold other parts of the model."""


@dataclass(frozen=True)
class TrainingState:
    """The parts of a run that change from step to step, on one rank."""

    held: Mapping[str, Held]
    optimizer: Optimizer
    standing: Standing
    device: torch.device

    def tensors(self) -> State:
        """Return every tensor of the state; those of the model and the optimizer share memory with them."""
        return {**self._model_tensors(), **self._optimizer_tensors(), **self._random_states()}

    def share(self) -> State:
        """Return what this rank is to save: its part of what several ranks hold alike, and what it alone holds.

        The ranks make the same division by themselves, so that each copies and writes its part only.
        """
        standing = self.standing
        model, moments = self._model_tensors(), self._optimizer_tensors()
        is_divided = isinstance(self.optimizer, ZeroRedundancyOptimizer)
        if standing.is_fully_sharded:
            return {**model, **moments, **self._random_states()}
        alike = model if is_divided else {**model, **moments}
        own = moments if is_divided else {}
        return {**divide(alike, standing.data_rank, standing.data_world), **own, **self._random_states()}

    def restore(self, stored: Mapping[str, tuple[int, ...]], load: Callable[[State], None]) -> None:
        """Put a stored state back; ``load`` fills a dictionary of tensors by name.

        A rank that the run did not have before keeps its freshly seeded random state.
        """
        model = match_names(self._model_tensors(), stored)
        moments = self._empty_moments(stored)
        random = {name: state for name, state in self._random_states().items() if name in stored}
        load({**model, **{name: moment.stored for name, moment in moments.items()}, **random})
        self._load_moments(moments.values())
        self._set_random_states(random)

    def _model_tensors(self) -> State:
        return {f"model.{name}": held.cut.of(held.tensor) for name, held in self.held.items()}

    def _optimizer_tensors(self) -> State:
        optimizer, stepped = self._stepped()
        return {
            f"optimizer.{each.name}.{key}": each.cut.of(value) if _is_alike(value, each.tensor) else value.detach()
            for each in stepped
            for key, value in optimizer.state.get(each.tensor, {}).items()
            if isinstance(value, Tensor)
        }

    def _stepped(self) -> "tuple[Optimizer, list[_Stepped]]":
        """Return the optimizer that runs on this rank, and what it steps, in its order."""
        if isinstance(self.optimizer, ZeroRedundancyOptimizer):
            inner, pieces = self.optimizer.own_share()
            return inner, [
                _Stepped(piece.name, piece.tensor, cut_flat(piece.parameter.shape, piece.owned)) for piece in pieces
            ]
        by_tensor = {held.tensor: (name, held.cut) for name, held in self.held.items()}
        ordered = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return self.optimizer, [_Stepped(by_tensor[p][0], p, by_tensor[p][1]) for p in ordered]

    def _empty_moments(self, stored: Mapping[str, tuple[int, ...]]) -> "dict[str, _Moment]":
        by_prefix = {f"optimizer.{each.name}": each for each in self._stepped()[1]}
        moments = {}
        for stored_name, shape in stored.items():
            prefix, _, key = stored_name.rpartition(".")
            each = by_prefix.get(prefix)
            if each is not None:
                moments[stored_name] = _empty_moment(each, key, shape)
        return moments

    def _load_moments(self, moments: "Iterable[_Moment]") -> None:
        by_tensor: dict[Tensor, dict[str, Tensor]] = {}
        for moment in moments:
            by_tensor.setdefault(moment.of, {})[moment.key] = moment.value
        optimizer, stepped = self._stepped()
        # The optimizer's own loading puts each tensor where it wants it (a fused step counter, say).
        packed = optimizer.state_dict()
        packed["state"] = {
            index: by_tensor[each.tensor] for index, each in enumerate(stepped) if each.tensor in by_tensor
        }
        optimizer.load_state_dict(packed)

    def _random_states(self) -> State:
        # Ranks that share a replica drop out the same activations; stages and slices of one each have their own.
        standing = self.standing
        stage = f".stage{standing.stage}" if standing.stage else ""
        part = f".slice{standing.sequence_slice}" if standing.sequence_slice else ""
        prefix = f"random.{standing.data_rank}{stage}{part}"
        states: State = {f"{prefix}.cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            states[f"{prefix}.cuda"] = torch.cuda.get_rng_state(self.device)
        return states

    def _set_random_states(self, states: State) -> None:
        for name, state in states.items():
            assert isinstance(state, Tensor)
            if name.endswith(".cpu"):
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, self.device)


@dataclass(frozen=True)
class _Stepped:
    """What an optimizer steps on this rank: a parameter, or a piece of one."""

    name: str
    tensor: Tensor
    cut: Cut


@dataclass(frozen=True)
class _Moment:
    """A tensor of an optimizer's state to be loaded: ``stored`` shares the memory of ``value``."""

    of: Tensor
    key: str
    value: Tensor
    stored: Tensor | Pieces


def _empty_moment(each: _Stepped, key: str, shape: tuple[int, ...]) -> _Moment:
    if shape != each.cut.shape:
        value = torch.zeros(shape)
        return _Moment(each.tensor, key, value, value)
    value = torch.zeros_like(each.tensor.detach())
    return _Moment(each.tensor, key, value, each.cut.of(value))


def _is_alike(value: Tensor, tensor: Tensor) -> bool:
    return local_shape(value) == local_shape(tensor)


def divide(tensors: Mapping[str, T], rank: int, world: int) -> dict[str, T]:
    """Return one rank's part of tensors that all ranks hold, the parts about equal in bytes."""
    loads = [0] * world
    part = {}
    sizes: dict[str, int] = {name: tensor.nbytes for name, tensor in tensors.items()}  # type: ignore[attr-defined]
    for name in sorted(tensors, key=lambda name: (-sizes[name], name)):
        owner = loads.index(min(loads))
        loads[owner] += sizes[name]
        if owner == rank:
            part[name] = tensors[name]
    return part


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers of a whole model by name, tied ones once."""
    return {f"model.{name}": tensor.detach() for name, tensor in named_tensors(model).items()}


def state_of(model: nn.Module, optimizer: Optimizer, device: torch.device) -> TrainingState:
    """Return the state of a whole model on one rank alone."""
    return TrainingState(held_whole(model), optimizer, Standing(), device)


def match_names(tensors: Mapping[str, T], stored: Iterable[str]) -> dict[str, T]:
    """Return the tensors under the names they are stored by, whatever wrappers those names carry.

    Raises:
        CheckpointError: nothing matches, or some tensors are not stored.
    """
    by_bare_name = {bare_name(name): name for name in stored}
    missing = [name for name in tensors if name not in by_bare_name]
    if len(missing) == len(tensors):
        raise CheckpointError(
            f"none of the model's {len(tensors)} tensors is in the checkpoint; it holds "
            f"{', '.join(list(by_bare_name)[:3]) or 'nothing'} ...: it belongs to another model"
        )
    if missing:
        raise CheckpointError(
            f"{len(missing)} of the model's {len(tensors)} tensors are not in the checkpoint, the first is {missing[0]}"
        )
    return {by_bare_name[name]: tensor for name, tensor in tensors.items()}
