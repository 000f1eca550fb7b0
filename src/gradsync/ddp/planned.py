"""What a reducer synchronises: which parameters, in which buckets, and what it knows of their gradients.

The plan changes between passes: after the first one, when parameters come, go or are converted, with a communication
hook and with a sharded optimizer. Gradients that a pass has left stay known as its results throughout. How a pass
runs is told in ``reducer``.
"""

import itertools
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import nn

from gradsync.comm.groups import Group
from gradsync.ddp.agreement import NamedParameter, plan_digest
from gradsync.ddp.bucket import Bucket, local_grad, local_tensor
from gradsync.ddp.carried import CarriedSums
from gradsync.ddp.comm_hooks import HookedCollective
from gradsync.ddp.control import num_words
from gradsync.ddp.engine_groups import EngineGroups
from gradsync.ddp.ownership import claim, owns
from gradsync.ddp.parameter_hooks import ParameterHooks
from gradsync.ddp.plan import Plan, default_caps, make_plan, parameter_spec
from gradsync.ddp.readiness import Readiness
from gradsync.ddp.reduced import is_reduced
from gradsync.ddp.settings import Reduction, Settings
from gradsync.ddp.sharding import Sharding
from gradsync.ddp.tuning import ReadyTimes
from gradsync.ddp.watch import ModuleWatch

_serials = itertools.count()


