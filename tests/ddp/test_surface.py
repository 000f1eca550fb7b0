"""What programs and frameworks use on torch's class beside forward, backward and ``no_sync``."""

import copy
import inspect
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference import (
    Branches,
    OneProcess,
    TwoLayers,
    assert_equal_replicas,
    assert_same_gradients,
    bare_linear,
    batch,
    digest,
    in_quarters,
    ones_row,
    plain,
    raised,
    sq,
    train_alike,
)
from torch import nn

from gradsync import DistributedDataParallel
from rank_pool import RankPool

TorchDDP = nn.parallel.DistributedDataParallel


# ----------------------------------------------------------------- against torch's class, name by name


def test_the_constructor_has_torchs_arguments() -> None:
    ours = list(inspect.signature(DistributedDataParallel.__init__).parameters.values())
    torchs = list(inspect.signature(TorchDDP.__init__).parameters.values())
    assert [(p.name, p.default) for p in ours[: len(torchs)]] == [(p.name, p.default) for p in torchs]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in ours[len(torchs) :])


_SAME_ATTRIBUTES = [
    "bucket_bytes_cap",
    "bucket_bytes_cap_list",
    "bucket_bytes_cap_default",
    "broadcast_bucket_size",
    "broadcast_buffers",
    "forward_sync_buffers",
    "require_backward_grad_sync",
    "require_forward_param_sync",
    "find_unused_parameters",
    "static_graph",
    "gradient_as_bucket_view",
    "batched_grad_copy",
    "mixed_precision",
    "skip_all_reduce_unused_params",
    "dim",
    "device",
    "device_ids",
    "output_device",
    "device_type",
    "is_multi_device_module",
    "process_group",
    "parameters_to_ignore",
    "_has_rebuilt_buckets",
    "_comm_hooks",
    "_delay_all_reduce_params",
    "_delay_grad_buffer",
    "_distributed_rank",
    "_use_python_reducer",
]
# What torch's wrapper keeps for its compiled Reducer alone.
_OF_TORCHS_REDUCER = {
    "_bucket_config",
    "_delay_grad_views",
    "_delay_all_reduce_all_params",
    "_lazy_init_ran",
    "_accum_grad_hooks",
    "_ddp_sink_clone",
}


def test_the_page_for_those_who_switch_names_every_argument() -> None:
    page = (Path(__file__).parents[2] / "docs" / "switching-from-torch.md").read_text(encoding="utf-8")
    rows = page.partition("## Constructor arguments")[2].partition("\n## ")[0]
    parameters = inspect.signature(DistributedDataParallel.__init__).parameters
    assert [name for name in parameters if name != "self" and f"`{name}`" not in rows] == []


def _attributes(rank: int, world: int) -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    ours, torchs = DistributedDataParallel(module), TorchDDP(copy.deepcopy(module))
    ours.train(True)
    for name in _SAME_ATTRIBUTES:
        assert getattr(ours, name) == getattr(torchs, name), name
    assert {name for name in vars(torchs) if not hasattr(ours, name)} == _OF_TORCHS_REDUCER
    assert list(ours.named_module_buffers) == list(torchs.named_module_buffers)
    assert len(ours.modules_buffers) == len(torchs.modules_buffers) == 3
    assert [p.shape for p in ours._module_parameters] == [p.shape for p in torchs._module_parameters]
    assert isinstance(ours, TorchDDP)
    assert ours.will_sync_module_buffers() is torchs.will_sync_module_buffers() is True
    ours._is_accelerate_prepared = True  # clients leave marks of their own


def test_attributes(ranks: RankPool) -> None:
    ranks(_attributes)


def test_every_method_of_torchs_class_works_or_refuses() -> None:
    """A new method in torch must be looked at: does it drive the compiled Reducer?"""
    methods = {
        name
        for name, value in vars(TorchDDP).items()
        if callable(value) or isinstance(value, property | staticmethod | classmethod)
    }
    ours = {name for cls in DistributedDataParallel.__mro__[:2] for name in vars(cls)}
    assert methods - ours == _FINE_AS_INHERITED


