"""Arguments that make no sense: one clear error, before any rank could hang."""

from typing import Any

import pytest
import torch
from reference import TwoLayers, raised
from torch import nn

from gradsync import DistributedDataParallel
from rank_pool import RankPool


def _no_module(rank: int, world: int) -> list[str]:
    things: list[Any] = ["net", nn.Linear, torch.optim.SGD(nn.Linear(2, 2).parameters()), None, [nn.Linear(2, 2)]]
    return [raised(lambda thing=thing: DistributedDataParallel(thing)) for thing in things]


def test_something_that_is_no_module(ranks: RankPool) -> None:
    for texts in ranks(_no_module):
        for text in texts:
            assert text.startswith("TypeError")
            assert "Module" in text
            assert "\n" not in text


def test_no_process_group() -> None:
    with pytest.raises(ValueError, match="process group"):
        DistributedDataParallel(nn.Linear(2, 2))


def _refused(rank: int, world: int, arguments: dict[str, Any]) -> str:
    return raised(lambda: DistributedDataParallel(TwoLayers(), **arguments))


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        ({"bucket_cap_mb": 0}, ["ConfigError", "0"]),
        ({"bucket_cap_mb": -1}, ["ConfigError", "-1"]),
        ({"bucket_cap_mb": float("nan")}, ["ConfigError", "nan"]),
        ({"bucket_cap_mb": "big"}, ["ConfigError", "big"]),
        ({"bucket_cap_mb_list": []}, ["ConfigError", "empty"]),
        ({"bucket_cap_mb_list": [1, 0]}, ["ConfigError", "0"]),
        ({"reduction": "median"}, ["ConfigError", "median", "mean", "sum", "weighted"]),
        ({"device_ids": [0, 1]}, ["ValueError", "None or contain a single element"]),
        ({"device_ids": [0]}, ["ValueError", "only work with single-device/multiple-device GPU modules"]),
        ({"delay_all_reduce_named_params": []}, ["ValueError", "need to be set at the same time"]),
    ],
)
def test_arguments_without_a_meaning(ranks: RankPool, arguments: dict[str, Any], fragments: list[str]) -> None:
    for text in ranks(_refused, arguments):
        for fragment in fragments:
            assert fragment in text


def _refused_on_rank_1_only(rank: int, world: int) -> str:
    module: Any = TwoLayers() if rank == 0 else TwoLayers().requires_grad_(False)
    return raised(lambda: DistributedDataParallel(module))


def test_what_only_one_rank_gets_wrong_is_told_on_all(ranks: RankPool) -> None:
    for text in ranks(_refused_on_rank_1_only):
        assert "grad" in text
