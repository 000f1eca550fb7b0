"""ZeRO stage 1 below the optimizer: where parameters live, who owns which part, and what travels when.

    backward     each bucket is summed over the ranks, each keeps its slice        launch
    step         each rank steps its *pieces*, the parts of parameters in its slices
    after it     every rank gives its slices of the parameters to all              gather

The reducer asks for buckets and launches them; the optimizer asks for pieces and gathers. Neither knows how
memory is laid out: parameters are views of flat buffers with the same layout as the gradients' buckets, so that
the gather writes them in place.

[Note: New layout] The engine plans its buckets anew after the first pass, and when parameters are frozen or
added. Slices change owners then: ``make_buckets`` moves parameters, gradients and the optimizer's state.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable

from gradsync.ddp.bucket import Bucket, view_at
from gradsync.ddp.exchange import Exchange, choose_exchange
from gradsync.ddp.plan import BucketPlan, ParameterSpec, Plan, Slicing, make_plan, parameter_spec
from gradsync.ddp.shard_layout import (
    Placement,
    as_pieces_dtype,
    flat_view,
    in_layout_of,
    is_laid_out_as,
    lone_placement,
    placements_in,
)
from gradsync.ddp.sharded_bucket import ShardedBucket, num_sent
from gradsync.ddp.sharded_gradient import ShardedGradient
from gradsync.ddp.sharded_state import Layout, Links, PieceState, cut, redistribute
from gradsync.errors import ConfigError, ContractError

if TYPE_CHECKING:
    from gradsync.ddp.reducer import Reducer

_MAX_BYTES_ON_THE_WAY = 32 * 2**20
_GRADIENT = "gradient"


class Piece:
    """The part of one parameter that this rank steps: ``tensor`` is flat and shares the parameter's memory."""

    def __init__(self, name: str, parameter: nn.Parameter, spec: ParameterSpec, group: int, owned: range) -> None:
        self.name = name
        self.parameter = parameter
        self.group = group
        self.owned = owned
        self._spec = spec
        self.tensor = nn.Parameter(self.cut(parameter.data), requires_grad=False)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a tensor that is laid out as the parameter; shares its memory."""
        return as_pieces_dtype(flat_view(whole)[self.owned.start : self.owned.stop], self._spec)

    def cut_state(self, key: str, value: Any) -> Any:
        """Return what of a value of whole-parameter state belongs to this piece."""
        return cut(key, value, self._spec, self.owned)

    def follow(self) -> None:
        """Look at the parameter's memory where it is now."""
        self.tensor.data = self.cut(self.parameter.data)

    def gradient(self) -> torch.Tensor | None:
        """Return this rank's part of the parameter's gradient; None if there is none.

        It shares the gradient's memory, unless this rank has added to it since it was reduced.
        """
        grad = self.parameter.grad
        if grad is None:
            return None
        if type(grad) is ShardedGradient:
            piece = grad.own_piece()
            return None if piece is None else as_pieces_dtype(piece, self._spec)
        if grad.layout is not torch.strided:
            raise ConfigError(
                f"the gradient of {self.name!r} is sparse, which a sharded optimizer cannot cut; use sparse=False"
            )
        if not is_laid_out_as(self._spec, grad):
            grad = self.parameter.grad = in_layout_of(self._spec, grad)
        return self.cut(grad)


class Tenant(Joinable):
    """What the sharding needs of the optimizer."""

    param_groups: list[dict[str, Any]]

    @abstractmethod
    def lift_state(self) -> PieceState:
        """Take the state off the pieces and return it by name."""

    @abstractmethod
    def settle_state(self, state: PieceState) -> None:
        """Put state on the pieces, which are new."""


