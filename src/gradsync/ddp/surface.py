"""The rest of torch's class: what programs and frameworks use on it beside forward, backward and ``no_sync``.

Whatever torch's class does through its compiled Reducer is done here through the engine, or says that it
belongs to torch alone. The wrapper itself is in ``module``.
"""

import contextlib
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel.distributed import _BufferCommHook, _BufferCommHookLocation

from gradsync.comm.groups import group_timeout
from gradsync.comm.waits import FutureEnd
from gradsync.ddp.backward import in_distributed_autograd
from gradsync.ddp.comm_hooks import HookedCollective, check_hook
from gradsync.ddp.compression import fp16_compress_hook, sum_in
from gradsync.ddp.in_backward import OptimizersInBackward, make_fused
from gradsync.ddp.logging_data import LoggingData, Record
from gradsync.ddp.mixed_precision import FullPrecision, choose_precision
from gradsync.ddp.plan import DEFAULT_CAP_BYTES, MIB
from gradsync.ddp.reducer import Reducer
from gradsync.errors import ConfigError

if TYPE_CHECKING:
    from gradsync.ddp.module import DistributedDataParallel

TorchDDP = nn.parallel.distributed.DistributedDataParallel

_PASSES_BEFORE_NOTE = 4
BROADCAST_BUCKET_BYTES = 250 * MIB