_FINE_AS_INHERITED = {
    "_build_debug_param_to_name_mapping",
    "_build_params_for_reducer",
    "_check_default_group",
    "_check_reducer_finalized",
    "_check_sync_bufs_post_fwd",
    "_check_sync_bufs_pre_fwd",
    "_default_broadcast_coalesced",
    "_distributed_broadcast_coalesced",
    "_distributed_rank",
    "_find_common_rank",
    "_get_parameters",
    "_log_and_throw",
    "_passing_sync_batchnorm_handle",
    "_remove_autograd_hooks",
    "_set_ddp_sink_clone",
    "_set_params_and_buffers_to_ignore_for_model",
    "_set_sparse_metadata",
    "broadcast_buffers",
    "gather",
    "scatter",
    "to_kwargs",
    "train",
}


def _inherited(rank: int, world: int) -> None:
    """What is inherited needs attributes that are there, and no compiled Reducer."""
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    parameters, _ = ddp._build_params_for_reducer()
    assert ddp._build_debug_param_to_name_mapping(parameters)[0] == "0.weight"
    assert [len(p) for p in ddp._get_parameters(ddp.module)] == [2, 2, 2, 2]
    ddp._check_default_group()
    ddp._check_reducer_finalized()
    assert ddp._check_sync_bufs_pre_fwd() and not ddp._check_sync_bufs_post_fwd()
    with torch.no_grad():
        ddp.module[1].running_mean.fill_(rank + 1.0)
    ddp._default_broadcast_coalesced()
    assert ddp.module[1].running_mean.tolist() == [1.0, 1.0]
    ddp._sync_buffers()
    assert ddp._find_common_rank(rank, True) == world - 1
    ddp._set_ddp_sink_clone(False)
    ddp._set_sparse_metadata({})
    ddp._assign_modules_buffers()
    ddp._clear_grad_buffer()
    assert ddp._get_active_ddp_module() is None
    inputs, kwargs = ddp.to_kwargs((torch.ones(2),), {"a": 1}, None)
    assert inputs[0][0].tolist() == [1.0, 1.0] and kwargs[0] == {"a": 1}
    ddp.broadcast_buffers = False
    assert ddp.forward_sync_buffers is False
    assert "drives torch's own Reducer" in raised(lambda: ddp._sync_final_model(True))


def test_inherited_methods(ranks: RankPool) -> None:
    ranks(_inherited)


# ----------------------------------------------------------------- arguments that change nothing


@pytest.mark.parametrize(
    "arguments",
    [
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"batched_grad_copy": True},
        {"skip_all_reduce_unused_params": True},
        {"bucket_cap_mb_list": [1e-6, 1.0]},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True, "batched_grad_copy": True},
    ],
)
def test_flags_change_nothing(ranks: RankPool, arguments: dict[str, Any]) -> None:
    assert_equal_replicas(ranks(train_alike, TwoLayers, plain, exact=True, **arguments))


def _deprecated(rank: int, world: int) -> None:
    DistributedDataParallel(TwoLayers(), check_reduction=True)


def test_check_reduction_is_deprecated(ranks: RankPool) -> None:
    for _, messages in ranks.run_with_warnings(_deprecated):
        assert len(messages) == 1
        assert messages[0].startswith("FutureWarning") and "check_reduction" in messages[0]


def _delayed(rank: int, world: int, all_of_them: bool) -> str:
    module, reference = TwoLayers(), OneProcess(TwoLayers(), world)
    delayed = [(n, p) for n, p in module.named_parameters() if all_of_them or n.startswith("a")]
    ddp = DistributedDataParallel(
        module, delay_all_reduce_named_params=delayed, param_to_hook_all_reduce=module.b.weight
    )
    assert len(ddp._delay_all_reduce_params) == len(delayed)
    for step in range(3):
        plain(ddp, rank, step)
        reference.run(plain, step)
        assert_same_gradients(module, reference.module, exact=True)
        ddp.zero_grad()
        reference.module.zero_grad()
    return digest(module)


@pytest.mark.parametrize("all_of_them", [False, True])
def test_delayed_parameters_are_reduced_like_all_others(ranks: RankPool, all_of_them: bool) -> None:
    assert_equal_replicas(ranks(_delayed, all_of_them))


def _delayed_stranger(rank: int, world: int) -> str:
    module, stranger = TwoLayers(), nn.Parameter(torch.ones(1))
    return raised(
        lambda: DistributedDataParallel(
            module, delay_all_reduce_named_params=[("stranger", stranger)], param_to_hook_all_reduce=module.b.weight
        )
    )


def test_a_delayed_parameter_that_is_not_the_modules(ranks: RankPool) -> None:
    for text in ranks(_delayed_stranger):
        assert text.startswith("ValueError") and "stranger" in text


