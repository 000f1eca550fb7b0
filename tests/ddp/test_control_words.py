"""Control words survive the sum over ranks exactly."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from gradsync.ddp.control import WORD_LIMIT, RankState, Slot, num_words, read_words, split_weight, write_words

words = st.integers(0, WORD_LIMIT - 1)


@given(st.lists(st.tuples(words, words, words, st.integers(0, 2**40)), min_size=1, max_size=5), st.data())
def test_every_rank_reads_what_every_rank_wrote(facts, data):
    world, num_parameters = len(facts), 4
    total = torch.zeros(num_words(num_parameters, world))
    used, late, slots = [], [], []
    for rank, (number, plan, change, weight) in enumerate(facts):
        used.append(data.draw(st.sets(st.integers(0, num_parameters - 1))))
        late.append(data.draw(st.sets(st.integers(0, num_parameters - 1))))
        slots.append(Slot(RankState.TRAINING, number, plan, change, *split_weight(weight)))
        mine = torch.zeros_like(total)
        write_words(mine.numpy(), used[-1], late[-1], slots[-1], rank, num_parameters)
        total += mine
    read = read_words(total.numpy(), num_parameters)
    assert list(read.slots) == slots
    assert list(read.used) == [sum(i in u for u in used) for i in range(num_parameters)]
    assert read.late_anywhere == sorted(set().union(*late))
    assert read.total_weight == sum(weight for *_, weight in facts)
    assert read.num_training == world


def test_joined_ranks_do_not_train():
    target = torch.zeros(num_words(1, 1))
    write_words(target.numpy(), [], [], Slot(RankState.JOINED, 0, 0, 0, 0, 0.0), 0, 1)
    assert read_words(target.numpy(), 1).num_training == 0
