"""Tensors are found in whatever forward returns."""

import dataclasses
from collections import OrderedDict, namedtuple

import torch

from gradsync.ddp.outputs import find_tensors

Pair = namedtuple("Pair", "first second")


@dataclasses.dataclass
class Data:
    logits: torch.Tensor
    rest: list


class Plain:
    def __init__(self, value):
        self.value = value


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


def test_every_kind_of_output():
    tensors = [torch.zeros(i) for i in range(9)]
    output = {
        "a": (tensors[0], [tensors[1], None, "text", 5]),
        "b": Data(tensors[2], [tensors[3]]),
        "c": Plain({"x": tensors[4]}),
        "d": Slotted(tensors[5]),
        "e": Pair(tensors[6], OrderedDict(k=tensors[7])),
        "f": {1: Plain(Plain(tensors[8]))},
    }
    found = {id(t) for t in find_tensors(output)}
    assert found == {id(t) for t in tensors}


def test_a_structure_that_contains_itself_ends():
    loop = Plain(None)
    tensor = torch.zeros(1)
    loop.value = [loop, tensor, tensor]
    assert [id(t) for t in find_tensors(loop)] == [id(tensor)]


def test_modules_are_not_searched():
    assert list(find_tensors(Plain(torch.nn.Linear(2, 2)))) == []