def _other_grad_dtype(rank: int, world: int) -> None:
    """bfloat16 weights with float32 gradients, which torch can tell apart from version 2.10 on."""
    layer = nn.Linear(1, 1, bias=False).bfloat16()
    if not hasattr(layer.weight, "grad_dtype"):
        return
    layer.weight.grad_dtype = torch.float32
    ddp = DistributedDataParallel(layer)
    for _ in range(3):
        layer.weight.grad = None
        for _ in range(32):
            ddp(torch.full((1, 1), rank + 1 + 1 / 64, dtype=torch.bfloat16)).float().sum().backward()
        assert layer.weight.grad is not None and layer.weight.grad.dtype == torch.float32
        assert layer.weight.grad.item() == 32 * (1.5 + 1 / 64)


def test_gradients_of_another_dtype_than_the_parameter(ranks: RankPool) -> None:
    ranks(_other_grad_dtype)


# ----------------------------------------------------------------- static graph


def _static(rank: int, world: int) -> list[str]:
    texts = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        ddp = DistributedDataParallel(TwoLayers(), find_unused_parameters=True)
        ddp._set_static_graph()
        ddp._set_static_graph()
        DistributedDataParallel(TwoLayers(), find_unused_parameters=True, static_graph=True)
    texts += [f"{w.category.__name__}: {w.message}" for w in found]
    late = DistributedDataParallel(TwoLayers())
    plain(late, rank, 0)
    texts.append(raised(late._set_static_graph))
    plain(ddp, rank, 0)
    assert ddp._get_ddp_logging_data()["static_graph"] == 1
    assert "should be called before" in str(late._get_ddp_logging_data()["error"])
    return texts


def test_set_static_graph_warns_and_raises_as_torch_does(ranks: RankPool) -> None:
    for unused, again, unused_too, late in ranks(_static):
        assert unused.startswith("UserWarning") and "will detect unused parameters automatically" in unused
        assert "no need to set it again" in again
        assert "will detect unused parameters automatically" in unused_too
        assert late.startswith("RuntimeError") and "should be called before training loop starts" in late


# ----------------------------------------------------------------- ignored tensors


