"""What the user holds: ``ZeroRedundancyOptimizer``, an optimizer of which every rank runs a share.

Stepping, clipping, and saving and loading by parameter name. Where the shares lie and what travels is in
``sharding``; see docs/sharded-optimizer.md.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable, JoinHook, _JoinConfig
from torch.optim import Optimizer

from gradsync.comm.groups import reducing
from gradsync.ddp.elementwise import check_elementwise
from gradsync.ddp.module import DistributedDataParallel
from gradsync.ddp.replicas import check_contract
from gradsync.ddp.sharded_gradient import ShardedGradient
from gradsync.ddp.sharded_state import PieceState, consolidate
from gradsync.ddp.sharding import Piece, Sharding, Tenant
from gradsync.errors import ConfigError

_NOT_OPTIONS = frozenset({"params", "param_names"})


class ZeroRedundancyOptimizer(Optimizer, Tenant):
    """Steps a share of the parameters on each rank, and keeps the optimizer's state for that share only.

    Backward leaves on each rank the sum of its slices of the gradients (a reduce-scatter in place of the
    all-reduce); ``step`` runs the inner optimizer on them and gives the stepped slices to all ranks. The traffic
    is that of plain data parallel; state, gradients and the work of the step are divided by the number of ranks.

    ``param.grad`` holds no values after such a backward (a ``ShardedGradient``); clip with ``clip_grad_norm_``
    of this class. ``step``, ``clip_grad_norm_``, ``state_dict``, ``full_gradient`` and the constructor are
    collective: all ranks call them.

    Args:
        params: parameters, named parameters, or parameter groups; together all trainable parameters of the module.
        optimizer_class: any optimizer that works element by element.
        ddp: the wrapped module.
        process_group: for compatibility; if given, its ranks must be those of ``ddp``.
        defaults: what ``optimizer_class`` takes.

    Raises:
        ConfigError: the optimizer or a parameter cannot be sharded, or the parameters are not those of ``ddp``.
        ContractError: on all ranks, if their optimizers differ.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: Callable[..., Optimizer],
        *,
        ddp: DistributedDataParallel,
        process_group: Any = None,
        **defaults: Any,
    ) -> None:
        Joinable.__init__(self)
        self._inner: Optimizer | None = None
        self._sharding: Sharding | None = None
        self._ddp = ddp
        self._check_ddp(ddp, process_group)
        groups = _as_groups(params)
        options = [{k: v for k, v in group.items() if k not in _NOT_OPTIONS} for group in groups]
        tried = check_elementwise(optimizer_class, options, defaults, ddp.device)
        super().__init__(groups, {**tried.defaults, **defaults})
        _check_parameters(ddp, self.param_groups)
        self._check_contract(ddp, optimizer_class)
        self._sharding = Sharding(ddp.reducer, self)
        self._sharding.check_members(list(zip(ddp.reducer.names, ddp.reducer.parameters, strict=True)))
        self._sharding.attach()
        self._inner = optimizer_class(
            [{**_options(group), "params": self._tensors_of(number)} for number, group in enumerate(self.param_groups)],
            **defaults,
        )

    # ------------------------------------------------------------- stepping

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step this rank's share and take the others'; collective.

        A ``closure`` runs forward and backward on all ranks, once.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        sharding, inner = self._parts()
        self._check_join()
        sharding.come_home()
        for outer, own in zip(self.param_groups, inner.param_groups, strict=True):
            own.update(_options(outer))
        for piece in sharding.pieces:
            piece.tensor.grad = piece.gradient()
        inner.step()
        for piece in sharding.pieces:
            piece.tensor.grad = None
        for outer, own in zip(self.param_groups, inner.param_groups, strict=True):
            outer.update(_options(own))
        sharding.gather()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of all parameters, or set them to zero."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.detach_().zero_() if parameter.grad.grad_fn else parameter.grad.zero_()
        if set_to_none and self._sharding is not None:
            self._sharding.drop_gradients()

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients so that their norm, over all parameters and ranks, is at most ``max_norm``; collective.

        Returns the norm before. ``max_norm=float("inf")`` only measures.

        Raises:
            RuntimeError: the norm is infinite or not a number, and ``error_if_nonfinite`` is set; on all ranks.
        """
        if self._ddp._join_config.enable:
            raise ConfigError(
                "clip_grad_norm_ is collective and does not work inside join(), where ranks may be missing"
            )
        grads = [grad for piece in self._parts()[0].pieces if (grad := piece.gradient()) is not None]
        total = self._global_norm(grads, float(norm_type))
        if error_if_nonfinite and not bool(total.isfinite()):
            raise RuntimeError(
                f"the total norm of order {norm_type} of the gradients is {float(total)}, so they cannot be clipped; "
                f"with error_if_nonfinite=False they are scaled by it anyway"
            )
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        added_to = [grad for grad in self._gradients() if type(grad) is ShardedGradient and grad.local is not None]
        for grad in (*grads, *added_to):  # of those that were added to, ``grads`` has sums of their own
            grad.mul_(factor.to(grad.device))
        return total

    def _gradients(self) -> list[torch.Tensor]:
        return [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]

    def _global_norm(self, grads: list[torch.Tensor], order: float) -> torch.Tensor:
        reducer = self._parts()[0].reducer
        is_max = order == float("inf")
        device = self.param_groups[0]["params"][0].device
        dtype = torch.float64 if any(grad.dtype.to_real() == torch.float64 for grad in grads) else torch.float32
        own = torch.zeros((), dtype=dtype, device=device)
        if grads:
            norms = [torch.linalg.vector_norm(grad, order).to(device, dtype) for grad in grads]
            own = torch.stack(norms).max() if is_max else torch.stack(norms).pow(order).sum()
        if is_max:
            own = own.nan_to_num(nan=float("inf"), posinf=float("inf"))  # not every backend's maximum keeps a NaN
        if reducer.world_size > 1:
            options = reducing(dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM)
            reducer.groups.waits.wait(reducer.group.allreduce([own], options))
        return own if is_max else own.pow(1.0 / order)

    def full_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the whole gradient of a parameter, None if it has none; collective."""
        sharding = self._parts()[0]
        grad = parameter.grad
        if type(grad) is not ShardedGradient:
            return None if grad is None else grad.detach().clone()
        name = next(n for n, p in sharding.reducer.watch.all_parameters() if p is parameter)
        own = next((piece for piece in sharding.pieces if piece.parameter is parameter), None)
        mine = None if own is None else own.gradient()
        state: PieceState = {} if mine is None else {name: {"gradient": mine}}
        whole = consolidate(sharding.links, state, sharding.layout).get(name)
        return torch.zeros_like(parameter) if whole is None else whole["gradient"].to(parameter.device)

    # ------------------------------------------------------------- saving and loading

    def state_dict(self, to: int | None = None) -> dict[str, Any]:  # type: ignore[override]
        """Return the whole optimizer's state, keyed by parameter names; collective.

        It loads at any number of ranks; ``plain_optimizer_state`` turns it into what a plain optimizer loads. With
        ``to`` only that rank of the group gets the state of the parameters, which saves the others the memory.
        """
        sharding, inner = self._parts()
        names = {id(p): name for name, p in sharding.reducer.watch.all_parameters()}
        groups = [
            {**_options(group), "params": [names[id(p)] for p in group["params"] if id(p) in names]}
            for group in self.param_groups
        ]
        state: PieceState = {piece.name: dict(inner.state.get(piece.tensor, {})) for piece in sharding.pieces}
        return {"state": consolidate(sharding.links, state, sharding.layout, to), "param_groups": groups}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Load what ``state_dict`` returned at any number of ranks, or a plain optimizer's; each rank cuts its part.

        Raises:
            ConfigError: it has other parameters, groups or shapes.
        """
        sharding, inner = self._parts()
        names = {id(p): name for name, p in sharding.reducer.watch.all_parameters()}
        saved = _by_name(state_dict, [[names.get(id(p), "") for p in g["params"]] for g in self.param_groups])
        state, indices = {}, []
        position = 0
        for number in range(len(self.param_groups)):
            pieces = [piece for piece in sharding.pieces if piece.group == number]
            for piece in pieces:
                values = saved["state"].get(piece.name)
                if values is not None:
                    state[position] = {key: piece.cut_state(key, value) for key, value in values.items()}
                position += 1
            indices.append(list(range(position - len(pieces), position)))
        options = [_options(group) for group in saved["param_groups"]]
        inner.load_state_dict(
            {
                "state": state,
                "param_groups": [{**o, "params": i} for o, i in zip(options, indices, strict=True)],
            }
        )
        for outer, own in zip(self.param_groups, inner.param_groups, strict=True):
            outer.update(_options(own))

    def own_share(self) -> tuple[Optimizer, list[Piece]]:
        """Return the optimizer that runs on this rank, and the pieces it steps, in its order; not collective.

        For saving without gathering: each piece says which range of which flattened parameter it is. Pieces change
        with the engine's plan, so take them anew each time.
        """
        sharding, inner = self._parts()
        groups = range(len(inner.param_groups))
        return inner, [piece for number in groups for piece in sharding.pieces if piece.group == number]

    # ------------------------------------------------------------- groups and shares

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters that are new to the module, or were frozen; on all ranks, before they are first trained."""
        super().add_param_group(param_group)
        if self._inner is not None:
            self._inner.add_param_group({**_options(self.param_groups[-1]), "params": []})
            self._parts()[0].refresh()

    def lift_state(self) -> PieceState:
        """Take the inner optimizer's state off the pieces (for ``Sharding``)."""
        if self._inner is None:
            return {}
        state, self._inner.state = self._inner.state, type(self._inner.state)(dict)
        assert self._sharding is not None
        return {p.name: dict(state[p.tensor]) for p in self._sharding.pieces if p.tensor in state}

    def settle_state(self, state: PieceState) -> None:
        """Give the inner optimizer new pieces with this state (for ``Sharding``)."""
        if self._inner is None:
            return
        assert self._sharding is not None
        for number, group in enumerate(self._inner.param_groups):
            group["params"] = self._tensors_of(number)
        for piece in self._sharding.pieces:
            if piece.name in state:
                self._inner.state[piece.tensor] = state[piece.name]

    def _tensors_of(self, number: int) -> list[torch.Tensor]:
        assert self._sharding is not None
        return [piece.tensor for piece in self._sharding.pieces if piece.group == number]

    def _parts(self) -> tuple[Sharding, Optimizer]:
        sharding, inner = self._sharding, self._inner
        assert sharding is not None and inner is not None
        if sharding.world_size > 1 and self._ddp.reducer.sharding is not sharding:
            raise ConfigError(
                "this ZeroRedundancyOptimizer no longer gets the gradients of its DistributedDataParallel: another one "
                "has been made for it, or its process group was changed; use the new one, or make one"
            )
        return sharding, inner

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "a ZeroRedundancyOptimizer cannot be copied or pickled: it is one rank's share of an optimizer; "
            "save its state_dict(), which is complete"
        )

    # ------------------------------------------------------------- uneven inputs

    def join_hook(self, **_kwargs: Any) -> JoinHook:
        """Return what torch's ``Join`` calls on a rank that has run out of batches: it steps its share all the same."""
        return _StepAlong(self)

    @property
    def join_device(self) -> torch.device:
        """The device of the collectives of ``Join``."""
        return self._ddp.join_device

    @property
    def join_process_group(self) -> Any:
        """The group of the collectives of ``Join``."""
        return self._ddp.join_process_group

    def _check_join(self) -> None:
        if self._ddp._join_config.enable and not self._join_config.enable:
            raise ConfigError(
                "step() inside a Join context that does not know the optimizer would wait for ever for ranks that have "
                "run out of batches; use ddp.join(), or Join([ddp, optimizer])"
            )

    # ------------------------------------------------------------- checks

    @staticmethod
    def _check_ddp(ddp: Any, process_group: Any) -> None:
        if not isinstance(ddp, DistributedDataParallel):
            raise ConfigError(
                f"ddp must be the gradsync.DistributedDataParallel that holds the parameters, but is a "
                f"{type(ddp).__name__}"
            )
        if process_group is not None:
            wanted, given = (dist.get_process_group_ranks(g) for g in (ddp.process_group, process_group))
            if wanted != given:
                raise ConfigError(
                    f"process_group has ranks {given}, but the replicas are on {wanted}; leave it out, the optimizer "
                    f"is sharded over the ranks of ddp"
                )
        if ddp.reducer.hook is not None:
            raise ConfigError(
                "a communication hook is registered, which wants to reduce the gradients itself; use either the hook "
                "or ZeroRedundancyOptimizer"
            )

    def _check_contract(self, ddp: DistributedDataParallel, optimizer_class: Any) -> None:
        facts: list[list[Any]] = [
            ["optimizer_class", "setting", getattr(optimizer_class, "__name__", repr(optimizer_class))]
        ]
        for number, group in enumerate(self.param_groups):
            facts.append([f"options of parameter group {number}", "setting", repr(sorted(_options(group).items()))])
        group_of = {id(p): number for number, group in enumerate(self.param_groups) for p in group["params"]}
        named = ddp._watch.all_parameters()
        facts += [[name, "parameter", {"group": str(group_of.get(id(p)))}] for name, p in named]
        if ddp.process_group.size() > 1:
            check_contract(ddp.process_group, facts, ddp.device, ddp.process_group.rank())


