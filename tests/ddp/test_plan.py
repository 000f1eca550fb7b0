"""The bucket plan: every parameter once, limits respected, the order kept, control words last."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsync.ddp.plan import (
    MIB,
    ParameterSpec,
    caps_from_mib,
    default_caps,
    is_dense,
    make_plan,
    parameter_spec,
    plan_of,
)

CPU = torch.device("cpu")
DEVICES = [torch.device("cuda", 0), torch.device("cuda", 1), torch.device("meta")]  # named only, never used
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]


def spec(
    numel: int, dtype: torch.dtype = torch.float32, is_sparse: bool = False, device: torch.device = CPU
) -> ParameterSpec:
    return ParameterSpec("p", (numel,), (1,), dtype, device, is_sparse)


specs_strategy = st.lists(
    st.builds(spec, st.integers(0, 300), st.sampled_from(DTYPES), st.booleans() | st.just(False)),
    min_size=1,
    max_size=30,
)


@given(specs_strategy, st.lists(st.integers(1, 2000), min_size=1, max_size=4), st.randoms())
def test_every_dense_parameter_is_in_one_bucket_of_its_dtype(specs, caps, random):
    order = list(range(len(specs)))
    random.shuffle(order)
    plan = make_plan(specs, order, caps)
    placed = [i for bucket in plan.buckets for i in bucket.indices]
    assert sorted(placed + list(plan.sparse)) == list(range(len(specs)))
    for bucket in plan.buckets:
        assert all(specs[i].flat_dtype == bucket.dtype for i in bucket.indices)
        ends = [o + specs[i].flat_numel for i, o in zip(bucket.indices, bucket.offsets, strict=True)]
        assert all(end <= start for end, start in zip(ends, bucket.offsets[1:], strict=False))
        assert ends[-1] == bucket.numel
        assert all(o % 2 == 0 for i, o in zip(bucket.indices, bucket.offsets, strict=True) if specs[i].dtype.is_complex)
        assert [order.index(i) for i in bucket.indices] == sorted(order.index(i) for i in bucket.indices)
    assert [plan.bucket_of[i] for i in plan.sparse] == [-1] * len(plan.sparse)


@given(specs_strategy, st.integers(1, 2000))
def test_a_bucket_overshoots_its_limit_by_less_than_its_last_parameter(specs, cap):
    plan = make_plan(specs, range(len(specs)), [cap])
    for bucket in plan.buckets:
        sizes = [specs[i].num_bytes for i in bucket.indices]
        assert sum(sizes[:-1]) < cap


@given(specs_strategy)
def test_a_float32_bucket_comes_last_where_there_is_one(specs):
    plan = make_plan(specs, range(len(specs)), [500])
    if any(bucket.dtype == torch.float32 for bucket in plan.buckets):
        assert plan.buckets[-1].dtype == torch.float32


def test_limits_are_used_in_order_and_the_last_one_repeats():
    plan = make_plan([spec(1)] * 12, range(12), [4, 8, 16])
    assert [len(b.indices) for b in plan.buckets] == [1, 2, 4, 4, 1]


@pytest.mark.parametrize(("total_mib", "cap_mib"), [(2, 1), (40, 4), (250, 25), (1000, 25)])
def test_by_default_a_bucket_holds_a_tenth_of_the_model_within_1_and_25_mib(total_mib, cap_mib):
    specs = [spec(MIB // 4)] * total_mib
    assert default_caps(specs) == pytest.approx([MIB, cap_mib * MIB])


def test_limits_are_given_in_mib_and_none_leaves_them_to_the_model():
    assert caps_from_mib(None) is None
    assert caps_from_mib(25) == [25 * MIB]
    assert caps_from_mib(None, [1, 2]) == [1 * MIB, 2 * MIB]


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.zeros(2, 3), True),
        (torch.zeros(2, 3).t(), True),
        (torch.zeros(4, 8, 1, 1).to(memory_format=torch.channels_last), True),
        (torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.zeros(2, 6)[:, ::2], False),
        (torch.zeros(3, 1).expand(3, 4), False),
        (torch.zeros(()), True),
        (torch.zeros(0, 3), True),
    ],
)
def test_dense_memory_is_recognised(tensor, dense):
    assert is_dense(tuple(tensor.shape), tensor.stride()) is dense


def test_views_keep_dense_strides_and_become_contiguous_elsewhere():
    assert parameter_spec("w", torch.zeros(2, 3).t()).strides == (1, 3)
    assert parameter_spec("w", torch.zeros(2, 6)[:, ::2]).strides == (3, 1)


@given(
    st.lists(st.sampled_from(DEVICES), min_size=1, max_size=30), st.lists(st.integers(1, 64), min_size=1, max_size=4)
)
def test_no_bucket_holds_parameters_of_several_devices(devices, caps):
    specs = [spec(4, device=device) for device in devices]
    plan = make_plan(specs, range(len(specs)), caps)
    assert sorted(i for bucket in plan.buckets for i in bucket.indices) == list(range(len(specs)))
    for bucket in plan.buckets:
        assert {specs[i].device for i in bucket.indices} == {bucket.device}


def test_buckets_put_together_by_others_come_apart_by_device():
    specs = [spec(4, device=device) for device in (DEVICES[0], DEVICES[1], DEVICES[0])]
    plan = plan_of(specs, [[0, 1, 2]], ())
    assert [(bucket.device, list(bucket.indices)) for bucket in plan.buckets] == [
        (DEVICES[0], [0, 2]),
        (DEVICES[1], [1]),
    ]
