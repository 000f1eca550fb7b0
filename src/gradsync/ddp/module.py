"""What the user holds: ``DistributedDataParallel``.

Puts together the parts (watch, reducer, buffers, hooks, join) and mirrors the surface of torch's class of
the same name; the less used part of that surface is in ``surface``. How a pass works is told in ``reducer``.
"""

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.utils import _to_kwargs

from gradsync.comm.groups import broadcast_tensors
from gradsync.comm.waits import wait_for
from gradsync.ddp import arguments, guard
from gradsync.ddp.agreement import check_same_hook
from gradsync.ddp.comm_hooks import CommHook, name_of
from gradsync.ddp.compiler import keep_compiler_out
from gradsync.ddp.engine_groups import EngineGroups
from gradsync.ddp.join import Announcement, DDPJoinHook, WatchedJoin, announce, hook_arguments
from gradsync.ddp.outputs import find_tensors
from gradsync.ddp.plan import MIB, caps_from_mib
from gradsync.ddp.recording import report_of
from gradsync.ddp.reducer import Reducer
from gradsync.ddp.replica_check import DEFAULT_EVERY
from gradsync.ddp.replicas import (
    Description,
    broadcast_state,
    check_contract,
    check_parameters,
    describe_buffers,
    describe_parameters,
    describe_values,
    have_equal_shapes,
    shapes_of_rank,
    verify,
)
from gradsync.ddp.report import Report
from gradsync.ddp.settings import Reduction, Settings
from gradsync.ddp.surface import BROADCAST_BUCKET_BYTES, TorchSurface
from gradsync.ddp.sync_batchnorm import run_on_cpu
from gradsync.ddp.watch import ModuleWatch
from gradsync.ddp.window import Window
from gradsync.errors import ConfigError, ContractError

_CPU = torch.device("cpu")


