"""Validation loss: a mean over tokens, the same for any number of ranks and batches."""

import torch

from gradsync.train.evaluate import evaluate
from gradsync.train.ranks import Alone, Group


class Scores(torch.nn.Module):
    """The summed loss is the sum of the targets that count."""

    speaks = True

    def summed_loss(self, inputs, targets):
        assert not self.training
        return targets.clamp(min=0).sum().float()


def batches(rows):
    return [(torch.tensor([row]), torch.tensor([row])) for row in rows]


def test_padding_does_not_count_and_the_mode_is_put_back():
    model = Scores().train()
    result = evaluate(model, batches([[1, 2, 3], [6, -1, -1]]), Alone(), torch.device("cpu"))
    assert (result.loss, result.tokens) == (3.0, 4)
    assert model.training


def test_it_is_no_mean_of_means(ranks):
    assert ranks(_evaluate_unevenly) == [(2.0, 4)] * 2


def _evaluate_unevenly(rank, world):
    own = [[1, 1, 1]] if rank == 0 else [[5, -1, -1]]
    result = evaluate(Scores(), batches(own), Group(), torch.device("cpu"))
    return result.loss, result.tokens
