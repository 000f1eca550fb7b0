"""One pass of gradient synchronisation, told in the order in which it happens.

Words. *Pass*: one backward whose gradients are to be averaged. *Bucket*: one flat tensor holding the
gradients of several parameters. *Ready*: a parameter whose last contribution in this pass has arrived.
*Launch*: start the all-reduce of a bucket. *Control words*: what the ranks tell each other in every pass.

    backward starts      -> _begin_pass       first output hook or gradient hook; queues the end-of-backward callback
    a gradient arrives   -> on_gradient       counts; launches the buckets that are complete, in index order
    backward ends        -> end_backward      launches the rest; then all wait, read the control words,
                            finish_backward   fetches late contributions, points param.grad at the result

[Note: Launch order] Buckets are launched in index order on every rank, whatever order they become ready
in; otherwise ranks would pair different buckets in one collective. The last bucket is always launched by
the end-of-backward callback: its gradients are the last to arrive anyway, and only then are the control
words known.

[Note: One mutator] State changes only in gradient hooks and in the callback, which autograd runs one at
a time as long as all parameters sit on one device; works are waited on and never change state.

[Note: Several devices] Autograd has a thread for each device, and a thread sees the streams of its own device
only. So where the parameters lie on several ones, the hooks only write gradients down (which is atomic), whoever
comes first opens the pass under a lock, and all buckets, each of one device, are launched when backward is over:
the callback runs on the thread that called backward, after its streams have been made to wait for all others.

[Note: Averaging] Each rank scales its own contribution by 1/world before the sum, so that float16 cannot
overflow in it. A pass whose gradients already hold an average keeps it: the mean of equal values is the
value. That is not so for sums, where the part that is already synchronised is put aside (``carried``).

[Note: no_sync] Whether to synchronise is read when backward starts. Without synchronisation hooks only
note which parameters were touched; the next pass reduces what has accumulated, whole.

[Note: Late contributions] Launching early rests on a guess (see ``readiness``). A gradient that arrives
after its bucket has left goes into a fresh tensor; the control words tell all ranks which parameters were
late anywhere, and all run one more collective for just those. A wrong guess costs time, never a value,
and every rank issues the same collectives whatever its graph did.

[Note: Failure] After a failed collective the reducer runs no other one: it raises the same error until it
is reset.
"""

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from gradsync.comm.groups import broadcast_tensors
from gradsync.ddp.agreement import (
    NamedParameter,
    change_digest,
    check_abandoned,
    check_same_hook,
    check_same_pass,
    is_same_change,
    raise_other_change,
)
from gradsync.ddp.backward import is_accumulating
from gradsync.ddp.bucket import Bucket, local_tensor
from gradsync.ddp.compiler import refuse_compiled_autograd
from gradsync.ddp.control import (
    WORD_LIMIT,
    ControlWords,
    RankState,
    Slot,
    Words,
    read_words,
    split_weight,
    write_words,
)
from gradsync.ddp.end_of_backward import Attendance, attend
from gradsync.ddp.engine_groups import EngineGroups
from gradsync.ddp.finite_check import FiniteCheck, check_finite
from gradsync.ddp.ownership import claim, owns
from gradsync.ddp.plan import make_plan
from gradsync.ddp.planned import Planned
from gradsync.ddp.reducer_surface import ReducerSurface
from gradsync.ddp.replica_check import ReplicaCheck
from gradsync.ddp.rounds import reduce_newcomers, reduce_sparse
from gradsync.ddp.settings import Reduction, Settings
from gradsync.ddp.timeline import Timeline
from gradsync.ddp.tuned_plan import tuned_plan
from gradsync.ddp.tuning import ReadyTimes
from gradsync.ddp.watch import ModuleWatch
from gradsync.errors import ContractError, NonFiniteError, ReducerFailedError


