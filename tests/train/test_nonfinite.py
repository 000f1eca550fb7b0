"""Finding the sequences behind a step that was not finite."""

from types import SimpleNamespace

import torch
from torch import nn

from gradsync.parallel.held import held_whole
from gradsync.train.nonfinite import explain, find_parameter, find_sequences
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


class Two(nn.Module):
    """A lookup, and a layer that uses what it brings; perhaps with buckets."""

    is_collective = False
    ddp = None

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1, bias=False), Lookup()

    @property
    def held(self):
        return held_whole(self)

    def summed_loss(self, inputs, targets):
        values = self.second.table(inputs)
        return self.first(values).sum() + values.sqrt().sum()


def with_buckets(*names):
    places = [SimpleNamespace(number=i, parameters=[SimpleNamespace(name=name)]) for i, name in enumerate(names)]
    model = Two()
    object.__setattr__(model, "ddp", SimpleNamespace(report=lambda: SimpleNamespace(buckets=places)))
    return model


def test_the_parameter_is_the_first_in_backward_with_its_bucket():
    cpu = torch.device("cpu")
    assert find_parameter(Two(), [batch([0, 1])], cpu) == ""
    assert find_parameter(Two(), [batch([0, 1]), batch([4])], cpu) == "second.table.weight"
    model = with_buckets("first.weight", "second.table.weight").train()
    assert find_parameter(model, [batch([4])], cpu) == "second.table.weight, bucket 1"
    assert find_parameter(model, [batch([3])], cpu) == "first.weight, bucket 0"
    assert model.training
    text = explain(Alone(), 7, [13], float("inf"), [0], "first.weight, bucket 0")
    assert text.endswith("rank 0 (sequences: 13; first in first.weight, bucket 0)")
