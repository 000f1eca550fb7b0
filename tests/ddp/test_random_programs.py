"""Random training programs of two and three ranks against one process, compared after every step.

What is drawn: blocks that differ per rank and step, shared and repeated blocks, both kinds of checkpoints,
accumulation (of other lengths on each rank), several backwards, frozen blocks, outputs and side losses that are
left out, buffers, odd parameters, sparse tables, gradients that are kept or cleared early, lone evaluation, backwards
that raise.
"""

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from random_programs import HEADS, KINDS, Block, Forward, Program, Step, Visit, Window, train
from reference import assert_equal_replicas

from rank_pool import RankPool

Draw = st.DrawFn


@st.composite
def _blocks(draw: Draw) -> tuple[Block, ...]:
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=4))
    blocks: list[Block] = []
    for number, kind in enumerate(kinds):
        earlier = [n for n in range(number) if kinds[n] == kind == "linear"]
        shares = draw(st.sampled_from([None, *earlier])) if earlier else None
        blocks.append(Block(kind, shares))
    return tuple(blocks)


@st.composite
def _forwards(draw: Draw, num_blocks: int, can_recompute: bool, has_penalty: bool) -> Forward:
    hows = ["plain", "plain", "reentrant", "checkpoint"] if can_recompute and not has_penalty else ["plain"]
    visits = st.builds(Visit, st.integers(0, num_blocks - 1), st.sampled_from(hows))
    return Forward(
        path=tuple(draw(st.lists(visits, max_size=4))),
        heads=tuple(draw(st.lists(st.integers(0, HEADS - 1), min_size=1, max_size=HEADS, unique=True))),
        uses_side=draw(st.booleans()),
        has_penalty=has_penalty,
    )


@st.composite
def _steps(
    draw: Draw, world: int, num_blocks: int, stem: str, reduction: str, is_first: bool, has_buffers: bool
) -> Step:
    ending = draw(st.sampled_from(["one", "one", "on demand"] + ["each", "twice"] * (reduction != "weighted")))
    has_penalty = stem == "floats" and ending != "twice" and draw(st.integers(0, 5)) == 0
    forwards = _forwards(num_blocks, stem == "floats", has_penalty)
    has_branches, is_uneven = draw(st.booleans()), draw(st.booleans())
    num_last = 1 if ending == "twice" else draw(st.integers(1, 2))
    # Buffers are sent by a window's first forward if that does not synchronise, and else by all that do. So that every
    # rank sends as often, all have one that doesn't where the window has several forwards or no backward at its end.
    fewest = 1 if has_buffers and (ending == "on demand" or num_last > 1) else 0
    num_unsynced = draw(st.integers(fewest, 2))
    shared = Window(tuple(draw(forwards) for _ in range(num_unsynced)), tuple(draw(forwards) for _ in range(num_last)))
    windows = []
    for _ in range(world):
        window = shared
        if has_branches:
            count = draw(st.integers(fewest, 2)) if is_uneven else num_unsynced
            window = Window(tuple(draw(forwards) for _ in range(count)), tuple(draw(forwards) for _ in range(num_last)))
        windows.append(window)
    clears = "none" if is_first else draw(st.sampled_from(["none", "none", "zeros", "never"]))
    return Step(
        windows=tuple(windows),
        ending=ending,
        clears=clears,
        frozen=draw(st.frozensets(st.integers(0, num_blocks - 1), max_size=2)) if draw(st.booleans()) else frozenset(),
        evaluates=draw(st.sampled_from(["never", "never", "on rank 0", "everywhere", "with grad"])),
        blows=clears == "none" and draw(st.integers(0, 4)) == 0,
        discards=draw(st.sampled_from(["never", "never", "never", "none", "zeros"])),
    )


@st.composite
def _programs(draw: Draw, world: int) -> Program:
    blocks = draw(_blocks())
    stem = draw(st.sampled_from(["floats", "floats", "tokens", "sparse tokens"]))
    reduction = draw(st.sampled_from(["mean", "mean", "mean", "sum", "weighted"]))
    num_steps = draw(st.integers(2, 4))
    has_buffers = any(block.kind == "batch norm" for block in blocks)
    steps = [draw(_steps(world, len(blocks), stem, reduction, number == 0, has_buffers)) for number in range(num_steps)]
    return Program(
        blocks=blocks,
        steps=tuple(steps),
        stem=stem,
        output=draw(st.sampled_from(["tuple", "dict", "object"])),
        optimizer=draw(st.sampled_from(["sgd", "momentum", "adamw"])),
        cap=draw(st.sampled_from([None, 1e-6, 1e-4])),
        reduction=reduction,
        starts_apart=draw(st.booleans()),
        skips_by=draw(st.sampled_from(["context", "attribute"])),
    )


# A failing program is told as it was drawn: making it smaller takes a new set of processes for each try.
_settings = settings(
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@settings(_settings, max_examples=150)
@given(program=_programs(world=2))
def test_two_ranks(ranks: RankPool, program: Program) -> None:
    assert_equal_replicas(ranks(train, program))


@settings(_settings, max_examples=40)
@given(program=_programs(world=3))
def test_three_ranks(ranks3: RankPool, program: Program) -> None:
    assert_equal_replicas(ranks3(train, program))


@pytest.mark.stress
@pytest.mark.timeout(3600)
@settings(_settings, max_examples=3000, derandomize=False, print_blob=True, phases=[Phase.generate, Phase.shrink])
@given(program=_programs(world=2))
def test_many_more(ranks: RankPool, program: Program) -> None:
    assert_equal_replicas(ranks(train, program))
