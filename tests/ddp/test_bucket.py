"""A bucket alone: copying in, writing back, and never overwriting a gradient that somebody still holds."""

import torch
from torch import nn

from gradsync.ddp.bucket import Bucket
from gradsync.ddp.plan import make_plan, parameter_spec


def make_bucket(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Bucket, list[nn.Parameter]]:
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in shapes]
    specs = [parameter_spec(str(i), p) for i, p in enumerate(parameters)]
    plan = make_plan(specs, range(len(specs)), [1e9])
    return Bucket(0, plan.buckets[0], specs, parameters), parameters


def run_pass(bucket: Bucket, touched: bytes, scale: float = 1.0, is_used: list[bool] | None = None) -> None:
    bucket.start_pass(0)
    bucket.collect(bytearray(touched), scale)
    bucket.write_back(is_used)


def test_gradients_are_scaled_into_views_and_missing_ones_are_zero():
    bucket, (a, b) = make_bucket((2,), (3,))
    a.grad = torch.tensor([2.0, 4.0])
    run_pass(bucket, b"\1\0", scale=0.5)
    assert a.grad.tolist() == [1.0, 2.0]
    assert b.grad.tolist() == [0.0, 0.0, 0.0]
    assert a.grad is bucket.views[0]
    assert bucket.missing == [1]


def test_an_accumulated_view_is_not_copied_again():
    bucket, (a,) = make_bucket((2,))
    a.grad = torch.ones(2)
    run_pass(bucket, b"\1")
    memory = a.grad.data_ptr()
    a.grad += 1
    run_pass(bucket, b"\1")
    assert a.grad.tolist() == [2.0, 2.0]
    assert a.grad.data_ptr() == memory


def test_a_gradient_that_is_still_held_keeps_its_values():
    bucket, (a,) = make_bucket((2,))
    a.grad = torch.ones(2)
    run_pass(bucket, b"\1")
    for held in (a.grad, a.grad.view(-1)):
        before = held.clone()
        a.grad = torch.full((2,), 7.0)
        run_pass(bucket, b"\1")
        assert torch.equal(held, before)
        assert a.grad.tolist() == [7.0, 7.0]


def test_memory_is_reused_when_nobody_holds_the_gradient():
    bucket, (a,) = make_bucket((2,))
    places = set()
    for _ in range(4):
        a.grad = torch.ones(2)
        run_pass(bucket, b"\1")
        places.add(a.grad.data_ptr())
        a.grad = None
    assert len(places) == 1


def test_what_no_rank_used_is_put_back_untouched():
    bucket, (a, b) = make_bucket((2,), (2,))
    preset = torch.full((2,), 7.0)
    a.grad, b.grad = preset, None
    run_pass(bucket, b"\0\0", scale=1 / 3, is_used=[False, False])
    assert a.grad is preset
    assert a.grad.tolist() == [7.0, 7.0]
    assert b.grad is None


def test_an_untouched_view_is_put_back_bit_for_bit():
    bucket, (a, b) = make_bucket((1,), (1,))
    a.grad, b.grad = torch.tensor([0.1]), torch.tensor([1.0])
    run_pass(bucket, b"\1\1")
    kept = a.grad.clone()
    run_pass(bucket, b"\0\1", scale=1 / 3, is_used=[False, True])
    assert torch.equal(a.grad, kept)


def test_views_have_the_parameters_strides_and_dtype():
    parameter = nn.Parameter(torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last))
    other = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    specs = [parameter_spec("w", parameter), parameter_spec("z", other)]
    plan = make_plan(specs, [0, 1], [1e9])
    bucket = Bucket(0, plan.buckets[0], specs, [parameter, other])
    parameter.grad = torch.randn(2, 3, 4, 4)
    other.grad = torch.tensor([1 + 2j, 3j, 4], dtype=torch.complex64)
    expected = parameter.grad.clone(), other.grad.clone()
    run_pass(bucket, b"\1\1")
    assert parameter.grad.stride() == parameter.stride()
    assert torch.equal(parameter.grad, expected[0])
    assert torch.equal(other.grad, expected[1])


def test_a_view_can_be_detached_in_place():
    bucket, (a,) = make_bucket((2,))
    a.grad = torch.ones(2)
    run_pass(bucket, b"\1")
    a.grad.detach_()