class DistributedDataParallel(TorchSurface):
    """Trains replicas of one module on several ranks by averaging their gradients during backward.

    A drop-in for ``torch.nn.parallel.DistributedDataParallel`` with its arguments and its own engine. With
    default arguments every legal program gets the gradients of one process on the whole batch, or an error on
    every rank in the same step.

    Args:
        module: the model; it becomes ``ddp.module``, and keys of ``state_dict()`` get the prefix ``module.``.
        device_ids: None, or the one GPU that inputs are moved to; None for CPU and multi-device modules.
        output_device: accepted for compatibility.
        dim: accepted for compatibility.
        broadcast_buffers: deprecated spelling of ``forward_sync_buffers``.
        init_sync: compare the models of all ranks at construction and start them from rank 0's values.
        process_group: the ranks that hold replicas; the default group if None.
        bucket_cap_mb: size limit of a bucket in MiB; None means 1 MiB for the first and a tenth of the model, from 1
            to 25 MiB, for the others. "auto": measure during the first passes when gradients arrive and what the link
            costs, and then cut the buckets so that the last one is done as early as possible.
        find_unused_parameters: accepted; unused parameters need no flag.
        check_reduction: deprecated, without effect.
        gradient_as_bucket_view: accepted; gradients are views of the buckets, and a gradient that is still held
            elsewhere is never overwritten.
        static_graph: accepted; the order of gradients is learned in any case.
        delay_all_reduce_named_params: accepted together with ``param_to_hook_all_reduce``; these parameters are
            synchronised like all others.
        param_to_hook_all_reduce: see ``delay_all_reduce_named_params``.
        mixed_precision: torch's ``_MixedPrecision``: dtypes for the parameters while they run, for buffers, and for
            gradients on the wire. Parameters, gradients and optimizer state stay in full precision.
        device_mesh: a one-dimensional mesh in place of ``process_group``.
        skip_all_reduce_unused_params: accepted, without effect.
        bucket_cap_mb_list: limits in MiB bucket by bucket; the last one repeats.
        batched_grad_copy: accepted; gradients are always copied in one call a bucket.
        forward_sync_buffers: send rank 0's buffers to all ranks before a training forward; None means True.
        reduction: ``"mean"`` divides the sum by the number of ranks, ``"sum"`` doesn't, ``"weighted"`` divides it by
            the total given to ``add_gradient_weight``.
        soft_limit_s: how long a rank waits for the others before all of them raise an error that says where each one
            is; None for that of ``init_process_group`` (60 s), 0 for none.
        check_replicas_every: compare all ranks' parameters in every so many-th pass; None means 100, or 0 (never)
            without ``init_sync``. Not done with a communication hook.
        check_finite: look at every rank's gradients before they are averaged, and raise a NonFiniteError that names
            rank, parameter and bucket if some are infinite or not a number.

    Raises:
        TypeError: ``module`` is no module.
        ValueError: there is no process group, or arguments contradict each other.
        RuntimeError: nothing to train, uninitialised or expanded parameters.
        ContractError: on all ranks, if their models differ; the first difference is named.
    """

    def __init__(  # noqa: C901 - mirrors torch's signature, twenty arguments
        self,
        module: nn.Module,
        device_ids: Sequence[Any] | None = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: Any = None,
        bucket_cap_mb: float | Literal["auto"] | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Sequence[tuple[str, nn.Parameter]] | None = None,
        param_to_hook_all_reduce: nn.Parameter | None = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: Sequence[float] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        *,
        reduction: str = "mean",
        soft_limit_s: float | None = None,
        check_replicas_every: int | None = None,
        check_finite: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        keep_compiler_out()
        arguments.check_module(module)
        arguments.warn_deprecated(check_reduction)
        self.process_group = arguments.resolve_group(process_group, device_mesh)
        if device_mesh is not None:
            self.device_mesh = device_mesh
        self.module = module
        self.parameters_to_ignore = arguments.ignored_names(module)
        self.forward_sync_buffers = arguments.resolve_buffer_sync(broadcast_buffers, forward_sync_buffers)
        self.find_unused_parameters = find_unused_parameters
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.static_graph = static_graph
        self.batched_grad_copy = batched_grad_copy
        self.skip_all_reduce_unused_params = skip_all_reduce_unused_params
        self.mixed_precision = mixed_precision
        self.dim = dim
        self.require_forward_param_sync = True
        run_on_cpu(module, soft_limit_s)
        self._watch = ModuleWatch(self, self.parameters_to_ignore)
        named = self._watch.all_parameters()
        self._set_devices(named, device_ids, output_device)
        self._agree(
            arguments.first_problem(
                lambda: arguments.check_types(
                    device_ids, mixed_precision, self.forward_sync_buffers, bucket_cap_mb_list
                ),
                lambda: arguments.check_delay(
                    delay_all_reduce_named_params, param_to_hook_all_reduce, module.parameters()
                ),
                lambda: arguments.check_caps(bucket_cap_mb, bucket_cap_mb_list),
                lambda: arguments.check_reduction(reduction),
                lambda: arguments.check_soft_limit(soft_limit_s),
                lambda: arguments.check_interval(check_replicas_every),
                lambda: check_parameters(named),
                lambda: arguments.check_devices([p for _, p in named], device_ids, output_device),
            ),
            init_sync,
            {
                "bucket limits (MiB)": str([bucket_cap_mb, bucket_cap_mb_list]),
                "reduction": str(reduction),
                "forward_sync_buffers": str(self.forward_sync_buffers),
                "mixed_precision": str(mixed_precision),
                "check_replicas_every": str(check_replicas_every),
                "check_finite": str(check_finite),
            },
        )
        if check_replicas_every is None:
            check_replicas_every = DEFAULT_EVERY if init_sync else 0
        self._settings = Settings(
            caps_from_mib(bucket_cap_mb, bucket_cap_mb_list),
            Reduction(reduction),
            check_replicas_every,
            check_finite,
            soft_limit_s=soft_limit_s,
            tunes_buckets=bucket_cap_mb == "auto",
        )
        self.bucket_bytes_cap_list = [int(cap * MIB) for cap in bucket_cap_mb_list or ()]
        self.bucket_bytes_cap_default = bucket_cap_mb is None and not bucket_cap_mb_list
        self.broadcast_bucket_size = BROADCAST_BUCKET_BYTES
        self.use_side_stream_for_tensor_copies = False
        self._use_python_reducer = False
        self._delay_all_reduce_params = [p for _, p in delay_all_reduce_named_params or ()]
        self._delay_grad_buffer = None
        arguments.warn_lonely_group(self.process_group)
        self._connect()
        self._warn_static_with_unused()

    # ------------------------------------------------------------- construction

    def _set_devices(
        self, named: Sequence[tuple[str, nn.Parameter]], device_ids: Sequence[Any] | None, output_device: Any
    ) -> None:
        self.device: torch.device = named[0][1].device if named else _CPU
        self.device_type = self.device.type
        self.is_multi_device_module = len({p.device for _, p in named}) > 1
        has_ids = bool(device_ids) and isinstance(device_ids, Sequence) and self.device_type != "cpu"
        self.device_ids = [_index(d) for d in device_ids or ()] if has_ids else None
        self.output_device = output_device if device_ids else None

    def _agree(self, problem: Exception | None, init_sync: bool, settings: dict[str, Any]) -> None:
        """Compare module and settings with those of the other ranks, then start everywhere from rank 0's values.

        What is wrong on one rank alone is told to the others first, so that they don't wait for it.
        """
        group = self.process_group
        is_shared = init_sync and group.size() > 1
        if is_shared:
            facts: Description = [["the check of the arguments", "check", str(problem or "fine")]]
            facts += [[name, "setting", value] for name, value in settings.items()]
            if problem is None:
                facts += describe_parameters(self._watch.all_parameters()) + describe_buffers(self._watch.buffers())
                facts += describe_values(self._watch.sparse_buffers())
            check_contract(group, facts, self.device, group.rank())
        if problem is not None:
            raise problem
        if is_shared:
            broadcast_state(group, self._synchronized_state(), 0, group.rank())

    def _connect(self, original: "DistributedDataParallel | None" = None) -> None:
        """Make the groups and the reducer; a copy starts with the groups of its original."""
        group = self.process_group
        self._comm_hooks: list[tuple[Any, Any]] = []
        self._window = Window()
        original_groups = None if original is None else original.reducer.groups
        groups = EngineGroups(group, self.device, original_groups, self._settings.soft_limit_s)
        # A lone rank has nothing to synchronise, and autograd looks at a hook that was ever set: 1 us a gradient.
        self._is_active = group.size() > 1 or self._settings.reduction == "weighted"
        self.reducer = Reducer(self._watch, groups, self._settings, is_attached=self._is_active)
        if self._is_active:
            guard.watch(self.reducer)
        self._start_surface()
        self._look_for_duties()

    @property
    def _state_group(self) -> Any:
        return self.reducer.group

    def _synchronized_state(self) -> list[torch.Tensor]:
        return [p for _, p in self._watch.all_parameters()] + list(self._watch.buffers().values())

    # ------------------------------------------------------------- forward

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; synchronise buffers before it where they are due, and watch its outputs for backward."""
        if self._is_transparent:
            return self._modules["module"](*inputs, **kwargs)  # type: ignore[misc]
        inputs, kwargs = self._pre_forward(*inputs, **kwargs)
        return self._post_forward(self._run_ddp_forward(*inputs, **kwargs))

    @torch._disable_dynamo(recursive=True)  # type: ignore[attr-defined, untyped-decorator]
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> tuple[Any, Any]:
        self._before_forward()
        if self._is_active:
            self.reducer.settle()
            self.reducer.groups.waits.enter("forward", self.reducer.num_passes)
        self._window.is_timed = self.training and torch.is_grad_enabled()
        if self._window.is_timed:
            self.reducer.timeline.forward_begins()
        self._synchronize_before_forward()
        if self.device_ids:
            moved, moved_kwargs = _to_kwargs(inputs, kwargs, self.device, self.use_side_stream_for_tensor_copies)
            inputs, kwargs = moved[0], moved_kwargs[0]
        return self._precision.cast_inputs(inputs, kwargs)

    @torch._disable_dynamo(recursive=True)  # type: ignore[attr-defined, untyped-decorator]
    def _post_forward(self, output: Any) -> Any:
        if self._window.sends_buffers_after_forward:
            self._synchronize_buffers(0)
        if self._window.is_timed:
            self.reducer.timeline.forward_ends()
        if torch.is_grad_enabled():
            watched = [tensor for tensor in find_tensors(output) if tensor.requires_grad and not tensor.is_leaf]
            if self._is_active:
                self.reducer.prepare_for_backward(watched)
            self._precision.watch_outputs(watched)
        return output

    def _synchronize_before_forward(self) -> None:
        self._window.sends_buffers_after_forward = False
        if not (self.training and torch.is_grad_enabled()):
            return
        sends_buffers = self.will_sync_module_buffers()
        source = 0
        if self._join_config.enable and self._is_active:
            Join.notify_join_context(self)
            self.reducer.keep_apart()
            mine = Announcement(self.reducer.rank, self.reducer.synchronizes, sends_buffers)
            coming = announce(self, mine)
            self._look_at_window()
            if coming.is_anyone_joined and coming.synchronizes and self._window.forwards_since_backward:
                raise ContractError(
                    f"rank {self.reducer.rank}: a second forward before backward, while another rank has run out of "
                    f"batches: join() supports one forward a backward, since the joined rank has to follow"
                )
            source = coming.source
        if sends_buffers and self._buffers_wait_for_forward():
            self._window.sends_buffers_after_forward = True
        elif sends_buffers:
            self._synchronize_buffers(source)
        self._count_forward()

    def _count_forward(self) -> None:
        self._look_at_window()
        self._window.count_forward(self.reducer.synchronizes)

    def _look_at_window(self) -> None:
        self._window.look(self.reducer.num_backwards, self.reducer.num_passes)

    def will_sync_module_buffers(self) -> bool:
        """Whether the next training forward sends rank 0's buffers to all ranks.

        Once a window where forwards run without synchronisation, since their number may differ between ranks;
        before every forward elsewhere.
        """
        if not (self.forward_sync_buffers and self.require_forward_param_sync and self._watch.has_buffers()):
            return False
        if not self._is_active:
            return hasattr(self, "buffer_hook")
        self._look_at_window()
        if self.reducer.synchronizes:
            return not self._window.has_unsynced_forward
        return self._window.forwards == 0

    @torch.no_grad()
    def _broadcast_buffers(self, source: int) -> None:
        """Give all ranks rank ``source``'s buffers.

        While the graph of an earlier forward may still need the old values for its backward, the module gets new
        tensors; otherwise they are overwritten in place, so that other references to them stay valid.
        """
        named = self._watch.buffers()
        buffers = list(named.values())
        shapes = buffers
        if not have_equal_shapes(self.reducer.control_group, named):
            shapes = shapes_of_rank(self.reducer.control_group, named, source)
        received = broadcast_tensors(self._state_group, shapes, source)
        if self.reducer.rank == source:
            return
        for old, new in zip(buffers, received, strict=True):
            if self.reducer.has_open_graphs or old.shape != new.shape or old.dtype != new.dtype:
                self._watch.replace_buffer(old, new)
            else:
                old.copy_(new)

    # ------------------------------------------------------------- synchronisation on and off, and on demand

    @property
    def require_backward_grad_sync(self) -> bool:  # type: ignore[override]
        """Whether the next backward synchronises gradients; read when backward starts."""
        return self.reducer.synchronizes

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self.reducer.synchronizes = bool(value)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally in every backward inside; the next one outside reduces them whole."""
        before = self.reducer.synchronizes
        self.reducer.synchronizes = False
        try:
            yield
        finally:
            self.reducer.synchronizes = before

    def sync_gradients(self) -> None:
        """Synchronise what has been accumulated so far, without another backward; on all ranks together."""
        if self._is_active:
            self.reducer.synchronize()

    def sync_parameters(self) -> None:
        """Give all ranks rank 0's parameters and buffers, as at construction; after adding some, say. Collective."""
        if self.reducer.world_size > 1:
            broadcast_state(self._state_group, self._synchronized_state(), 0, self.reducer.rank)

    def sync_buffers(self, mode: str = "broadcast") -> None:
        """Make buffers equal on all ranks: rank 0's, or with ``mode="mean"`` the mean of floating ones; collective."""
        if mode not in ("broadcast", "mean"):
            raise ConfigError(f"sync_buffers takes mode 'broadcast' or 'mean', but got {mode!r}")
        if self.reducer.world_size == 1:
            return None
        if mode == "broadcast":
            return self._broadcast_buffers(0)
        with torch.no_grad():
            for buffer in self._watch.buffers().values():
                if buffer.is_floating_point() or buffer.is_complex():
                    total = buffer.detach() / self.reducer.world_size
                    wait_for(self._state_group, self._state_group.allreduce([total]))
                    buffer.copy_(total)
                else:
                    buffer.copy_(broadcast_tensors(self._state_group, [buffer], 0)[0])
        return None

    def verify_replicas(self) -> None:
        """Compare parameters and buffers bit by bit across ranks; collective.

        Raises:
            ContractError: on all ranks, naming the first tensor and the ranks that differ.
        """
        if self.reducer.world_size > 1:
            named = [*self._watch.all_parameters(), *self._watch.buffers().items()]
            verify(self._state_group, named, self.reducer.rank, self.device)

    def report(self) -> Report:
        """Return what was recorded of the last passes: times of every bucket, exposed communication, who is late."""
        return report_of(self.reducer)

    def add_gradient_weight(self, weight: float) -> None:
        """With ``reduction="weighted"``: say how many tokens or samples the coming backward's summed loss stands for.

        Weights add up over the accumulation steps of a window; the total over all ranks divides the gradients.
        """
        if self._settings.reduction != "weighted":
            raise ConfigError("add_gradient_weight needs DistributedDataParallel(..., reduction='weighted')")
        if not 0 <= weight < 2**44:
            raise ConfigError(f"a gradient weight is a number of tokens or samples, but got {weight!r}")
        self.reducer.gradient_weight += weight

    @torch.no_grad()
    def all_reduce_grads(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Average gradients that ``torch.autograd.grad`` returned, in place; collective.

        None must be None on all ranks. Returns the list, for convenience.
        """
        present = [g for g in grads if g is not None]
        scale = 1.0 if self._settings.reduction == "sum" else 1.0 / self.reducer.world_size
        if self.reducer.world_size > 1:
            for dtype in dict.fromkeys(g.dtype for g in present):
                same = [g for g in present if g.dtype == dtype]
                flat = torch.cat([g.reshape(-1) for g in same]).mul_(scale)
                wire = torch.view_as_real(flat) if flat.is_complex() else flat
                wait_for(self._state_group, self._state_group.allreduce([wire]))
                for g, part in zip(same, torch.split(flat, [g.numel() for g in same]), strict=True):
                    g.copy_(part.view(g.shape))
        return list(grads)

    def reset_after_failure(self) -> None:
        """Forget a failed pass; on all ranks, and only while the process group still works."""
        self.reducer.reset_after_failure()

    # ------------------------------------------------------------- hooks

    def register_comm_hook(self, state: object, hook: CommHook) -> None:  # type: ignore[override]
        """Let ``hook(state, bucket) -> Future[Tensor]`` reduce each bucket; it does the dividing too.

        Raises:
            TypeError: it cannot be called.
            ValueError: it is no function of (state, bucket).
            RuntimeError: there is a hook already.
        """
        self._check_comm_hook(hook)
        self._claim_hook()
        self._comm_hooks.append((hook, state))
        self._logging.comm_hook = str(getattr(hook, "__qualname__", hook))
        if self.reducer.num_passes:  # before the first pass it is compared then
            check_same_hook(self.process_group, name_of(hook), self.device)
        self._reduce_with(state, hook)
        self._activate()

    def _activate(self) -> None:
        """Run passes even if this is the only rank."""
        if not self._is_active:
            self.reducer.attach()
            self._is_active = True
        self._look_for_duties()

    def _look_for_duties(self) -> None:
        """A lone rank's wrapper that neither casts, moves nor hooks anything costs nothing."""
        has_duties = self._is_active or self.mixed_precision or self.device_ids or "buffer_hook" in self.__dict__
        self._is_transparent = not has_duties

    # ------------------------------------------------------------- uneven inputs

    def join(
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """Return a context in which ranks may run out of batches at different times."""
        optimizer = [] if self.reducer.sharding is None else [self.reducer.sharding.tenant]
        return WatchedJoin(
            self,
            optimizer,
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self, **kwargs: Any) -> DDPJoinHook:
        """Return what torch's ``Join`` calls on a rank that has run out of batches."""
        self._logging.has_joined = True
        return DDPJoinHook(self, hook_arguments(kwargs))

    @property
    def join_device(self) -> torch.device:
        """The device of the collectives of ``Join``."""
        return self.device

    @property
    def join_process_group(self) -> Any:
        """The group of the collectives of ``Join``."""
        return self.process_group

    # ------------------------------------------------------------- copies

    def __deepcopy__(self, memo: dict[int, Any]) -> "DistributedDataParallel":
        """Return an independent wrapper around a copy of the module, on the same process group."""
        other = self.__class__.__new__(self.__class__)
        nn.Module.__init__(other)
        Joinable.__init__(other)
        memo[id(self)] = other
        for name, value in self._plain_state().items():
            setattr(other, name, copy.deepcopy(value, memo))
        other.process_group = self.process_group
        other.module = copy.deepcopy(self.module, memo)
        other.training = self.training
        other._watch = ModuleWatch(other, other.parameters_to_ignore)
        other._connect(original=self)
        other.require_backward_grad_sync = self.require_backward_grad_sync
        return other

    def __getstate__(self) -> dict[str, Any]:
        state = self._plain_state()
        state["module"] = self.module
        state["training"] = self.training
        default = dist.is_initialized() and self.process_group is dist.distributed_c10d._get_default_group()
        state["ranks"] = None if default else dist.get_process_group_ranks(self.process_group)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__init__(self)
        Joinable.__init__(self)
        keep_compiler_out()
        state = dict(state)
        ranks = state.pop("ranks")
        module = state.pop("module")
        training = state.pop("training")
        for name, value in state.items():
            setattr(self, name, value)
        self.process_group = arguments.resolve_group(_group_of(ranks), None)
        self.module = module
        self.training = training
        self._watch = ModuleWatch(self, self.parameters_to_ignore)
        self._connect()

    def _plain_state(self) -> dict[str, Any]:
        """Return the attributes that survive copying and pickling: no groups, no reducer, no module."""
        left_out = {
            "process_group",
            "reducer",
            "device_mesh",
            "_watch",
            "_join_config",
            "training",
            "_comm_hooks",
            "_precision",
            "_in_backward",
            "_buffer_futures",
            "_window",
            "logger",
        }
        return {
            name: value
            for name, value in self.__dict__.items()
            if name not in left_out and name not in _MODULE_INTERNALS
        }


_MODULE_INTERNALS = frozenset(nn.Module().__dict__)


def _group_of(ranks: Sequence[int] | None) -> Any:
    if ranks is None:
        return None
    for group in dist.distributed_c10d._world.pg_map:
        if dist.get_process_group_ranks(group) == list(ranks):
            return group
    return dist.new_group(list(ranks), use_local_synchronization=True)


def _index(device: Any) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.cuda.current_device() if index is None else index
