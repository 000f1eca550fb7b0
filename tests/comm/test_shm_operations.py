"""Every operation of the shm backend, over dtypes, sizes and numbers of ranks, against exact expectations."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shm_jobs import numbers, shm_group
from torch.distributed import ReduceOp

from gradsync.comm.shm_collectives import STAGE_BYTES
from gradsync.comm.wire import EAGER_BYTES
from rank_pool import RankPool

INTEGERS = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
COPIED_ONLY = [torch.float8_e4m3fn, torch.float8_e5m2]

SMALL = 7
ONE_PIECE = EAGER_BYTES // 4 + 3  # float32: too large for a packet
MANY_PIECES = 2 * STAGE_BYTES // 4 + 1001  # more than the stage holds at once
SIZES = [0, 1, SMALL, ONE_PIECE, MANY_PIECES]


@pytest.fixture(params=[2, 3, 4])
def pool(request: pytest.FixtureRequest) -> RankPool:
    name = {2: "ranks", 3: "ranks3", 4: "ranks4"}[request.param]
    return request.getfixturevalue(name)  # type: ignore[no-any-return]


def expected(op: Any, world: int, size: int, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    parts = [numbers(rank, size, dtype, salt) for rank in range(world)]
    if op == ReduceOp.AVG:
        total = functools.reduce(operator.add, parts)
        return torch.view_as_complex(torch.view_as_real(total) / world) if dtype.is_complex else total / world
    if dtype == torch.bool:
        parts = [part.to(torch.int64) for part in parts]
    functions: dict[Any, Callable[..., torch.Tensor]] = {
        ReduceOp.SUM: torch.add,
        ReduceOp.PRODUCT: torch.mul,
        ReduceOp.MIN: torch.minimum,
        ReduceOp.MAX: torch.maximum,
        ReduceOp.BAND: torch.bitwise_and,
        ReduceOp.BOR: torch.bitwise_or,
        ReduceOp.BXOR: torch.bitwise_xor,
    }
    wide = [part if dtype.is_floating_point or dtype.is_complex else part.to(torch.int64) for part in parts]
    return functools.reduce(functions[op], wide).to(dtype)


def combinations() -> list[tuple[Any, torch.dtype]]:
    arithmetic = [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]
    bitwise = [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]
    result = [(op, dtype) for op in arithmetic for dtype in [*INTEGERS, *FLOATS, torch.bool]]
    result += [(op, dtype) for op in bitwise for dtype in [*INTEGERS, torch.bool]]
    result += [(ReduceOp.AVG, dtype) for dtype in [*FLOATS, *COMPLEX]]
    return result + [(ReduceOp.SUM, dtype) for dtype in COMPLEX]


def all_reduce_everything(rank: int, world: int, sizes: list[int]) -> None:
    with shm_group() as group:
        for op, dtype in combinations():
            for size in sizes:
                for is_shared in (False, True):
                    tensor = numbers(rank, size, dtype)
                    if is_shared:
                        tensor = group.allocate(size, dtype).copy_(tensor)
                    dist.all_reduce(tensor, op, group)
                    assert_equal(tensor, expected(op, world, size, dtype), f"{op} of {dtype}, {size}, {is_shared}")


def assert_equal(actual: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    assert actual.dtype == wanted.dtype and actual.shape == wanted.shape, what
    if actual.dtype in COPIED_ONLY:
        actual, wanted = actual.view(torch.uint8), wanted.view(torch.uint8)
    assert torch.equal(actual, wanted), f"{what}: {actual} instead of {wanted}"


def test_all_reduce_of_every_dtype(pool: RankPool) -> None:
    pool(all_reduce_everything, [0, 1, SMALL, ONE_PIECE])


def all_reduce_of_many_pieces(rank: int, world: int) -> None:
    with shm_group() as group:
        for dtype in (torch.float32, torch.bfloat16):
            wanted = expected(ReduceOp.SUM, world, MANY_PIECES, dtype)
            for shared_ranks in ([], [0], list(range(world))):
                tensor = numbers(rank, MANY_PIECES, dtype)
                if rank in shared_ranks:
                    tensor = group.allocate(MANY_PIECES, dtype).copy_(tensor)
                dist.all_reduce(tensor, group=group)
                assert_equal(tensor, wanted, f"{dtype} with {shared_ranks} in the segment")


def test_all_reduce_in_pieces_and_in_place_mix(pool: RankPool) -> None:
    pool(all_reduce_of_many_pieces)


def sum_in_rank_order(rank: int, world: int) -> None:
    def noise(of_rank: int, size: int) -> torch.Tensor:
        return torch.randn(size, generator=torch.Generator().manual_seed(of_rank))

    with shm_group() as group:
        for size in (SMALL, ONE_PIECE, MANY_PIECES):
            wanted = functools.reduce(operator.add, [noise(peer, size) for peer in range(world)])
            shared = group.allocate(size, torch.float32).copy_(noise(rank, size))
            for tensor in (noise(rank, size), shared):
                dist.all_reduce(tensor, group=group)
                assert torch.equal(tensor, wanted), f"{size} elements are not summed in rank order"


def test_sums_have_the_bits_of_a_sum_in_rank_order(pool: RankPool) -> None:
    pool(sum_in_rank_order)


def move_everything(rank: int, world: int) -> None:
    with shm_group() as group:
        for size in SIZES:
            dtypes = [torch.float32]
            if size == SMALL:
                dtypes += [*INTEGERS, *FLOATS, *COMPLEX, torch.bool, *COPIED_ONLY]
            for dtype in dtypes:
                for is_shared in (False, True):
                    move(rank, world, group, size, dtype, is_shared)


def move(rank: int, world: int, group: Any, size: int, dtype: torch.dtype, is_shared: bool) -> None:
    what = f"of {size} {dtype}, {'in' if is_shared else 'outside'} the segment"
    own = [numbers(peer, size, dtype) for peer in range(world)]

    def mine() -> torch.Tensor:
        return group.allocate(size, dtype).copy_(own[rank]) if is_shared else own[rank].clone()

    def empty(num: int = size) -> torch.Tensor:
        return torch.empty(num, dtype=dtype)

    root = world - 1
    tensor = mine()
    dist.broadcast(tensor, root, group)
    assert_equal(tensor, own[root], f"broadcast {what}")

    outputs = [empty() for _ in range(world)]
    dist.all_gather(outputs, mine(), group)
    for peer in range(world):
        assert_equal(outputs[peer], own[peer], f"all_gather {what}")

    whole = empty(size * world)
    group._allgather_base(whole, mine()).wait()
    assert_equal(whole, torch.cat(own), f"all_gather_single {what}")

    outputs = [empty() for _ in range(world)]
    dist.gather(mine(), outputs if rank == root else None, root, group)
    for peer in range(world if rank == root else 0):
        assert_equal(outputs[peer], own[peer], f"gather {what}")

    tensor = empty()
    dist.scatter(tensor, own if rank == root else None, root, group)
    assert_equal(tensor, own[rank], f"scatter {what}")

    def parcel(sender: int, receiver: int) -> torch.Tensor:
        return numbers(sender, size, dtype, salt=receiver)

    outputs = [empty() for _ in range(world)]
    dist.all_to_all(outputs, [parcel(rank, peer) for peer in range(world)], group)
    for peer in range(world):
        assert_equal(outputs[peer], parcel(peer, rank), f"all_to_all {what}")


def test_operations_that_move_data(pool: RankPool) -> None:
    pool(move_everything)


def reduce_everything(rank: int, world: int) -> None:
    with shm_group() as group:
        for size in SIZES:
            for op, dtype in combinations():
                if size in (0, SMALL) or (op == ReduceOp.SUM and dtype in (torch.float32, torch.bfloat16)):
                    for is_shared in (False, True):
                        reduce(rank, world, group, size, op, dtype, is_shared)


def reduce(rank: int, world: int, group: Any, size: int, op: Any, dtype: torch.dtype, is_shared: bool) -> None:
    what = f"with {op} of {size} {dtype}, {'in' if is_shared else 'outside'} the segment"

    def placed(tensor: torch.Tensor) -> torch.Tensor:
        return group.allocate(tensor.numel(), dtype).copy_(tensor) if is_shared else tensor

    root = world - 1
    tensor = placed(numbers(rank, size, dtype))
    group.reduce([tensor], options(dist.ReduceOptions(), op, root)).wait()
    wanted = expected(op, world, size, dtype) if rank == root else numbers(rank, size, dtype)
    assert_equal(tensor, wanted, f"reduce {what}")

    inputs = [numbers(rank, size, dtype, salt=peer) for peer in range(world)]
    output = torch.empty(size, dtype=dtype)
    group.reduce_scatter([output], [inputs], options(dist.ReduceScatterOptions(), op)).wait()
    assert_equal(output, expected(op, world, size, dtype, salt=rank), f"reduce_scatter {what}")

    output = torch.empty(size, dtype=dtype)
    whole = placed(torch.cat(inputs))
    group._reduce_scatter_base(output, whole, options(dist.ReduceScatterOptions(), op)).wait()
    assert_equal(output, expected(op, world, size, dtype, salt=rank), f"reduce_scatter_single {what}")
    assert_equal(whole, torch.cat(inputs), f"reduce_scatter_single {what} changed its input")


def options(result: Any, op: Any, root: int | None = None) -> Any:
    result.reduceOp = op
    if root is not None:
        result.rootRank = root
    return result


def test_reduce_and_reduce_scatter(pool: RankPool) -> None:
    pool(reduce_everything)


def all_to_all_of_uneven_parts(rank: int, world: int) -> None:
    with shm_group() as group:
        for unit in (1, ONE_PIECE):
            sizes = [[unit * ((sender + receiver) % 3) for receiver in range(world)] for sender in range(world)]
            inputs = [numbers(rank, sizes[rank][peer], torch.float32, salt=peer) for peer in range(world)]
            received = [sizes[peer][rank] for peer in range(world)]
            output = torch.empty(sum(received))
            dist.all_to_all_single(output, torch.cat(inputs), received, sizes[rank], group)
            parts = [numbers(peer, sizes[peer][rank], torch.float32, salt=rank) for peer in range(world)]
            assert torch.equal(output, torch.cat(parts))


def test_all_to_all_single_with_sizes(pool: RankPool) -> None:
    pool(all_to_all_of_uneven_parts)


def tensors_that_are_only_read(rank: int, world: int) -> None:
    """Their memory may hold one element many times, which cannot be written to."""
    with shm_group() as group:
        mine = torch.full((1,), rank + 1.0).expand(4)
        received = mine if rank == 0 else torch.zeros(4)
        dist.broadcast(received, src=0, group=group)
        assert received.eq(1).all()
        total = torch.full((4,), rank + 1.0) if rank == 0 else mine
        dist.reduce(total, dst=0, group=group)
        assert total.eq(sum(range(1, world + 1)) if rank == 0 else rank + 1).all()


def test_tensors_that_are_only_read(pool: RankPool) -> None:
    pool(tensors_that_are_only_read)


def tensors_that_are_not_contiguous(rank: int, world: int) -> None:
    with shm_group() as group:
        base = torch.zeros(6, 4)
        base[:, ::2] = rank + 1.0
        dist.all_reduce(base[:, ::2], group=group)
        total = world * (world + 1) / 2
        assert base[:, ::2].eq(total).all() and base[:, 1::2].eq(0).all()

        matrix = numbers(rank, (3, 5), torch.float32)
        column = matrix.t()
        dist.broadcast(column, 0, group)
        assert torch.equal(matrix, numbers(0, (3, 5), torch.float32))

        images = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last) * (rank + 1)
        dist.all_reduce(images, group=group)
        assert images.eq(total).all() and images.is_contiguous(memory_format=torch.channels_last)

        outputs = torch.zeros(4, world)
        dist.all_gather(list(outputs.unbind(1)), torch.full((4,), float(rank)), group)
        assert torch.equal(outputs, torch.arange(world).expand(4, world).float())

        parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
        dist.broadcast(parameter.data, 1, group)
        assert parameter.eq(1).all()

        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.bool):
            single = torch.full((1, 2), rank == 0).to(dtype)[:, 0]  # contiguous by torch's rules, with a stride of two
            dist.broadcast(single, 0, group)
            assert single.eq(1).all()

        number = torch.tensor(rank + 1.0)
        dist.all_reduce(number, group=group)
        assert number.shape == () and number.item() == total


def test_tensors_of_any_strides(pool: RankPool) -> None:
    pool(tensors_that_are_not_contiguous)


def collect_objects(rank: int, world: int) -> None:
    with shm_group() as group:
        objects: list[Any] = [None] * world
        dist.all_gather_object(objects, {"rank": rank, "text": "x" * rank}, group)
        assert objects == [{"rank": peer, "text": "x" * peer} for peer in range(world)]
        shared = [("from", rank)] if rank == 0 else [None]
        dist.broadcast_object_list(shared, 0, group)
        assert shared == [("from", 0)]
        dist.barrier(group)


def test_objects_and_barrier(pool: RankPool) -> None:
    pool(collect_objects)


def sparse_sum(rank: int, world: int) -> None:
    with shm_group() as group:
        indices, values = torch.tensor([[0, rank + 1, rank + 1]]), torch.tensor([[1.0, 2], [3, 4], [5, 6]])
        tensor = torch.sparse_coo_tensor(indices, values, (world + 2, 2), check_invariants=False)
        dense = sum(
            torch.zeros(world + 2, 2).index_add(0, torch.tensor([0, peer + 1, peer + 1]), values)
            for peer in range(world)
        )
        dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor.to_dense(), dense)


def test_all_reduce_of_sparse_tensors(pool: RankPool) -> None:
    pool(sparse_sum)


def sums_in_sub_groups(rank: int, world: int) -> None:
    shm_pairs = [[0, world - 1], [world - 2, world - 1]]
    with (
        shm_group(ranks=shm_pairs[0]) as first,
        shm_group(ranks=shm_pairs[1]) as second,
        shm_group() as everybody,
    ):
        for group, members in ((first, shm_pairs[0]), (second, shm_pairs[1]), (everybody, range(world))):
            if rank in members:
                tensor = torch.full((3,), float(rank))
                dist.all_reduce(tensor, group=group)
                assert tensor.eq(float(sum(set(members)))).all()
                dist.broadcast(tensor.fill_(rank), max(members), group)
                assert tensor.eq(max(members)).all()


def test_sub_groups(ranks3: RankPool, ranks4: RankPool) -> None:
    ranks3(sums_in_sub_groups)
    ranks4(sums_in_sub_groups)


def one_rank(rank: int, world: int) -> None:
    with shm_group(ranks=[0]) as group:
        if rank == 0:
            for size in (3, MANY_PIECES):
                tensor = numbers(0, size, torch.float32)
                for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX):
                    dist.all_reduce(tensor, op, group)
                outputs = [torch.zeros(size)]
                dist.all_gather(outputs, tensor, group)
                output = torch.zeros(size)
                dist.reduce_scatter(output, [tensor], group=group)
                exchanged = [torch.zeros(size)]
                dist.all_to_all(exchanged, [tensor], group)
                for result in (tensor, outputs[0], output, exchanged[0]):
                    assert torch.equal(result, numbers(0, size, torch.float32))
                dist.barrier(group)


def test_a_group_of_one_rank(ranks: RankPool) -> None:
    ranks(one_rank)


def wrong_arguments(rank: int, world: int) -> None:
    with shm_group() as group:
        for message, call in (
            ("integers and bools only", lambda: dist.all_reduce(torch.ones(2), ReduceOp.BAND, group)),
            (
                "lose the fraction",
                lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32), ReduceOp.AVG, group),
            ),
            ("not reduced", lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e5m2), group=group)),
            ("2 output tensors", lambda: group.allgather([[torch.ones(2)]], [torch.ones(2)])),
            ("must hold 2 times 2", lambda: group._allgather_base(torch.ones(5), torch.ones(2))),
            (
                "must hold 2 elements",
                lambda: dist.all_gather([torch.ones(3), torch.ones(2)], torch.ones(2), group),
            ),
            ("not divisible", lambda: group.alltoall_base(torch.ones(3), torch.ones(3), [], [])),
            (
                "sizes of all_to_all_single",
                lambda: group.alltoall_base(torch.ones(3), torch.ones(3), [1, 1], [2, 1]),
            ),
            ("CPU tensors", lambda: dist.all_reduce(torch.ones(2, device="meta"), group=group)),
        ):
            with pytest.raises(ValueError, match=message):
                call()
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=group)  # nothing of that has hurt the group
        assert tensor.item() == world


def test_wrong_arguments_are_refused_before_anything_is_sent(ranks: RankPool) -> None:
    ranks(wrong_arguments)