class _Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 2)
        self.inner = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self.scale = nn.Parameter(torch.ones(2))
        in_quarters(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = (self.a(x) + self.inner(x)) * self.scale
        return output


def _ignored(rank: int, world: int) -> None:
    module = _Nested()
    names = ["inner.0.weight", "inner.1.running_mean", "scale"]
    own = module.state_dict()
    with torch.no_grad():
        for name in names:
            own[name].add_(rank)
    before = {name: own[name].clone() for name in names}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    ddp = DistributedDataParallel(module)
    assert ddp.parameters_to_ignore == set(names)
    assert all(torch.equal(own[name], before[name]) for name in names)
    assert "inner.1.running_mean" not in ddp.named_module_buffers
    assert "inner.1.running_var" in ddp.named_module_buffers
    managed = [name for name, _ in DistributedDataParallel._get_data_parallel_params(module, named_params=True)]
    assert managed == ["a.weight", "a.bias", "inner.0.bias", "inner.1.weight", "inner.1.bias"]
    assert len(list(DistributedDataParallel._get_data_parallel_params(module))) == 5
    local = copy.deepcopy(module)
    sq(ddp(batch(rank, 0))).backward()
    sq(local(batch(rank, 0))).backward()
    for name in ("inner.0.weight", "scale"):
        assert torch.equal(module.get_parameter(name).grad, local.get_parameter(name).grad)
    grads = [torch.zeros(2, 3) for _ in range(world)]
    dist.all_gather(grads, local.a.weight.grad)
    torch.testing.assert_close(module.a.weight.grad, torch.stack(grads).mean(0))


def test_ignored_parameters_and_buffers_stay_local(ranks: RankPool) -> None:
    ranks(_ignored)


def _ignored_at_the_root(rank: int, world: int) -> None:
    layer = nn.Linear(3, 2)
    names = [f"{prefix}.{name}" for prefix, m in layer.named_modules() for name, _ in m.named_parameters(recurse=False)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(layer, names[:1])
    assert names[:1] == [".weight"]  # torch's recipe for the names makes this of the root's own
    assert DistributedDataParallel(layer).reducer.names == ["bias"]


def test_names_of_the_roots_own_parameters(ranks: RankPool) -> None:
    ranks(_ignored_at_the_root)


# ----------------------------------------------------------------- buffers by the user's hook


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(1))
        in_quarters(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen_in_forward = self.seen.clone()
        self.seen += x.shape[0]
        output: torch.Tensor = self.layer(x)
        return output


def _buffer_hook(rank: int, world: int, location: str, with_future: bool) -> list[float]:
    from torch.nn.parallel.distributed import _BufferCommHookLocation

    calls = []

    def add_up(state: list[str], buffers: dict[str, torch.Tensor]) -> Any:
        calls.append(list(buffers))
        assert state == ["mine"]
        work = dist.all_reduce(buffers["seen"], async_op=True)
        if with_future:
            return [work.get_future()]
        return work.wait() and None

    ddp = DistributedDataParallel(_Counting())
    ddp._register_buffer_comm_hook(["mine"], add_up, _BufferCommHookLocation[location])
    found = []
    for step in range(2):
        sq(ddp(batch(rank, step, rows=rank + 1))).backward()
        found += [ddp.module.seen_in_forward.item(), ddp.module.seen.item()]
    assert calls == [["seen"]] * 2
    ddp.eval()(batch(rank, 0))
    with torch.no_grad():
        ddp.train()(batch(rank, 0))
    assert len(calls) == 2  # neither evaluation nor no_grad synchronises
    return found


@pytest.mark.parametrize("with_future", [False, True])
def test_a_buffer_hook_after_forward(ranks: RankPool, with_future: bool) -> None:
    # 1 + 2 rows in the first step; then both have 3 and see 1 and 2 more
    assert ranks(_buffer_hook, "POST_FORWARD", with_future) == [[0.0, 3.0, 3.0, 9.0]] * 2


def test_a_buffer_hook_before_forward(ranks: RankPool) -> None:
    # each keeps its own count until the next forward adds them up
    assert ranks(_buffer_hook, "PRE_FORWARD", False) == [[0.0, 1.0, 3.0, 4.0], [0.0, 2.0, 3.0, 5.0]]


def _buffer_hook_in_join(rank: int, world: int) -> float:
    ddp = DistributedDataParallel(_Counting())

    def add_up(state: object, buffers: dict[str, torch.Tensor]) -> None:
        dist.all_reduce(buffers["seen"])

    ddp._register_buffer_comm_hook(None, add_up)
    with ddp.join():
        for step in range(1 + rank):
            sq(ddp(batch(rank, step))).backward()
    seen: float = ddp.module.seen.item()
    return seen


def test_a_buffer_hook_under_join(ranks: RankPool) -> None:
    # after one step each both have 4; rank 1 goes on to 6, and the hook adds rank 0's 4
    assert ranks(_buffer_hook_in_join) == [10.0, 10.0]


# ----------------------------------------------------------------- uneven inputs, twice; evaluation on one rank


def _joined_twice(rank: int, world: int, by_initial_size: bool) -> list[float]:
    """What a rank without batches was shown in the first context does not count in the second one."""
    ddp = DistributedDataParallel(bare_linear())
    found = []
    for _ in range(2):
        with ddp.join(divide_by_initial_world_size=by_initial_size):
            for _ in range(1 + rank):
                ddp(ones_row(rank)).sum().backward()
                found.append(ddp.module.weight.grad[0, 0].item())
                ddp.zero_grad()
    assert ddp.module.weight.grad is None
    return found


def test_join_twice(ranks: RankPool) -> None:
    assert ranks(_joined_twice, True) == [[1.5, 1.5], [1.5, 1.0, 1.5, 1.0]]
    assert ranks(_joined_twice, False) == [[1.5, 1.5], [1.5, 2.0, 1.5, 2.0]]


def _evaluates_without_running_statistics(rank: int, world: int) -> None:
    layer = nn.SyncBatchNorm(2, track_running_stats=False)
    plain_layer = nn.BatchNorm1d(2, track_running_stats=False)
    ddp = DistributedDataParallel(layer).eval()
    if rank == 0:
        x = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
        torch.testing.assert_close(ddp(x), plain_layer.eval()(x))
    dist.barrier()


def test_evaluation_on_one_rank_waits_for_nobody(ranks: RankPool) -> None:
    ranks(_evaluates_without_running_statistics)


# ----------------------------------------------------------------- hooks taken off, failures


def _without_hooks(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(bare_linear())
    ddp(ones_row(rank)).sum().backward()
    assert ddp.module.weight.grad[0, 0] == 1.5
    ddp._remove_autograd_hooks()
    ddp.zero_grad()
    ddp(ones_row(rank)).sum().backward()
    assert ddp.module.weight.grad[0, 0] == rank + 1
    assert not ddp.module.weight._post_accumulate_grad_hooks


def test_remove_autograd_hooks(ranks: RankPool) -> None:
    ranks(_without_hooks)


def _finalized(rank: int, world: int) -> str:
    ddp = DistributedDataParallel(bare_linear())
    ddp(ones_row(rank)).sum().backward()
    ddp._check_reducer_finalized()
    ddp.register_comm_hook(None, lambda state, bucket: bucket.buffer())
    raised(lambda: ddp(ones_row(rank)).sum().backward())
    return raised(ddp._check_reducer_finalized)


def test_check_reducer_finalized(ranks: RankPool) -> None:
    for text in ranks(_finalized):
        assert text.startswith("ReducerFailedError") and "Future" in text


# ----------------------------------------------------------------- another group


def _other_group(rank: int, world: int) -> list[float]:
    """Shrink from three ranks to two, then grow again."""
    ddp = DistributedDataParallel(bare_linear())
    found = []

    def step() -> None:
        ddp.zero_grad()
        ddp(ones_row(rank)).sum().backward()
        found.append(ddp.module.weight.grad[0, 0].item())

    step()
    two = dist.new_group([0, 1])
    ddp._update_process_group(two if rank < 2 else dist.GroupMember.NON_GROUP_MEMBER)
    assert (ddp.process_group is two) is (rank < 2)
    step()
    step()
    ddp._update_process_group(dist.group.WORLD)
    step()
    return found


def test_update_process_group(ranks3: RankPool) -> None:
    assert ranks3(_other_group) == [[2.0, 1.5, 1.5, 2.0], [2.0, 1.5, 1.5, 2.0], [2.0, 3.0, 3.0, 2.0]]


def _other_group_keeps(rank: int, world: int) -> None:
    """What was accumulated, the hook and the switch of ``no_sync`` survive."""
    ddp = DistributedDataParallel(bare_linear())
    calls = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        calls.append(bucket.index())
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0])

    ddp.register_comm_hook(None, hook)
    ddp.require_backward_grad_sync = False
    ddp(ones_row(rank)).sum().backward()
    ddp._update_process_group(dist.new_group([0, 1]))
    assert ddp.require_backward_grad_sync is False
    ddp.require_backward_grad_sync = True
    ddp(ones_row(rank)).sum().backward()
    assert calls == [0]
    assert ddp.module.weight.grad[0, 0] == 6.0
    assert "once" in raised(lambda: ddp.register_comm_hook(None, hook))


def test_update_process_group_keeps_the_rest(ranks: RankPool) -> None:
    ranks(_other_group_keeps)


def _own_group_alone(rank: int, world: int) -> float:
    """A group that shrinks to this rank leaves gradients local, and does not wait for anybody."""
    ddp = DistributedDataParallel(bare_linear())
    alone = [dist.new_group([r]) for r in range(world)][rank]
    ddp._update_process_group(alone)
    ddp(ones_row(rank)).sum().backward()
    value: float = ddp.module.weight.grad[0, 0].item()
    return value


def test_update_process_group_to_one_rank(ranks: RankPool) -> None:
    assert ranks(_own_group_alone) == [1.0, 2.0]


# ----------------------------------------------------------------- what other frameworks do to the reducer


def _as_accelerate_triggers(rank: int, world: int) -> float:
    """Two forwards under no_sync, of which the second backward is synchronised after all."""
    ddp = DistributedDataParallel(bare_linear())
    with ddp.no_sync():
        first, second = ddp(ones_row(rank)), ddp(ones_row(rank))
    with ddp.no_sync():
        first.sum().backward()
    before = ddp.require_backward_grad_sync, ddp.require_forward_param_sync
    ddp.require_backward_grad_sync = True
    ddp.require_forward_param_sync = True
    ddp.reducer.prepare_for_backward([])
    second.sum().backward()
    ddp.require_backward_grad_sync, ddp.require_forward_param_sync = before
    value: float = ddp.module.weight.grad[0, 0].item()
    return value


def test_synchronising_one_of_two_backwards(ranks: RankPool) -> None:
    assert ranks(_as_accelerate_triggers) == [3.0, 3.0]


def _as_pipelines_prepare(rank: int, world: int) -> float:
    """The wrapped module is called under no_sync, and the tensor that backward starts from is named later."""
    ddp = DistributedDataParallel(bare_linear())
    with ddp.no_sync():
        outputs = [ddp(ones_row(rank)) for _ in range(3)]
    for output in outputs[:-1]:
        with ddp.no_sync():
            output.sum().backward()
    found = list(nn.parallel.distributed._find_tensors({"out": [outputs[-1]]}))
    ddp.reducer.prepare_for_backward(found)
    outputs[-1].sum().backward()
    value: float = ddp.module.weight.grad[0, 0].item()
    return value


def test_prepare_for_backward_with_tensors(ranks: RankPool) -> None:
    assert ranks(_as_pipelines_prepare) == [4.5, 4.5]


# ----------------------------------------------------------------- the record


def _record(rank: int, world: int) -> tuple[dict[str, Any], dict[str, Any]]:
    records = []
    for cls in (DistributedDataParallel, TorchDDP):
        model = nn.Sequential(nn.Linear(600, 600), nn.BatchNorm1d(600), nn.Linear(600, 600))
        ddp = cls(model, bucket_cap_mb=1)
        for step in range(3):
            ddp(batch(rank, step, columns=600)).sum().backward()
        records.append(ddp._get_ddp_logging_data())
    return records[0], records[1]


def test_the_record_says_what_torchs_says(ranks: RankPool) -> None:
    for ours, torchs in ranks(_record):
        differing = {key for key in ours if ours[key] != torchs.get(key)}
        assert differing == {"bucket_sizes"}  # torch puts everything into one bucket in the first step
        missing = set(torchs) - set(ours)
        assert all("time" in key for key in missing), missing


def _record_of_hooks(rank: int, world: int) -> None:
    ddp = DistributedDataParallel(Branches())
    assert "comm_hook" not in ddp._get_ddp_logging_data()
    assert "has_rebuilt_buckets" not in ddp._get_ddp_logging_data()
    ddp._set_ddp_runtime_logging_sample_rate(2)
    message = raised(lambda: ddp._set_ddp_runtime_logging_sample_rate(0))
    assert message.startswith("ValueError") and "equal or greater than 1" in message
    assert ddp._get_ddp_logging_data()["has_error"] == 1
    ddp.register_comm_hook(None, _sum_hook)
    sq(ddp(batch(rank, 0), "ab")).backward()
    record = ddp._get_ddp_logging_data()
    assert record["comm_hook"] == "_sum_hook"
    assert record["unused_parameter_size"] == (6 + 2) * 4


def _sum_hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def test_the_record_of_hooks_errors_and_unused_parameters(ranks: RankPool) -> None:
    ranks(_record_of_hooks)


# ----------------------------------------------------------------- copies


def _copies(rank: int, world: int) -> None:
    """Copies of a wrapper keep its arguments, and can do everything that it can."""
    halves = [dist.new_group([r for r in range(world) if r % 2 == part]) for part in (0, 1)]
    ddp = DistributedDataParallel(TwoLayers(), process_group=dist.new_group([0, 1]), bucket_cap_mb_list=[0.5, 2])
    stream = io.BytesIO()
    torch.save(ddp, stream)
    stream.seek(0)
    for other in (copy.deepcopy(ddp), torch.load(stream, weights_only=False)):
        assert other.bucket_bytes_cap_list == [2**19, 2**21]
        assert other.bucket_bytes_cap == 2**21
        other._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        assert other._get_ddp_logging_data()["num_parameter_tensors"] == 4
        plain(other, rank, 0)
        other._update_process_group(halves[rank % 2])
    assert ddp._comm_hooks == []


def test_copies(ranks: RankPool) -> None:
    ranks(_copies, warnings_as_errors=False)


# ----------------------------------------------------------------- distributed autograd


def _inside_a_context(rank: int, world: int) -> str:
    from torch.distributed import autograd as dist_autograd
    from torch.distributed import rpc

    folder = [None]
    if rank == 0:
        import tempfile

        folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder[0]}/rpc")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world, rpc_backend_options=options)
    try:
        ddp = DistributedDataParallel(bare_linear())
        ddp(ones_row(rank)).sum().backward()
        with dist_autograd.context():
            return raised(lambda: ddp(ones_row(rank)))
    finally:
        rpc.shutdown()


def test_a_distributed_autograd_context_is_refused(ranks: RankPool) -> None:
    for text in ranks(_inside_a_context, warnings_as_errors=False):
        assert text.startswith("ConfigError") and "torch.distributed.autograd.context" in text
