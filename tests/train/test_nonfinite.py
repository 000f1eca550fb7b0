"""Finding the sequences behind a step that was not finite."""

import torch
from torch import nn

from gradsync.parallel.held import held_whole
from gradsync.train.nonfinite import explain, find_sequences
from gradsync.train.ranks import Alone


class Lookup(nn.Module):
    """The loss of a sequence is the sum of its tokens' weights; some tokens are bad."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 1)
        with torch.no_grad():
            self.table.weight.fill_(1.0)
            self.table.weight[3] = float("inf")
            self.table.weight[4] = 0.0

    is_collective = False

    @property
    def held(self):
        return held_whole(self)

    def summed_loss(self, inputs, targets):
        return self.table(inputs).sqrt().sum()  # the gradient at 0 is infinite


def batch(*rows):
    inputs = torch.tensor(rows)
    return inputs, inputs


def test_a_bad_loss_and_a_bad_gradient_are_found_by_their_global_numbers():
    batches = [batch([0, 1], [0, 3]), batch([4, 1], [2, 2])]
    assert find_sequences(Lookup(), batches, range(11, 19, 2), torch.device("cpu")) == [13, 15]


def test_the_search_leaves_no_gradients_and_the_mode_alone():
    model = Lookup().train()
    find_sequences(model, [batch([3])], range(1), torch.device("cpu"))
    assert model.training
    assert model.table.weight.grad is None


def test_the_sentence_names_rank_step_and_sequences():
    text = explain(Alone(), 7, [13, 15], float("inf"), [0])
    assert text == "step 7: the loss is not finite on rank 0 (sequences: 13, 15)"
    assert explain(Alone(), 7, [13], float("inf"), []).startswith(
        "step 7: the gradient (norm inf) is not finite on rank 0"
    )
    assert explain(Alone(), 7, [], float("inf"), []).endswith("on the sum of all ranks only")
