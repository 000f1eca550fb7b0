"""The reducer in one process, with a communication hook whose futures the test completes, reorders or fails."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future

from gradsync import DistributedDataParallel as DDP
from gradsync.errors import ReducerFailedError


class ManualHook:
    """Completes the futures of a pass in a given order when the last bucket is launched."""

    def __init__(self, order=None, factor=1.0, error=None):
        self.order, self.factor, self.error = order, factor, error
        self.launched, self.futures = [], []

    def __call__(self, state, bucket):
        self.launched.append(bucket.index())
        future = Future()
        self.futures.append((future, bucket.buffer()))
        if bucket.is_last():
            for number in self.order or range(len(self.futures)):
                self._complete(*self.futures[number])
            self.futures = []
        return future

    def _complete(self, future, buffer):
        if self.error is not None:
            future.set_exception(self.error)
        else:
            future.set_result(buffer * self.factor)


@pytest.fixture
def lone_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def three_buckets(hook):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    ddp = DDP(net, bucket_cap_mb=1e-6)
    ddp.register_comm_hook(None, hook)
    return net, ddp


def local_gradients(net, x):
    gradients = torch.autograd.grad(net(x).pow(2).sum(), list(net.parameters()))
    return [g.clone() for g in gradients]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_futures_may_complete_in_any_order(lone_group, order):
    hook = ManualHook(order, factor=2.0)
    net, ddp = three_buckets(hook)
    for _ in range(3):
        x = torch.randn(2, 4)
        expected = local_gradients(net, x)
        ddp.zero_grad()
        ddp(x).pow(2).sum().backward()
        assert [torch.equal(p.grad, 2 * g) for p, g in zip(net.parameters(), expected, strict=True)] == [True] * 3
    assert hook.launched == [0, 1, 2] * 3


def test_buckets_leave_during_backward_once_their_readiness_is_learned(lone_group):
    seen = []

    class Watching(ManualHook):
        def __call__(self, state, bucket):
            seen.append((bucket.index(), torch._C._current_graph_task_id() != -1, list(arrived)))
            return super().__call__(state, bucket)

    net, ddp = three_buckets(Watching())
    arrived = []
    for number, parameter in enumerate(net.parameters()):
        parameter.register_hook(lambda _, number=number: arrived.append(number))
    for _ in range(2):
        seen.clear()
        arrived.clear()
        ddp(torch.randn(2, 4)).sum().backward()
    assert [(index, gradients) for index, _, gradients in seen] == [(0, [2]), (1, [2, 1]), (2, [2, 1, 0])]


def test_a_parameter_that_fires_more_often_than_learned_is_late_and_right(lone_group):
    hook = ManualHook()
    net, ddp = three_buckets(hook)
    last = net[2]
    for uses in (1, 2, 1, 3):
        x = torch.randn(2, 4)
        losses = [last(net[1](net[0](x))).sum()] + [last(x).pow(2).sum() for _ in range(uses - 1)]
        expected = torch.autograd.grad(sum(losses), list(net.parameters()), retain_graph=True)
        ddp.zero_grad()
        for parameter in net.parameters():
            parameter.grad = None
        sum(losses).backward()
        for parameter, g in zip(net.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, g)


def test_a_failing_future_fails_the_pass_and_every_later_one(lone_group):
    hook = ManualHook(error=RuntimeError("the wire broke"))
    net, ddp = three_buckets(hook)
    with pytest.raises(RuntimeError, match="the wire broke"):
        ddp(torch.randn(2, 4)).sum().backward()
    with pytest.raises(ReducerFailedError, match="the wire broke"):
        ddp(torch.randn(2, 4))
    hook.error, hook.futures = None, []
    ddp.reset_after_failure()
    ddp.zero_grad()
    ddp(torch.ones(2, 4)).sum().backward()
    assert all(p.grad is not None for p in net.parameters())


def test_an_exception_inside_no_sync_restores_synchronisation(lone_group):
    _, ddp = three_buckets(ManualHook())
    with pytest.raises(KeyError), ddp.no_sync():
        assert not ddp.require_backward_grad_sync
        with ddp.no_sync():
            pass
        assert not ddp.require_backward_grad_sync
        raise KeyError
    assert ddp.require_backward_grad_sync


def test_a_dropped_wrapper_leaves_the_module_alone(lone_group):
    hook = ManualHook()
    net, ddp = three_buckets(hook)
    del ddp
    net(torch.randn(2, 4)).sum().backward()
    assert hook.launched == []