class Reducer(Planned, ReducerSurface):
    """Synchronises the gradients of one module; see the module's docstring for the order of events."""

    def __init__(self, watch: ModuleWatch, groups: EngineGroups, settings: Settings, is_attached: bool = True) -> None:
        self.synchronizes = True
        self.divides_by_active_ranks = False
        self.num_passes = 0
        self.num_backwards = 0
        self.gradient_weight = 0.0
        self.backward_over: Callable[[], object] = lambda: None
        """Called first when a backward that began a pass is over."""
        self.pass_done: Callable[[], object] = lambda: None
        """Called when the gradients of a pass of this rank's own are in place."""
        self.timeline = Timeline(is_on_host=groups.is_on_host)
        self.replica_check = ReplicaCheck(settings.check_replicas_every)
        self.finite_check = FiniteCheck(settings.check_finite)
        self.last_words: ControlWords | None = None
        self.failure: str | None = None
        self._pass: weakref.ref[Attendance] | None = None
        self._opening = threading.RLock()
        """Held while a pass is opened; see [Note: Several devices]."""
        self._is_open = False
        self._is_complete = False
        self._unsynchronized_task = -1
        self._forward_thread = threading.get_ident()
        self._graphs: weakref.WeakSet[_Graph] = weakref.WeakSet()
        self._change: list[NamedParameter] | None = None
        self._passing: list[NamedParameter] = []
        """Parameters that are frozen again, but hold what a backward without synchronisation has left there."""
        self._converted: dict[int, torch.Tensor | None] = {}
        self._begin_s = self._backward_s = 0.0
        super().__init__(watch, groups, settings, is_attached)

    # ------------------------------------------------------------- the pass begins

    def watch_output(self, tensor: torch.Tensor) -> None:
        """Begin the pass when backward reaches this output, even if it reaches no parameter on this rank.

        A hook and not an autograd function: a function over several outputs would turn outputs that the
        loss left out into zero gradients.
        """
        if self._is_detached:
            return

        graph = _Graph()
        self._graphs.add(graph)

        def output_hook(_: torch.Tensor) -> None:
            graph.is_freed = not torch._C._autograd._get_current_graph_task_keep_graph()  # type: ignore[attr-defined]
            # Not a weak reference: a graph keeps its reducer, so that a wrapper may be gone before backward.
            with self._opening:
                if not self._in_pass:
                    self._hooks.come_last()
                    self._begin_pass()

        self._forward_thread = threading.get_ident()
        self._hooks.overlook(tensor.register_hook(output_hook))  # type: ignore[no-untyped-call]

    @property
    def has_open_graphs(self) -> bool:
        """Whether a backward may still go through the graph of an earlier forward, and use what that has saved."""
        return any(not graph.is_freed for graph in self._graphs)

    @property
    def _in_pass(self) -> bool:
        return self._pass is not None and self._pass() is not None

    @property
    def is_in_backward(self) -> bool:
        """Whether a synchronised backward is running right now."""
        return self._in_pass

    def settle(self) -> None:
        """Raise if a pass failed; complete one whose backward raised."""
        if self.failure is not None:
            raise ReducerFailedError(
                f"rank {self.rank}: an earlier pass failed, so no gradient is synchronised any more: {self.failure}; "
                f"end the program, or call reset_after_failure() on all ranks"
            )
        self.groups.waits.check()
        if self._is_open and not self._in_pass and torch._C._current_graph_task_id() == -1:
            self._complete_abandoned()

    def _begin_pass(self) -> bool:
        """Start a pass unless synchronisation is off; returns whether there is one."""
        if self._is_open:
            self._complete_abandoned()
        self.num_backwards += 1
        if not self.synchronizes:
            self.timeline.gradient_unsynced()
            self._look_for_unplanned()
            return False
        self.settle()
        refuse_compiled_autograd(self.rank)
        self._open_pass()
        self._pass = attend(self)
        self._hooks.write_down(self._not_waited_for())
        self._begin_s = time.perf_counter()
        return True

    def _look_for_unplanned(self) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._unsynchronized_task:  # else asked already: this runs with every gradient
            self._unsynchronized_task = task
            self.watch_unplanned()

    def _begin_once(self) -> bool:
        """Start a pass unless another thread has done so meanwhile; returns whether there is one."""
        with self._opening:
            return self._in_pass or self._begin_pass()

    def _not_waited_for(self) -> bytes | bytearray:
        """Mark the parameters whose gradients complete no bucket before backward is over."""
        if self.is_spread:
            return b"\1" * len(self.specs)  # see [Note: Several devices]
        if self.times is not None:
            return bytes(len(self.specs))  # every gradient's time is asked for
        return self._waits_for_end if self._expected is not None else b"\1" * len(self.specs)

    def _open_pass(self) -> None:
        self.groups.waits.enter("backward", self.num_passes)
        awaited = self.readiness.num_awaited(self.plan)
        has_changed = self.watch.has_changed()
        self._passing = [(name, p) for name, p in self._owned_strays() if not p.requires_grad]
        if has_changed or self._passing:
            self._change = [*self._owned(), *self._passing]
            self._carry_unplanned()
            awaited = [
                waiting + 1 for waiting in awaited
            ]  # which parameters the plan still fits is sorted out at the end
        self.readiness.start_pass()
        for bucket, waiting in zip(self.buckets, awaited, strict=True):
            bucket.start_pass(waiting)
        self._counts = self.readiness.counts
        self._expected = self.readiness.expected
        self._late: set[int] = set()
        self._cursor = 0
        self._is_complete = False
        self._is_open = True
        self.finite_check.start_pass()
        self.timeline.has_one_stream = not self.is_spread
        self.timeline.pass_begins(self.num_passes, len(self.buckets))

    # ------------------------------------------------------------- a gradient arrives

    def on_gradient(self, index: int) -> None:
        """Take note of a contribution; launch what it completes."""
        if (self._pass is None or self._pass() is None) and not self._begin_once():
            self.touched[index] = 1
            self.carried.leave(self.parameters[index])
            return
        self.touched[index] = 1
        self._counts[index] += 1
        if self.times is not None:
            self.times.current[index] = time.perf_counter() - self._begin_s
        if self._expected is None:
            self.readiness.order.append(index)
            return
        number = self.bucket_of[index]
        if number < 0:
            return
        bucket = self.buckets[number]
        if bucket.is_launched:
            self._late.add(index)
        elif self._counts[index] == self._expected[index]:
            bucket.waiting -= 1
            if bucket.waiting == 0:
                self.timeline.bucket_ready(number)
                self._launch_complete()

    def _launch_complete(self) -> None:
        """Launch, in order, the buckets that wait for nothing any more; never the last one."""
        while self._cursor < len(self.buckets) - 1 and self.buckets[self._cursor].waiting == 0:
            self._launch(self.buckets[self._cursor])
            self._cursor += 1

    def _launch(self, bucket: Bucket) -> None:
        with _phase(f"ddp::launch bucket {bucket.number}"):
            self._collect(bucket)
            self._start(bucket)

    def _collect(self, bucket: Bucket) -> None:
        self._put_carried_aside(bucket.plan.indices)
        self.finite_check.look(bucket.plan.indices, bucket.parameters)
        bucket.collect(self.touched, self.contribution_scale)

    def _start(self, bucket: Bucket) -> None:
        try:
            if self.hook is not None:
                self.hook.launch(bucket, is_last=bucket.number == len(self.buckets) - 1)
            elif self.sharding is not None:
                self.sharding.launch(bucket)
            else:
                bucket.work = self.groups.sum_bucket(bucket.buffer.whole, bucket is self.buckets[-1])
        except BaseException as error:
            cause = self.groups.waits.explain(error)
            self.fail(cause)
            if cause is error:
                raise
            raise cause from error
        self.timeline.bucket_launched(bucket.number, bucket.work)

    @property
    def contribution_scale(self) -> float:
        """What this rank multiplies its gradients by before the sum."""
        return self.mean_scale if self._takes_mean else 1.0

    @property
    def mean_scale(self) -> float:
        """What makes a mean over ranks out of a sum, where a mean is asked for; whatever a hook does."""
        return 1.0 / self.world_size if self.settings.reduction is Reduction.MEAN else 1.0

    @property
    def _takes_mean(self) -> bool:
        return self.settings.reduction is Reduction.MEAN and (self.hook is None or not self.hook.divides)

    def _put_carried_aside(self, indices: Iterable[int]) -> None:
        if not self.carries_sums:
            return
        for index in indices:
            if self.touched[index]:
                self.carried.review(self.parameters[index], self.names[index])
            else:
                self.carry(index, is_watched=False)

    def carry(self, index: int, is_watched: bool = True) -> None:
        """Before anything is added to a gradient that is already a sum over all ranks, put that sum aside."""
        parameter = self.parameters[index]
        self.carried.review(parameter, self.names[index])
        # touched: a mean with something on top, from before means were kept apart
        if parameter.grad is not None and self.holds_result(index) and not self.touched[index]:
            self.carried.put_aside(parameter)
        if is_watched and not self._in_pass:
            self.carried.watch(parameter)

    def _carry_unplanned(self) -> None:
        """Put aside the sums over all ranks that parameters have kept while they were not planned."""
        if self.carries_sums:
            for parameter in [p for _, p in self._change or () if id(p) not in self.parameter_ids]:
                self.carry_unplanned(parameter, is_watched=False)

    def _owned_strays(self) -> list[NamedParameter]:
        if not self.strays:
            return []
        return [(name, p) for name, p in self.watch.all_parameters() if id(p) in self.strays and owns(self, p)]

    def _read_written(self) -> None:
        """Take note of the contributions that nothing was waiting for, which the hooks have only written down."""
        written = self._hooks.read_written()
        counts, touched = self._counts, self.touched
        for index in written:
            counts[index] += 1
            touched[index] = 1
        if self._expected is None:
            self.readiness.order += written

    # ------------------------------------------------------------- backward ends

    def end_backward(self) -> bool:
        """Launch what is left; returns whether this was a pass at all (``torch.autograd.grad`` is none)."""
        self._pass = None
        self.timeline.local_ends()
        self._backward_s = time.perf_counter() - self._begin_s
        self._read_written()
        self.backward_over()
        if not any(self._counts) and not is_accumulating(self._forward_thread):
            self._is_open = False
            self.timeline.pass_is_over()
            return False
        self._prepare_first_pass()
        self._launch_rest(RankState.TRAINING)
        return True

    def _prepare_first_pass(self) -> None:
        """Make sure, once, of what all ranks must have in common before their collectives can pair."""
        if self.is_order_agreed:
            return
        shared = self.group
        self.groups.make_private()
        if self.hook is not None and self.hook.state is shared:
            self.hook.state = self.group
        check_same_hook(self.control_group, None if self.hook is None else self.hook.name, torch.device("cpu"))

    def finish_backward(self) -> None:
        """Wait for the pass, and make its result the gradients."""
        self._finish(learns=True)
        self.pass_done()

    def _launch_rest(self, state: RankState) -> None:
        """Launch what is left; should that raise, what is missing leaves as abandoned: the others wait for it."""
        try:
            self._launch_remaining(state)
        except BaseException:
            if state is not RankState.ABANDONED:
                self.abandon_backward()
            raise

    def _launch_remaining(self, state: RankState) -> None:
        self.timeline.local_ends()
        self._put_converted_aside()
        self._put_carried_aside(self.plan.sparse)
        self.finite_check.look(self.plan.sparse, [self.parameters[i] for i in self.plan.sparse])
        while self._cursor < len(self.buckets) - 1:
            self._launch(self.buckets[self._cursor])
            self._cursor += 1
        last = self.buckets[-1] if self.buckets else None
        if last is not None:
            self._collect(last)
        if self._words_ride:
            assert last is not None
            self._write_words(last.buffer.words, state)
            self._start(last)
        else:
            if last is not None:
                self._start(last)
            assert self._words is not None
            self._write_words(self._words.numpy(), state)
            self._words_work = self.groups.sum_words(self._words)
        self._is_complete = True
        self.gradient_weight = 0.0

    def _put_converted_aside(self) -> None:
        """Keep gradients out of the buckets whose parameter has got another dtype or shape; see ``_take_change``."""
        if self._change is None:
            return
        for index, (parameter, spec) in enumerate(zip(self.parameters, self.specs, strict=True)):
            local = local_tensor(parameter)
            if local.dtype != spec.dtype or tuple(local.shape) != spec.shape:
                self._put_carried_aside([index])
                self._converted[id(parameter)] = parameter.grad
                parameter.grad = None

    def _write_words(self, target: Words, state: RankState) -> None:
        high, low = split_weight(self.gradient_weight)
        data_s, forward_s, backward_s, optimizer_s = self.timeline.local_times()
        slot = Slot(
            state=state,
            pass_number=self.num_passes % WORD_LIMIT,
            plan_digest=self._plan_digest,
            change_digest=change_digest(self._change),
            weight_high=high,
            weight_low=low,
            data_s=data_s,
            forward_s=forward_s,
            backward_s=backward_s,
            optimizer_s=optimizer_s,
            replica_digest=self._replica_digest(state),
            non_finite=self.finite_check.word(),
        )
        write_words(target, self._used(), self._late, slot, self.rank, len(self.specs))

    def _replica_digest(self, state: RankState) -> int:
        """Return a digest of the parameters if this pass is one that compares them, and has to leave them equal."""
        owns_result = self.hook is None or not self.hook.divides
        is_due = self.replica_check.is_due(self.num_passes) and state is RankState.TRAINING and self._change is None
        return self.replica_check.word(self.parameters) if is_due and owns_result else 0

    def _used(self) -> list[int] | None:
        """Parameters with a contribution, None if all have one; a touched one whose gradient is gone has none."""
        missing = {index for bucket in self.buckets for index in bucket.missing} - self._late
        missing.update(index for index in self.plan.sparse if self.parameters[index].grad is None)
        if not missing and 0 not in self.touched:
            return None
        return [index for index, touched in enumerate(self.touched) if touched and index not in missing]

    def _finish(self, learns: bool = False, joined: bool = False) -> None:
        """Wait for everything that was launched, and turn it into gradients."""
        try:
            with _phase("ddp::wait"):
                words = self._wait()
            self._check(words)
            self.last_words = words
            self._add_late(words)
            self._divide(words)
            self._write_back(words)
            if self.plan.sparse:
                reduce_sparse(self, words)
            if self._change is not None:
                self._take_change()
            elif learns:
                self._learn(joined)
            self.timeline.pass_ends(tuple(slot.local_times for slot in words.slots))
        except (ContractError, NonFiniteError):
            self._drop_gradients()
            raise
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self._close_pass()

    def _close_pass(self) -> None:
        self._is_open = False
        self.timeline.pass_is_over()
        self._change = None
        self._converted = {}
        self.num_passes += 1
        self.groups.waits.enter("after backward", self.num_passes)
        for bucket in self.buckets:
            bucket.work = None

    def _wait(self) -> ControlWords:
        words_are_due = not self._words_ride
        for bucket in self.buckets:
            self.timeline.wait_begins(bucket.number)
            if words_are_due:  # first: they were launched last, so after them no wait for a bucket is without an end
                self.groups.wait_for_words(self._words_work)
                words_are_due = False
            if self.hook is not None:
                self.hook.wait(bucket, [self.names[i] for i in bucket.plan.indices], self.groups.waits)
            else:
                self.groups.wait_for_bucket(bucket.work, bucket.number)
            self.timeline.wait_ends(bucket.number)
        if self._words_ride:
            return read_words(self.buckets[-1].buffer.words, len(self.specs))
        assert self._words is not None
        if words_are_due:
            self.groups.wait_for_words(self._words_work)
        return read_words(self._words.numpy(), len(self.specs))

    def _check(self, words: ControlWords) -> None:
        """Raise, on all ranks alike, if the ranks were not in the same pass of the same plan."""
        try:
            check_abandoned(words.slots, self.rank, self.num_passes)
            if not is_same_change(words.slots):
                planned = list(zip(self.names, self.parameters, strict=True))
                raise_other_change(planned if self._change is None else self._change, self.control_group)
        except ContractError as error:
            raise self.groups.waits.cause_of(error) from None
        check_same_pass(words.slots, self.rank)
        self.replica_check.check(words.slots, self.num_passes, self.names, self.parameters, self.control_group)
        check_finite(words.slots, self.rank, self.num_passes, self.names, self.bucket_of)

    def _drop_gradients(self) -> None:
        """Leave no gradient of this pass, also on parameters that it does not know yet."""
        for parameter in self._planned_and_new():
            parameter.grad = None
        self.carried.forget(self._planned_and_new())
        self.touched = bytearray(len(self.parameters))

    def _planned_and_new(self) -> list[nn.Parameter]:
        return [*self.parameters, *(p for _, p in self._change or ())]

    def _add_late(self, words: ControlWords) -> None:
        late = words.late_anywhere
        if not late:
            return
        everything = bytearray(b"\1" * len(self.specs))
        plan = make_plan(self.specs, late, [float("inf")])
        for number, bucket_plan in enumerate(plan.buckets):
            parameters = [self.parameters[i] for i in bucket_plan.indices]
            extra = Bucket(len(self.buckets) + number, bucket_plan, self.specs, parameters)
            extra.collect(everything, self.contribution_scale)
            self.reduce_extra(extra, [self.names[i] for i in bucket_plan.indices])
            for index, view in zip(bucket_plan.indices, extra.views, strict=True):
                self.buckets[self.bucket_of[index]].add_late(index, view)

    def reduce_extra(self, extra: Bucket, names: Sequence[str]) -> None:
        """Reduce a bucket that is not in the plan, and wait for it."""
        if self.hook is not None:
            self.hook.launch(extra, is_last=False)
            self.hook.wait(extra, names, self.groups.waits)
        else:
            self.groups.wait_for_bucket(self.groups.sum_bucket(extra.buffer.whole, True), extra.number)

    def _divide(self, words: ControlWords) -> None:
        """Apply what only the control words could tell: the total weight, or the number of ranks with a batch."""
        factor = self.late_factor(words)
        if factor != 1.0:
            for bucket in self.buckets:
                bucket.multiply(factor)

    def late_factor(self, words: ControlWords) -> float:
        """Return what the sum over ranks is still to be multiplied by."""
        if self.settings.reduction is Reduction.WEIGHTED:
            total = words.total_weight
            if not any(words.used):
                return 1.0  # nothing was contributed, so nothing is to be divided
            if not total > 0:
                raise ContractError(
                    f"rank {self.rank}: reduction='weighted' needs a gradient weight, but the ranks' weights add up "
                    f"to {total}; call add_gradient_weight(number of tokens or samples) before each backward"
                )
            return 1.0 / total
        if self.divides_by_active_ranks and self._takes_mean:
            return self.world_size / max(words.num_training, 1)
        return 1.0

    def _write_back(self, words: ControlWords) -> None:
        all_used = words.num_used_least > 0
        for bucket in self.buckets:
            for index in bucket.plan.indices if self.carried else ():
                if id(self.parameters[index]) in self._converted:
                    continue  # it goes with the newcomers
                carried = self.carried.take(self.parameters[index])
                if carried is None:
                    continue
                if words.used[index]:
                    bucket.view_of(index).add_(local_tensor(carried))
                else:
                    bucket.keep(index, carried)
            bucket.write_back(None if all_used else [words.used[i] > 0 for i in bucket.plan.indices])
        self.touched = bytearray(len(self.touched))

    # ------------------------------------------------------------- between passes

    def _learn(self, joined: bool) -> None:
        """Take this pass as the expectation for the next; after the first one, agree on rank 0's ready order."""
        if not joined:
            self.readiness.learn(self._late)
        if self.is_order_agreed:
            self._tune()
            return
        self.is_order_agreed = True
        self.times = ReadyTimes(len(self.specs)) if self._can_tune else None
        mine = torch.tensor(self.readiness.ready_order(), dtype=torch.int64)
        agreed = broadcast_tensors(self.control_group, [mine], source=0)[0].tolist()
        plan = self._plan_for(agreed)
        if plan.buckets != self.plan.buckets:
            self._use_plan(plan, self._results())

    @property
    def _can_tune(self) -> bool:
        return self.settings.tunes_buckets and bool(self.plan.buckets) and not self.is_spread

    def _tune(self) -> None:
        """With ``bucket_cap_mb="auto"``: after a few passes make the plan that fits the measured times."""
        if self.times is None or self.sharding is not None:
            return
        self.times.end_pass(self._backward_s)
        if self.times.is_complete:
            ready_s = self.times.medians()
            self.times = None
            self._use_plan(tuned_plan(self, ready_s), self._results())

    def _take_change(self) -> None:
        """Adopt another set of trainable parameters, which is the same on all ranks (see ``_check_change``)."""
        assert self._change is not None
        for parameter in self.parameters:
            if id(parameter) in self._converted:
                parameter.grad = self._converted[id(parameter)]
        known = {id(p) for p in self.parameters if id(p) not in self._converted}
        newcomers = [(name, p) for name, p in self._change if id(p) not in known]
        passing = {id(p) for _, p in self._passing}
        claim(self, [p for _, p in newcomers if id(p) not in passing])
        assert self.last_words is not None
        parameters = [p for _, p in newcomers]
        aside = {} if self.sharding is None else self.sharding.put_aside(parameters)
        results = reduce_newcomers(self, newcomers, self.last_words)
        if self.sharding is not None:
            self.sharding.put_back(parameters, aside, results)
        self._install([(name, p) for name, p in self._change if id(p) not in passing], results)

    def fail(self, error: BaseException) -> None:
        """Run no further collective; see [Note: Failure]."""
        self._hooks.read_written()
        if self.failure is None:
            self.failure = f"{type(error).__name__}: {error}"
            self.groups.spoil()

    def reset_after_failure(self) -> None:
        """Forget a failure and everything learned; to be called on all ranks, on a group that still works."""
        if self.failure is not None:
            self._drop_gradients()  # some were on their way, and are lost
        self.failure = None
        self.groups.waits.forget()
        self._pass = None
        self._is_open = False
        self._install(self._owned())

    # ------------------------------------------------------------- passes without a backward

    def synchronize(self) -> None:
        """Reduce what has accumulated so far, as the end of a backward would."""
        self.settle()
        self._touch_foreign_gradients()
        self._open_pass()
        self._prepare_first_pass()
        self._launch_rest(RankState.TRAINING)
        self._finish()
        self.pass_done()

    def _touch_foreign_gradients(self) -> None:
        """Gradients that the user has set are to be synchronised like accumulated ones."""
        for index, parameter in enumerate(self.parameters):
            if parameter.grad is not None and not self.holds_result(index):
                self.touched[index] = 1

    def shadow_pass(self) -> None:
        """Take part in a pass of the other ranks with nothing to contribute but what was left unsynchronised."""
        self.settle()
        finished = [(p, p.grad) for p, touched in zip(self.parameters, self.touched, strict=True) if not touched]
        for parameter, _ in finished:
            parameter.grad = None
        self._open_pass()
        self._prepare_first_pass()
        self._launch_rest(RankState.JOINED)
        self._finish(learns=True, joined=True)
        for parameter, grad in finished:
            if parameter.grad is None and self.sharding is None:  # else the result of this pass, for the step
                parameter.grad = grad

    def abandon_backward(self) -> None:
        """Take note that the backward raised; its exception is on its way, so none is raised here."""
        try:
            self._launch_abandoned()
        except BaseException as error:
            self.fail(error)

    def _launch_abandoned(self) -> None:
        """Launch what a backward that raised has left undone, so that the other ranks are not kept waiting.

        Its gradients are worth nothing; they are taken off the parameters now, before the user clears them.
        """
        if self.failure is None and self._is_open and not self._is_complete:
            self._read_written()
            self.carried.forget(self._planned_and_new())
            self._prepare_first_pass()
            self._launch_rest(RankState.ABANDONED)
            self._drop_gradients()

    def _complete_abandoned(self) -> None:
        """Wait for the collectives of a pass whose backward raised; an error unless it raised on every rank."""
        self._launch_abandoned()
        self._pass = None
        try:
            slots = self._wait().slots
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self._close_pass()
        check_abandoned(slots, self.rank, self.num_passes - 1)

    def holding_gradients(self) -> list[str]:
        """Return the names of the parameters that hold any gradient."""
        return [name for name, p in zip(self.names, self.parameters, strict=True) if p.grad is not None]

    def unsynchronized(self) -> list[str]:
        """Return the names of the parameters that hold gradients of this rank alone."""
        return [
            name
            for name, p, touched in zip(self.names, self.parameters, self.touched, strict=True)
            if touched and p.grad is not None
        ]


class _Graph:
    """The graph behind one output; autograd keeps it alive, through the hook on the output."""

    def __init__(self) -> None:
        self.is_freed = False


def _phase(name: str) -> contextlib.AbstractContextManager[Any]:
    """Name a phase for torch's profiler; costs next to nothing when that is off."""
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return torch.profiler.record_function(name)
    return contextlib.nullcontext()
