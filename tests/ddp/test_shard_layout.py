"""Slices and pieces: every element of every parameter has one owner, at any number of ranks."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsync.ddp.plan import ParameterSpec, Slicing, make_plan, slice_alignment
from gradsync.ddp.shard_layout import flat_view, in_layout_of, lone_placement, placements_in, shaped

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]


def _spec(number: int, numel: int, dtype: torch.dtype) -> ParameterSpec:
    return ParameterSpec(f"p{number}", (numel,), (1,), dtype, CPU)


_sizes = st.lists(st.tuples(st.integers(0, 400), st.sampled_from(DTYPES)), min_size=1, max_size=12)


@given(_sizes, st.integers(1, 5), st.sampled_from([1, 700, 10**9]))
def test_every_element_has_one_owner(sizes, num_ranks, alone_bytes):
    specs = [_spec(number, *size) for number, size in enumerate(sizes)]
    plan = make_plan(specs, range(len(specs)), [900], Slicing(num_ranks, alone_bytes))
    placed = {}
    for bucket in plan.buckets:
        assert bucket.numel % (num_ranks * slice_alignment(bucket.dtype)) == 0
        members = [specs[i] for i in bucket.indices]
        assert len(members) == 1 or all(spec.num_bytes < alone_bytes for spec in members)
        for name, placement in placements_in(bucket, plan.specs, num_ranks):
            placed[name] = (placement, bucket)
    assert list(placed) == [*dict.fromkeys(placed)] and set(placed) == {spec.name for spec in specs}
    for spec in specs:
        placement, bucket = placed[spec.name]
        assert placement.offset % slice_alignment(bucket.dtype) == 0
        owned = [placement.owned_by(rank) for rank in range(num_ranks)]
        assert [i for r in owned for i in r] == list(range(spec.flat_numel))
        for rank, elements in enumerate(owned):
            where = placement.in_slice(rank)
            if elements:
                assert where.stop <= bucket.numel // num_ranks
                assert rank * bucket.numel // num_ranks + where.start == placement.offset + elements.start


@given(st.integers(0, 1000), st.sampled_from(DTYPES), st.integers(1, 5))
def test_a_parameter_in_no_bucket_is_divided_too(numel, dtype, num_ranks):
    spec = _spec(0, numel, dtype)
    placement = lone_placement(spec, num_ranks)
    assert [i for rank in range(num_ranks) for i in placement.owned_by(rank)] == list(range(spec.flat_numel))


def test_flat_views_follow_memory_and_come_back():
    turned = torch.arange(6.0).view(2, 3).t()
    spec = ParameterSpec("turned", (3, 2), (1, 3), torch.float32, CPU)
    assert flat_view(turned).tolist() == [0, 1, 2, 3, 4, 5]
    assert flat_view(turned).data_ptr() == turned.data_ptr()
    contiguous = turned.contiguous()
    assert flat_view(in_layout_of(spec, contiguous)).tolist() == [0, 1, 2, 3, 4, 5]
    assert torch.equal(shaped(flat_view(turned), spec, torch.float32), turned)
    pair = torch.tensor([1 + 2j, 3 + 4j])
    assert flat_view(pair).tolist() == [1, 2, 3, 4]
    assert flat_view(in_layout_of(_spec(0, 2, torch.complex64), pair.conj())).tolist() == [1, -2, 3, -4]
