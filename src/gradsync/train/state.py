"""What a checkpoint holds of a run, as tensors by name, and how it is put back.

Names are those of the bare model, whatever wraps it: ``model.<parameter>``,
``optimizer.<parameter>.<key>``, ``random.<rank>.<device>``. Where the tensors are stored is the
business of ``checkpoint.py``.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from gradsync.errors import CheckpointError

_WRAPPERS = ("module", "_orig_mod")


@dataclass(frozen=True)
class TrainingState:
    """The parts of a run that change from step to step, on one rank."""

    model: nn.Module
    optimizer: Optimizer
    rank: int
    device: torch.device

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor of the state; those of the model and the optimizer share memory with them."""
        return {**model_tensors(self.model), **self._optimizer_tensors(), **self._random_states()}

    def share(self, world: int) -> dict[str, Tensor]:
        """Return what this rank is to save: its part of what all ranks hold alike, and what it alone holds.

        All ranks make the same division by themselves, so that each copies and writes its part only.
        """
        replicated = {**model_tensors(self.model), **self._optimizer_tensors()}
        return {**divide(replicated, self.rank, world), **self._random_states()}

    def restore(self, stored: dict[str, tuple[int, ...]], load: Any) -> None:
        """Put a stored state back; ``load`` fills a dictionary of tensors by name.

        A rank that the run did not have before keeps its freshly seeded random state.
        """
        model = match_names(model_tensors(self.model), stored)
        moments = self._empty_moments(stored)
        random = {name: state for name, state in self._random_states().items() if name in stored}
        load({**model, **{name: tensor for name, (_, _, tensor) in moments.items()}, **random})
        self._load_moments(moments)
        self._set_random_states(random)

    def _names(self) -> dict[Tensor, str]:
        return {parameter: bare_name(name) for name, parameter in self.model.named_parameters()}

    def _optimizer_tensors(self) -> dict[str, Tensor]:
        names = self._names()
        return {
            f"optimizer.{names[parameter]}.{key}": value
            for parameter, state in self.optimizer.state.items()
            for key, value in state.items()
            if isinstance(value, Tensor)
        }

    def _empty_moments(self, stored: dict[str, tuple[int, ...]]) -> dict[str, tuple[Tensor, str, Tensor]]:
        parameters = {f"optimizer.{name}": parameter for parameter, name in self._names().items()}
        moments = {}
        for stored_name, shape in stored.items():
            prefix, _, key = stored_name.rpartition(".")
            parameter = parameters.get(prefix)
            if parameter is not None:
                like = parameter.detach() if shape == tuple(parameter.shape) else torch.empty(shape)
                moments[stored_name] = (parameter, key, torch.zeros_like(like))
        return moments

    def _load_moments(self, moments: dict[str, tuple[Tensor, str, Tensor]]) -> None:
        by_parameter: dict[Tensor, dict[str, Tensor]] = {}
        for parameter, key, tensor in moments.values():
            by_parameter.setdefault(parameter, {})[key] = tensor
        # The optimizer's own loading puts each tensor where it wants it (a fused step counter, say).
        packed = self.optimizer.state_dict()
        ordered = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        packed["state"] = {
            index: by_parameter[parameter] for index, parameter in enumerate(ordered) if parameter in by_parameter
        }
        self.optimizer.load_state_dict(packed)

    def _random_states(self) -> dict[str, Tensor]:
        states = {f"random.{self.rank}.cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            states[f"random.{self.rank}.cuda"] = torch.cuda.get_rng_state(self.device)
        return states

    def _set_random_states(self, states: dict[str, Tensor]) -> None:
        for name, state in states.items():
            if name.endswith(".cpu"):
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, self.device)


def divide(tensors: dict[str, Tensor], rank: int, world: int) -> dict[str, Tensor]:
    """Return one rank's part of tensors that all ranks hold, the parts about equal in bytes.

    Tensors that are themselves divided among the ranks (DTensor) are in every part.
    """
    loads = [0] * world
    part = {}
    for name in sorted(tensors, key=lambda name: (-tensors[name].nbytes, name)):
        owner = loads.index(min(loads))
        if isinstance(tensors[name], DTensor):
            part[name] = tensors[name]
            continue
        loads[owner] += tensors[name].nbytes
        if owner == rank:
            part[name] = tensors[name]
    return part


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by bare name, tied ones once."""
    seen: set[int] = set()
    tensors = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[f"model.{bare_name(name)}"] = tensor.detach()
    return tensors


def bare_name(name: str) -> str:
    """Return a parameter's name without what data parallelism and compilation put into it."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def match_names(tensors: dict[str, Tensor], stored: Iterable[str]) -> dict[str, Tensor]:
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