class Planned:
    """The parameters of one module and the buckets of their gradients; see the module's docstring."""

    synchronizes: bool
    gradient_weight: float

    def __init__(self, watch: ModuleWatch, groups: EngineGroups, settings: Settings, is_attached: bool = True) -> None:
        self.watch = watch
        self.groups = groups
        self.settings = settings
        self.serial = next(_serials)
        self.rank: int = groups.buckets.rank()
        self.world_size: int = groups.buckets.size()
        self.hook: HookedCollective | None = None
        self.sharding: Sharding | None = None
        self.parameters: list[nn.Parameter] = []
        self.parameter_ids: frozenset[int] = frozenset()
        self.is_spread = False
        """Whether the parameters lie on several devices."""
        self.buckets: list[Bucket] = []
        self.strays: dict[int, nn.Parameter] = {}
        """Parameters, by id, that a backward without synchronisation may have reached before they were planned."""
        self.carried = CarriedSums(self.rank)
        self.touched = bytearray()
        """For each parameter, whether anything was accumulated since it was last synchronised."""
        self._hooks = ParameterHooks(self)
        self._is_detached = not is_attached
        self._keeps_apart = False
        self.times: ReadyTimes | None = None
        """When gradients arrive, while that is measured."""
        self.is_order_agreed = False
        """Whether the ranks have agreed on the order of gradients for these parameters."""
        known = claim(self, [p for _, p in watch.all_parameters()])
        self._install(self._owned(), unsynchronized=known.unsynchronized)
        self._adopt_frozen(known.reached)

    @property
    def group(self) -> Group:
        """The group that carries the buckets."""
        return self.groups.buckets

    @property
    def control_group(self) -> Group:
        """The group that carries everything else, in CPU tensors."""
        return self.groups.control

    def on_gradient(self, index: int) -> None:
        """Take note of a contribution."""
        raise NotImplementedError

    def carry(self, index: int) -> None:
        """Take note that a contribution is about to be accumulated."""
        raise NotImplementedError

    def settle(self) -> None:
        """Raise if a pass failed; complete one whose backward raised."""
        raise NotImplementedError

    def _install(
        self,
        named: list[NamedParameter],
        new_results: Mapping[int, torch.Tensor] | None = None,
        unsynchronized: Collection[int] = (),
    ) -> None:
        """Take these parameters as the ones to synchronise, and plan their buckets anew.

        ``new_results`` are gradients, by the parameter's id, that were reduced outside of the buckets;
        ``unsynchronized`` the ids of others that hold a gradient of this rank alone.
        """
        if self.sharding is not None:
            self.sharding.check_members(named)
        touched = self.unsynchronized_ids().union(unsynchronized)
        results = {**self._results(), **(new_results or {})}
        known = {*results, *touched, *self.parameter_ids}
        for parameter in [p for _, p in named if id(p) not in known]:
            grad = local_grad(parameter)  # of a pass of another wrapper, or from before it was frozen
            if grad is None or not is_reduced(grad):
                continue
            if self.carries_sums:
                results[id(parameter)] = grad
            else:
                touched.add(id(parameter))  # there may be something on top, and a mean of equal values is the value
        self.strays = {}
        self.names = [name for name, _ in named]
        self.parameters = [p for _, p in named]
        self.parameter_ids = frozenset(map(id, self.parameters))
        sparse = self.watch.sparse_names()
        self.specs = [parameter_spec(name, local_tensor(p), name in sparse) for name, p in named]
        self.is_spread = len({spec.device for spec in self.specs}) > 1
        self.touched = bytearray(id(p) in touched for p in self.parameters)
        self.watch.accept()
        self._register_hooks()
        self.readiness = Readiness(len(named))
        self.times = None
        self.is_order_agreed = False
        self._use_plan(self._plan_for(reversed(range(len(named)))), results)

    def unsynchronized_ids(self) -> set[int]:
        """Return the ids of the parameters that something was accumulated on since they were last synchronised."""
        return {id(p) for p, is_touched in zip(self.parameters, self.touched, strict=True) if is_touched}

    def reached_ids(self) -> set[int]:
        """See ``Owner``."""
        return {*self.parameter_ids, *self.strays}

    @property
    def carries_sums(self) -> bool:
        """Whether a gradient that a pass has left must be kept apart from what is added to it; see ``carried``."""
        is_apart = self.settings.reduction is not Reduction.MEAN or self._keeps_apart
        return is_apart and self.sharding is None

    def keep_apart(self) -> None:
        """From now on put means aside, too: a rank that has run out of batches does not have them to be averaged."""
        if not self._keeps_apart:
            self._keeps_apart = True
            self._register_hooks()

    def watch_unplanned(self) -> None:
        """Watch parameters that are trained, but will be planned with the next pass only.

        All of them, also those that this rank does not reach: the others have to know as well.
        """
        if self._is_detached or not self.watch.has_changed():
            return
        for _, parameter in self._owned():
            if id(parameter) not in self.parameter_ids:
                self.strays[id(parameter)] = parameter
                if self.carries_sums:
                    self._hooks.register_unplanned(parameter)

    def carry_unplanned(self, parameter: torch.Tensor, is_watched: bool = True) -> None:
        """As ``carry``, for a parameter that is not planned."""
        self.carried.review(parameter, f"the unfrozen parameter of shape {tuple(parameter.shape)}")
        has_merged = self.settings.reduction is Reduction.MEAN and id(parameter) in self.strays
        if is_reduced(local_grad(parameter)) and not has_merged:
            self.carried.put_aside(parameter)
        if is_watched:
            self.carried.watch(parameter)

    def _plan_for(self, order: Iterable[int]) -> Plan:
        slicing = None if self.sharding is None else self.sharding.slicing
        return make_plan(self.specs, order, self.settings.caps_bytes or default_caps(self.specs), slicing)

    def _owned(self) -> list[NamedParameter]:
        """Return the trainable parameters that no later wrapper has taken over."""
        return [(name, p) for name, p in self.watch.trainable() if owns(self, p)]

    @property
    def keeper(self) -> object | None:
        """See ``Owner``."""
        return self.watch.wrapper

    def review_ownership(self) -> None:
        """Plan anew if another wrapper has taken some of the parameters over, or has given them back."""
        if self.keeper is None:
            if not all(owns(self, p) for p in self.parameters):
                self.detach()  # what is left of its graphs goes to the others
            return
        owned = self._owned()
        if [id(p) for _, p in owned] == [id(p) for p in self.parameters]:
            return
        # What another wrapper knew of gradients has gone with it.
        grads = {id(p): local_grad(p) for _, p in self.watch.all_parameters() if id(p) not in self.parameter_ids}
        local = [key for key, g in grads.items() if g is not None and (not is_reduced(g) or not self.carries_sums)]
        self._install(owned, unsynchronized=local)
        self._adopt_frozen(local)

    def _adopt_frozen(self, keys: Collection[int]) -> None:
        """Let the next pass reduce what another wrapper's parameters had to be reduced when they were frozen."""
        if self.world_size > 1:
            strays = [p for _, p in self.watch.all_parameters() if id(p) in keys and not p.requires_grad]
            self.strays.update((id(p), p) for p in strays)

    def _results(self) -> dict[int, torch.Tensor]:
        """Return the gradients that are the result of a pass, by the parameter's id."""
        return {id(p): view for bucket in self.buckets for p, view in bucket.results()}

    def holds_result(self, index: int) -> bool:
        """Whether the parameter's gradient is what a pass left there, and all ranks have the same."""
        number = self.bucket_of[index]
        if number < 0:
            return is_reduced(self.parameters[index].grad)
        return self.buckets[number].holds_result(index)

    def _use_plan(self, plan: Plan, results: dict[int, torch.Tensor]) -> None:
        """Make the buckets of a plan, and move the gradients of the last pass into their memory."""
        self.plan = plan
        self.bucket_of = plan.bucket_of
        self._plan_digest = plan_digest(plan)
        words = num_words(len(self.specs), self.world_size)
        last = plan.buckets[-1] if plan.buckets else None
        self._words_ride = (
            last is not None
            and last.dtype == torch.float32
            and last.device.type == "cpu"
            and self.hook is None
            and self.sharding is None
        )
        self._words = None if self._words_ride else torch.zeros(words, dtype=torch.float32, device="cpu")
        self.buckets = self._make_buckets(plan, words) if self.sharding is None else self.sharding.make_buckets(plan)
        for bucket in self.buckets:
            bucket.adopt(results)
        self._waits_for_end = bytearray(len(self.specs))
        for index in (*plan.sparse, *(last.indices if last is not None else ())):
            self._waits_for_end[index] = 1

    def _make_buckets(self, plan: Plan, words: int) -> list[Bucket]:
        return [
            Bucket(
                number,
                bucket_plan,
                self.specs,
                [self.parameters[i] for i in bucket_plan.indices],
                words if self._words_ride and bucket_plan is plan.buckets[-1] else 0,
                self.groups.allocate,
            )
            for number, bucket_plan in enumerate(plan.buckets)
        ]

    def _register_hooks(self) -> None:
        if self._is_detached:
            return
        self._hooks.register(self.parameters, before_too=self.carries_sums)

    def detach(self) -> None:
        """Synchronise no gradient any more."""
        self._hooks.remove()
        self._is_detached = True

    def attach(self) -> None:
        """Synchronise gradients again."""
        self._is_detached = False
        self._register_hooks()

    def succeed(self, other: "Planned") -> None:
        """Go on where another reducer of the same module is; what it knew of gradients was taken over with them."""
        self.synchronizes = other.synchronizes
        self.gradient_weight = other.gradient_weight
        if other._keeps_apart:
            self.keep_apart()

    def use_hook(self, hook: HookedCollective) -> None:
        """Let a communication hook do the collectives of the buckets from now on."""
        self.hook = hook
        self._use_plan(self.plan, self._results())

    def use_sharding(self, sharding: Sharding) -> None:
        """Leave on each rank only its slices of the reduced gradients from now on; collective."""
        self.settle()
        touched = self.unsynchronized_ids()
        results = {key: grad for key, grad in self._results().items() if key not in touched}
        local = self._lift_carried(results)
        self.sharding = sharding
        self._register_hooks()
        order = [index for bucket in self.plan.buckets for index in bucket.indices]
        self._use_plan(self._plan_for(order), results)
        for parameter, grad in local:
            assert parameter.grad is not None
            parameter.grad.add_(grad)

    def _lift_carried(self, results: dict[int, torch.Tensor]) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Move sums that are aside to ``results``, and return what this rank has added on top of them.

        Slices and what is on top of them are apart in any case.
        """
        local = []
        for index, parameter in enumerate(self.parameters if self.carried else ()):
            self.carried.review(parameter, self.names[index])
            total = self.carried.take(parameter)
            if total is not None:
                results[id(parameter)] = total
                if parameter.grad is not None:
                    local.append((parameter, parameter.grad))
        return local