class TorchSurface(TorchDDP):
    """Mixed into the wrapper; see the module's docstring."""

    reducer: Reducer  # type: ignore[assignment]
    _precision: FullPrecision

    # ------------------------------------------------------------- what the wrapper calls

    def _start_surface(self) -> None:
        """Set up what needs a fresh reducer."""
        ddp = self._ddp
        self._precision = choose_precision(self.mixed_precision, self.module)
        self._in_backward = OptimizersInBackward()
        self._buffer_futures: list[Any] = []
        self._num_passes_without_unused = 0
        self.logger = LoggingData(ddp)  # type: ignore[assignment]
        self.reducer.backward_over = self._precision.restore
        self.reducer.pass_done = _weak_call(self._after_pass)
        if self._precision.reduce_dtype is not None:
            self._reduce_with(self.reducer.group, sum_in(self._precision.reduce_dtype), divides=False)

    def _before_forward(self) -> None:
        """Do what is due before a forward and is no synchronisation."""
        if torch._C._current_graph_task_id() == -1:
            self._precision.restore()
        if in_distributed_autograd():
            raise ConfigError(
                f"rank {self.reducer.rank}: a forward inside torch.distributed.autograd.context: gradients would go to "
                f"that context instead of param.grad, and would not be synchronised; run backward without the context"
            )
        if self._ddp._is_active:
            self._wait_for_buffers()
            self._in_backward.refresh(lambda: self._module_parameters)
            self._note_useless_search()

    def _after_pass(self) -> None:
        self._wait_for_buffers()
        self._in_backward.step()
        words = self.reducer.last_words
        if words is not None and self.find_unused_parameters:
            is_full = words.num_used_least == self.reducer.world_size
            self._num_passes_without_unused = self._num_passes_without_unused + 1 if is_full else -(10**9)

    def _note_useless_search(self) -> None:
        if self._num_passes_without_unused == _PASSES_BEFORE_NOTE and self.find_unused_parameters:
            self._num_passes_without_unused += 1
            warnings.warn(
                f"find_unused_parameters=True has no effect here: unused parameters need no flag, "
                f"and none was unused in {_PASSES_BEFORE_NOTE} passes; leave it out",
                UserWarning,
                stacklevel=6,
            )

    @property
    def _ddp(self) -> "DistributedDataParallel":
        return cast("DistributedDataParallel", self)

    # ------------------------------------------------------------- buffers

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[[Any, dict[str, torch.Tensor]], Any],
        comm_hook_location: _BufferCommHookLocation = _BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """Let ``hook(state, {name: buffer})`` synchronise the buffers, before or after a training forward.

        It may return futures; backward waits for them.
        """
        if not callable(hook):
            raise AssertionError(f"hook must be callable, got {type(hook).__name__}")
        self.buffer_hook = _BufferCommHook(hook, state, comm_hook_location)
        self._ddp._look_for_duties()

    def _synchronize_buffers(self, source: int) -> None:
        """Make the buffers equal on all ranks: by the user's hook, or by sending rank ``source``'s."""
        hook = self.__dict__.get("buffer_hook")
        if hook is None:
            self._ddp._broadcast_buffers(source)
            return
        with torch.no_grad():
            self._buffer_futures.extend(
                hook.buffer_comm_hook(hook.buffer_comm_hook_state, self.named_module_buffers) or ()
            )

    def _buffers_wait_for_forward(self) -> bool:
        hook = self.__dict__.get("buffer_hook")
        return hook is not None and hook.buffer_comm_hook_location is _BufferCommHookLocation.POST_FORWARD

    def _wait_for_buffers(self) -> None:
        while self._buffer_futures:
            future = self._buffer_futures.pop(0)
            self._ddp.reducer.groups.waits.wait(FutureEnd(future))
            future.wait()

    def _sync_buffers(self) -> None:
        """Send rank 0's buffers to all ranks; collective."""
        self._ddp._broadcast_buffers(0)

    def _assign_modules_buffers(self) -> None:
        """Do nothing: ``named_module_buffers`` looks at the module each time."""

    @property
    def named_module_buffers(self) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """The buffers that are synchronised, by name."""
        return self._ddp._watch.buffers()

    @property
    def modules_buffers(self) -> list[torch.Tensor]:  # type: ignore[override]
        """The buffers that are synchronised."""
        return list(self.named_module_buffers.values())

    # ------------------------------------------------------------- hooks and optimizers

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """Choose one of torch's compiled hooks: the average in full precision, or in float16."""
        kinds = dist.BuiltinCommHookType  # type: ignore[attr-defined]
        if not isinstance(comm_hook_type, kinds):
            raise TypeError(f"a built-in hook is a torch.distributed.BuiltinCommHookType, but got {comm_hook_type!r}")
        if comm_hook_type == kinds.FP16_COMPRESS:
            self._ddp.register_comm_hook(self.reducer.group, fp16_compress_hook)
        else:
            self._claim_hook()
            self._ddp._comm_hooks.append((comm_hook_type, None))
        self._logging.comm_hook = str(comm_hook_type)

    def _register_fused_optim(
        self, optim: type[torch.optim.Optimizer], *args: Any, optim_params: Any = None, **kwargs: Any
    ) -> None:
        """Let an optimizer of this class step at the end of each pass; it counts as the one communication hook.

        Raises:
            ValueError: its ``step`` needs a closure.
            RuntimeError: there is a hook already.
        """
        self._claim_hook()
        trainable = [p for p in self._module_parameters if p.requires_grad]
        parameters = trainable if optim_params is None else list(optim_params)
        self._in_backward.fused = make_fused(optim, parameters, args, kwargs)
        self._ddp._comm_hooks.append((optim, None))
        self._ddp._activate()

    def _claim_hook(self) -> None:
        if self.reducer.sharding is not None:
            raise ConfigError(
                "the gradients of this DistributedDataParallel are reduced for its ZeroRedundancyOptimizer, so no "
                "communication hook can reduce them; use one of the two"
            )
        if self._ddp._comm_hooks:
            raise RuntimeError("register_comm_hook or register_builtin_comm_hook can only be called once.")

    def _reduce_with(self, state: Any, hook: Any, divides: bool = True) -> None:
        timeout = group_timeout(self.process_group, self.device)
        self.reducer.use_hook(HookedCollective(state, hook, timeout, self.reducer.rank, divides))

    def _check_comm_hook(self, hook: Any) -> None:
        try:
            check_hook(hook)
        except (TypeError, ValueError) as error:
            self._logging.set_error_and_log(str(error))
            raise

    # ------------------------------------------------------------- the record

    @property
    def _logging(self) -> LoggingData:
        return cast("LoggingData", self.logger)

    def _get_ddp_logging_data(self) -> Record:
        """Return what is known of the construction and of the passes so far, with torch's keys (times excepted)."""
        return self._logging.record(self._ddp)

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """Accept a sample rate; nothing here is sampled."""
        if sample_rate < 1:
            self._log_and_throw(  # type: ignore[no-untyped-call]
                ValueError, "DDP runtime logging sample rate should be equal or greater than 1"
            )

    def _set_static_graph(self) -> None:
        """Accept the promise that the graph never changes; nothing depends on it."""
        if self.static_graph:
            warnings.warn("You've set static_graph to be True, no need to set it again.", stacklevel=2)
            return
        if self.reducer.num_backwards:
            self._log_and_throw(  # type: ignore[no-untyped-call]
                RuntimeError, "_set_static_graph() should be called before training loop starts"
            )
        self.static_graph = True
        self._warn_static_with_unused()

    def _warn_static_with_unused(self) -> None:
        if self.static_graph and self.find_unused_parameters:
            warnings.warn(
                "find_unused_parameters=True beside static_graph: gradsync will detect unused parameters "
                "automatically, with or without either flag; leave both out",
                stacklevel=4,
            )

    # ------------------------------------------------------------- another group

    def _update_process_group(self, new_process_group: Any) -> None:
        """Go on with other ranks, which all call this; ranks outside of the new group only keep their module.

        A communication hook stays; what it knows of groups is the caller's to update.
        """
        if new_process_group is None or new_process_group is dist.GroupMember.NON_GROUP_MEMBER:
            self.reducer.detach()
            return
        reducer, hooks, fused = self.reducer, self._ddp._comm_hooks, self._in_backward.fused
        reducer.detach()
        self.process_group = new_process_group
        self._ddp._connect()
        self.reducer.succeed(reducer)
        if reducer.hook is not None and reducer.hook.divides:
            self._reduce_with(reducer.hook.state, reducer.hook.hook)
        self._ddp._comm_hooks, self._in_backward.fused = hooks, fused
        if hooks:
            self._ddp._activate()

    # ------------------------------------------------------------- the compiler

    @contextlib.contextmanager
    def _inside_ddp_forward(self) -> Iterator[None]:
        """Tell Dynamo, which asks torch's class, whose buckets to split its graph at."""
        before = TorchDDP._active_ddp_module
        TorchDDP._active_ddp_module = cast(
            "TorchDDP", self if self.bucket_bytes_cap >= MIB else _ACTIVE_WITH_TINY_BUCKETS
        )
        try:
            yield
        finally:
            TorchDDP._active_ddp_module = before

    @classmethod
    def _get_active_ddp_module(cls) -> Any:
        return cls._active_ddp_module or TorchDDP._active_ddp_module

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        with self._inside_ddp_forward(), self._precision.running():
            return self.module(*inputs, **kwargs)

    # ------------------------------------------------------------- attributes that are read

    @property
    def bucket_bytes_cap(self) -> int:  # type: ignore[override]
        """Size limit of the largest bucket in bytes."""
        return int(min(max(self._ddp._settings.caps_bytes or [DEFAULT_CAP_BYTES]), sys.maxsize))

    @property
    def _has_rebuilt_buckets(self) -> bool:  # type: ignore[override]
        return self.reducer.is_order_agreed

    @property
    def _module_parameters(self) -> list[nn.Parameter]:  # type: ignore[override]
        return [p for _, p in self._ddp._watch.all_parameters()]

    @staticmethod
    def _get_data_parallel_params(module: nn.Module, named_params: bool = False) -> Iterator[Any]:
        """Yield the parameters of the module that a wrapper would not ignore, with their names if asked for."""
        for name, parameter in module.named_parameters():
            if not getattr(parameter, "_ddp_ignored", False):
                yield (name, parameter) if named_params else parameter

    def _clear_grad_buffer(self) -> None:
        """Do nothing: delayed parameters are reduced like all others."""


_ACTIVE_WITH_TINY_BUCKETS = types.SimpleNamespace(bucket_bytes_cap=MIB)
"""Stands for a wrapper whose buckets are smaller than Dynamo accepts."""


def _weak_call(method: Any) -> Callable[[], None]:
    """Return a function that calls a bound method as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        alive = reference()
        if alive is not None:
            alive()

    return call


_TORCHS_OWN = (
    "_check_and_sync_module_buffers",
    "_check_global_requires_backward_grad_sync",
    "_ddp_init_helper",
    "_delayed_all_reduce_hook",
    "_fire_reducer_autograd_hook",
    "_lazy_init",
    "_match_all_reduce_for_bwd_pass",
    "_match_unused_params_allreduce",
    "_module_wait_for_copy_hook",
    "_register_accum_grad_hook",
    "_register_delay_all_reduce_hook",
    "_root_copy_hook",
    "_setup_in_backward_optimizers",
    "_sync_final_model",
    "_sync_module_buffers",
)


def _refusal(name: str) -> Callable[..., NoReturn]:
    def method(self: TorchSurface, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} drives torch's own Reducer, which gradsync does not use")

    return method


for _name in _TORCHS_OWN:
    setattr(TorchSurface, _name, _refusal(_name))
