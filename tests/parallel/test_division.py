"""What a model cannot be divided into is refused, and only what works is offered."""

import pytest

from gradsync.errors import ConfigError
from gradsync.model.shape import GPT2Config
from gradsync.parallel.degrees import Degrees
from gradsync.parallel.division import Flow, check_division, choices

SHAPE = GPT2Config(2, 6, 24, 8, 101)


@pytest.mark.parametrize(
    ("degrees", "flow", "message"),
    [
        (Degrees(1, 4), Flow("1f1b", 4, 1, 8), "--tp 4 does not divide the model's 6 heads"),
        (Degrees(1, 3), Flow("1f1b", 4, 1, 8, True), "--tp 3 does not divide --context 8; take another --context or"),
        (Degrees(1, 1, 3), Flow("1f1b", 4, 1, 8), "makes 3 stages, and the model has 2"),
        (Degrees(1, 1, 2), Flow("interleaved", 4, 1, 8), "makes 4 stages"),
        (Degrees(1, 1, 2), Flow("1f1b", 1, 1, 8), "needs at least 2 micro-batches a step .* there is 1"),
    ],
)
def test_what_cannot_be_divided_is_refused(degrees, flow, message):
    with pytest.raises(ConfigError, match=message):
        check_division(SHAPE, "ddp", degrees, flow)


def test_only_what_works_is_offered():
    assert choices(4, lambda degrees: degrees.tensor < 4 and degrees.pipeline == 1) == (
        "--dp 4 --tp 1 --pp 1; --dp 2 --tp 2 --pp 1"
    )
    assert choices(4, lambda degrees: False) == ""


def test_many_choices_are_cut_short():
    assert choices(12, lambda degrees: True).endswith(" and 6 more")