class _StepAlong(JoinHook):
    """On a rank without batches: one step in each iteration of the others, on the slices that the pass left here."""

    def __init__(self, optimizer: ZeroRedundancyOptimizer) -> None:
        self._optimizer = optimizer

    def main_hook(self) -> None:
        """Shadow one iteration of the training ranks."""
        self._optimizer.step()
        self._optimizer.zero_grad()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Leave the context."""
        self._optimizer._join_config = _JoinConfig.construct_disabled_join_config()  # type: ignore[no-untyped-call]


def _as_groups(params: Any) -> list[dict[str, Any]]:
    """Return parameter groups, whatever form they were given in."""
    if isinstance(params, torch.Tensor):
        raise TypeError("params must be an iterable of parameters or parameter groups, but is a single tensor")
    given = list(params)
    if not given:
        raise ValueError("optimizer got an empty parameter list")
    if not isinstance(given[0], dict):
        return [{"params": given}]
    return [{**group, "params": _as_list(group["params"])} for group in given]


def _as_list(params: Any) -> list[Any]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


def _check_parameters(ddp: DistributedDataParallel, groups: Iterable[Mapping[str, Any]]) -> None:
    known = {id(p): name for name, p in ddp._watch.all_parameters()}
    sparse = ddp._watch.sparse_names()
    places: dict[tuple[int, int], str] = {}
    for group in groups:
        for parameter in group["params"]:
            name = known.get(id(parameter))
            if name is None:
                raise ConfigError(
                    f"a parameter of shape {tuple(parameter.shape)} is no parameter of the wrapped module (or one that "
                    f"DistributedDataParallel was told to ignore), so no gradient of it is synchronised; leave it out"
                )
            if name in sparse:
                raise ConfigError(f"{name!r} gets sparse gradients, which cannot be cut into slices; use sparse=False")
            if getattr(parameter, "_local_tensor", None) is not None:
                raise ConfigError(f"{name!r} is a DTensor, which is sharded already; use a plain optimizer")
            if getattr(parameter, "grad_dtype", None) not in (None, parameter.dtype):
                raise ConfigError(
                    f"the gradient of {name!r} is wanted in {parameter.grad_dtype}, but it is {parameter.dtype}; "
                    f"a sharded optimizer needs one dtype for both"
                )
            where = (parameter.data_ptr(), parameter.numel())
            if parameter.numel() and where in places:
                raise ConfigError(
                    f"{places[where]!r} and {name!r} are two parameters in the same memory; make them one parameter "
                    f"(module.b = module.a), since each gets memory of its own"
                )
            places[where] = name


def _by_name(state_dict: Mapping[str, Any], names: list[list[str]]) -> Mapping[str, Any]:
    """Check that the state belongs to these parameters; one of a plain optimizer is renamed."""
    saved = state_dict["param_groups"]
    counts = [len(group["params"]) for group in saved]
    if counts != [len(group) for group in names]:
        raise ConfigError(
            f"the state to load has parameter groups of {counts} parameters, and the optimizer of "
            f"{[len(group) for group in names]}; build it with the same groups"
        )
    if all(isinstance(key, int) for group in saved for key in group["params"]):
        by_number = {
            key: name
            for group, own in zip(saved, names, strict=True)
            for key, name in zip(group["params"], own, strict=True)
        }
        return {"state": {by_number[k]: v for k, v in state_dict["state"].items()}, "param_groups": saved}
    for number, (group, own) in enumerate(zip(saved, names, strict=True)):
        if set(group["params"]) != set(own):
            other = sorted(set(group["params"]) ^ set(own))
            raise ConfigError(
                f"parameter group {number} of the state to load is another one: {', '.join(other[:4])} "
                f"{'is' if len(other) == 1 else 'are'} only in one of the two; build the optimizer with the same groups"
            )
    return state_dict