class Sharding:
    """Cuts the parameters of one reducer's module into pieces for one optimizer."""

    def __init__(self, reducer: "Reducer", tenant: Tenant) -> None:
        self.reducer = reducer
        self.rank, self.world_size = reducer.rank, reducer.world_size
        self.slicing = Slicing(self.world_size)
        self.pieces: list[Piece] = []
        self.layout: Layout = {}
        self.tenant = tenant
        self._buckets: list[ShardedBucket] = []
        self._flats: list[torch.Tensor] = []
        self._homes: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._exchanges: dict[torch.device, Exchange] = {}
        self._frozen: list[ShardedBucket] = []
        """Hold gradients of parameters that were frozen after a backward; they take part in no pass."""
        self._placed: dict[str, Placement] = {}
        self._lone: list[tuple[nn.Parameter, Placement]] = []
        self._on_the_way: list[ShardedBucket] = []

    @property
    def links(self) -> Links:
        """The groups over which state travels."""
        return Links(self.reducer.group, self.reducer.control_group, self.rank, self.world_size)

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        return self.reducer.watch.all_parameters()

    # ------------------------------------------------------------- layout

    def attach(self) -> None:
        """Take over the reducer's buckets; collective. One rank alone has nothing to reduce, and only makes pieces."""
        if self.world_size == 1:
            self._lay_out()
            return
        self.reducer.groups.make_private()
        devices = {parameter.device for _, parameter in self._named()}
        self._exchanges = {device: choose_exchange(self.reducer.group, device) for device in devices}
        for _, parameter in self._named():
            if type(parameter.grad) is ShardedGradient:
                parameter.grad = None  # a slice that belongs to an earlier sharded optimizer
        self.reducer.use_sharding(self)

    def refresh(self) -> None:
        """Cut parameters that the optimizer has got since; not collective, since those that were cut stay so."""
        state = self.tenant.lift_state()
        self._lay_out()
        self.tenant.settle_state(state)

    def check_members(self, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Raise if a parameter that is to be trained belongs to no parameter group.

        Raises:
            ContractError: names the parameters.
        """
        members = {id(p) for group in self.tenant.param_groups for p in group["params"]}
        strangers = [name for name, p in named if id(p) not in members]
        if strangers:
            raise ContractError(
                f"rank {self.rank}: {', '.join(strangers[:4])}{', ...' if len(strangers) > 4 else ''} "
                f"({len(strangers)} parameter(s)) are trained by DistributedDataParallel but are in no parameter group "
                f"of its ZeroRedundancyOptimizer; give it all trainable parameters, freeze the others, or call "
                f"add_param_group() before the first backward with new ones"
            )

    def make_buckets(self, plan: Plan) -> list[Bucket]:
        """Lay everything out anew by this plan, and return its buckets; collective."""
        before = self.layout
        state, gradients = self.tenant.lift_state(), self._lift_gradients()
        self._move(plan)
        self._placed = {}
        for bucket_plan in plan.buckets:
            self._placed.update(placements_in(bucket_plan, plan.specs, self.world_size))
        self._lay_out()
        self.tenant.settle_state(redistribute(self.links, state, before, self.layout))
        self._settle_gradients(gradients, before)
        return list(self._buckets)

    @torch.no_grad()
    def _move(self, plan: Plan) -> None:
        """Make the buckets; those that are as before keep their memory, so that nothing has to be moved."""
        parameters = self.reducer.parameters
        flats_before = {_members(bucket): flat for bucket, flat in zip(self._buckets, self._flats, strict=True)}
        buckets_before, homes_before = self._buckets, self._homes
        self._buckets, self._flats, self._homes, self.pieces, self._on_the_way = [], [], [], [], []
        for number, bucket_plan in enumerate(plan.buckets):
            members = [parameters[i] for i in bucket_plan.indices]
            flat = flats_before.get(tuple(map(id, members)))
            if flat is None or flat.dtype != bucket_plan.dtype:
                flat = self._flat_for(bucket_plan, plan.specs, members)
            self._flats.append(flat)
            self._buckets.append(self._make_bucket(number, bucket_plan, plan.specs, members))
            self._move_in(flat, bucket_plan, plan.specs, members)
        for bucket in (*buckets_before, *self._frozen):
            bucket.retire()
        staying = {id(parameter) for parameter, _ in self._homes}
        for parameter, home in homes_before:
            if id(parameter) not in staying and parameter.data_ptr() == home.data_ptr():
                parameter.data = parameter.data.clone()

    def _flat_for(
        self, plan: BucketPlan, specs: Sequence[ParameterSpec], members: Sequence[nn.Parameter]
    ) -> torch.Tensor:
        """Return memory for a bucket's parameters: where a lone one is already, if that will do."""
        groups = self.reducer.groups
        own_specs = [specs[i] for i in plan.indices]
        numel = num_sent(plan, own_specs, self._exchanges[plan.device])
        is_alone = len(members) == 1 and own_specs[0].flat_numel == numel
        if is_alone and not groups.share_memory(plan.device) and is_laid_out_as(own_specs[0], members[0]):
            return flat_view(members[0].data)
        return groups.allocate(numel, plan.dtype, plan.device)

    def _move_in(
        self, flat: torch.Tensor, plan: BucketPlan, specs: Sequence[ParameterSpec], members: Sequence[nn.Parameter]
    ) -> None:
        for index, offset, parameter in zip(plan.indices, plan.offsets, members, strict=True):
            home = view_at(flat, offset, specs[index])
            if home.data_ptr() != parameter.data_ptr():
                home.copy_(parameter)
                parameter.data = home
            self._homes.append((parameter, home))

    def _make_bucket(
        self, number: int, plan: BucketPlan, specs: Sequence[ParameterSpec], members: Sequence[nn.Parameter]
    ) -> ShardedBucket:
        exchange, allocate = self._exchanges[plan.device], self.reducer.groups.allocate
        return ShardedBucket(number, plan, specs, members, exchange, self.rank, self.world_size, allocate)

    def _lay_out(self) -> None:
        """Cut every parameter of the optimizer, also frozen ones, which are in no bucket (of a lone rank none is)."""
        names = {id(p): name for name, p in self._named()}
        self.layout, self.pieces, self._lone = {}, [], []
        for number, group in enumerate(self.tenant.param_groups):
            for parameter in group["params"]:
                name = names.get(id(parameter))
                if name is None:
                    continue  # it has left the module
                spec = self._dense_spec(name, parameter)
                placement = self._placed.get(name)
                if placement is None:
                    placement = lone_placement(spec, self.world_size)
                    self._lone.append((parameter, placement))
                self.layout[name] = (spec, placement)
                owned = placement.owned_by(self.rank)
                if owned:
                    self.pieces.append(Piece(name, parameter, spec, number, owned))

    @staticmethod
    def _dense_spec(name: str, parameter: nn.Parameter) -> ParameterSpec:
        spec = parameter_spec(name, parameter)
        if tuple(parameter.stride()) != spec.strides:
            parameter.data = in_layout_of(spec, parameter.data)
        return spec

    def _lift_gradients(self) -> "_Gradients":
        lifted = _Gradients()
        for bucket in (*self._buckets, *self._frozen):
            for position, parameter in enumerate(bucket.parameters):
                grad = parameter.grad
                if type(grad) is ShardedGradient:
                    name, piece = bucket.name_of(position), bucket.own_piece(position)
                    lifted.local[name] = grad.local
                    if piece is not None:
                        lifted.pieces[name] = {_GRADIENT: as_pieces_dtype(piece, bucket.spec_of(position))}
        return lifted

    def _settle_gradients(self, lifted: "_Gradients", before: Layout) -> None:
        """Put the slices of gradients where they belong now."""
        pieces = redistribute(self.links, lifted.pieces, before, self.layout)
        frozen = [(name, p) for name, p in self._named() if name in lifted.local and name not in self._placed]
        self._frozen = [self._bucket_of_frozen(name, parameter) for name, parameter in frozen]
        for bucket in (*self._buckets, *self._frozen):
            for position in range(len(bucket.parameters)):
                name = bucket.name_of(position)
                if name in lifted.local:
                    piece = pieces.get(name, {}).get(_GRADIENT)
                    bucket.hold(position, None if piece is None else flat_view(piece), lifted.local[name])

    def _bucket_of_frozen(self, name: str, parameter: nn.Parameter) -> ShardedBucket:
        """A parameter that is frozen with a gradient keeps it, and is stepped on it."""
        spec = self._dense_spec(name, parameter)
        (plan,) = make_plan([spec], [0], [0], self.slicing).buckets
        return self._make_bucket(-1, plan, [spec], [parameter])

    # ------------------------------------------------------------- parameters that are trained again

    def put_aside(self, parameters: Sequence[nn.Parameter]) -> dict[int, ShardedGradient]:
        """Leave on the parameters what has not been reduced; returns by id what stands for the rest."""
        aside = {id(p): p.grad for p in parameters if type(p.grad) is ShardedGradient}
        for parameter in parameters:
            if id(parameter) in aside:
                parameter.grad = aside[id(parameter)].take_local()
        return aside

    def put_back(
        self,
        parameters: Sequence[nn.Parameter],
        aside: Mapping[int, ShardedGradient],
        results: dict[int, torch.Tensor],
    ) -> None:
        """Put what was put aside back, and add what has been reduced since, whole; that is no result any more."""
        for parameter in parameters:
            if id(parameter) in aside:
                whole = results.pop(id(parameter), None)
                if whole is not None:
                    aside[id(parameter)].add_reduced(whole)
                parameter.grad = aside[id(parameter)]

    # ------------------------------------------------------------- a pass

    def launch(self, bucket: Bucket) -> None:
        """Start to sum a bucket; waits for earlier ones where too much memory is on its way.

        A bounded queue keeps the link busy all the same, and backward would have to wait for it in the end.
        """
        assert isinstance(bucket, ShardedBucket)
        bucket.launch()
        self._on_the_way.append(bucket)
        while len(self._on_the_way) > 1 and self._num_bytes_on_the_way() > _MAX_BYTES_ON_THE_WAY:
            self._on_the_way.pop(0).arrive(lambda pending: self.reducer.groups.wait_for_messages([pending]))

    def _num_bytes_on_the_way(self) -> int:
        self._on_the_way = [bucket for bucket in self._on_the_way if bucket.num_bytes_on_the_way]
        return sum(bucket.num_bytes_on_the_way for bucket in self._on_the_way)

    def drop_gradients(self) -> None:
        """Free all slices of gradients."""
        for bucket in (*self._buckets, *self._frozen):
            bucket.drop()

    # ------------------------------------------------------------- a step

    @torch.no_grad()
    def come_home(self) -> None:
        """Bring back the values of parameters that were given other memory since (``parameter.data = ...``)."""
        for parameter, home in self._homes:
            if parameter.data_ptr() != home.data_ptr():
                if parameter.shape != home.shape or parameter.dtype != home.dtype or parameter.device != home.device:
                    raise ConfigError(
                        f"rank {self.rank}: a parameter was {_description(home)} when it was sharded, and is now "
                        f"{_description(parameter)}; convert the module before wrapping it"
                    )
                home.copy_(parameter)
                parameter.data = home
        if self.world_size == 1:
            for piece in self.pieces:
                piece.follow()

    @torch.no_grad()
    def gather(self) -> None:
        """Give this rank's slices of the parameters to all, and take theirs; collective."""
        if self.world_size == 1:
            return
        try:
            works = [
                work
                for bucket, flat in zip(self._buckets, self._flats, strict=True)
                if flat.numel()
                for work in bucket.exchange.all_gather(flat, bucket.slice_numel, 2 * bucket.number + 1)
            ]
            self.reducer.groups.wait_for_messages(works)
            self._gather_lone()
        except BaseException as error:
            self.reducer.fail(error)
            raise
        # so that a backward through a graph from before the step notices, as after any step
        torch.autograd.graph.increment_version([parameter for parameter, _ in self._homes])

    def _gather_lone(self) -> None:
        """Parameters that are in no bucket move only if they were frozen with a gradient."""
        for parameter, placement in self._lone:
            for rank in range(self.world_size if parameter.grad is not None else 0):
                owned = placement.owned_by(rank)
                if owned:
                    options = dist.BroadcastOptions()
                    options.rootRank, options.rootTensor = rank, 0
                    part = flat_view(parameter.data)[owned.start : owned.stop]
                    self.reducer.groups.waits.wait(self.reducer.group.broadcast([part], options))


def _members(bucket: Bucket) -> tuple[int, ...]:
    return tuple(map(id, bucket.parameters))


@dataclass
class _Gradients:
    """Reduced gradients on the move: this rank's pieces, and by name what each rank has added alone since."""

    pieces: PieceState = field(default_factory=dict)
    local: dict[str, torch.Tensor | None] = field(default_factory=dict)


def _description(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
