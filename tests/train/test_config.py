"""Options of a run: presets below given values, refusals that name the option, what makes runs the same."""

from dataclasses import FrozenInstanceError, asdict, fields

import pytest

from gradsync.errors import ConfigError
from gradsync.train.config import PRESETS, TrainConfig, differences, flag, inherited, resolve


def test_the_defaults_are_those_of_tiny():
    assert resolve({}) == TrainConfig() == resolve({"preset": "tiny"})


def test_given_values_win_over_the_preset():
    config = resolve({"preset": "gpt2", "steps": 7})
    assert (config.steps, config.batch_tokens) == (7, 524_288)


def test_the_gpt2_preset_is_the_published_recipe():
    config = resolve({"preset": "gpt2"})
    recipe = (config.steps, config.context, config.batch_tokens, config.lr, config.warmup_steps, config.min_lr_fraction)
    assert recipe == (19_073, 1024, 524_288, 6e-4, 715, 0.1)
    assert (config.beta1, config.beta2, config.weight_decay, config.clip) == (0.9, 0.95, 0.1, 1.0)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_valid_and_divides(preset):
    config = resolve({"preset": preset})
    assert config.batch_tokens % config.context == 0
    assert config.warmup_steps < config.steps


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["lr", "clip", "dropout", "val_fraction", "soft_limit"])
def test_a_number_is_finite(name, value):
    with pytest.raises(ConfigError, match=f"{flag(name)} is {value}; it must be a finite number"):
        resolve({name: value})


def test_a_config_is_frozen():
    with pytest.raises(FrozenInstanceError):
        TrainConfig().steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"stepz": 3}, "unknown option --stepz; did you mean --steps?"),
        ({"preset": "huge"}, "--preset huge is unknown; there are tiny"),
        ({"steps": 0}, "--steps is 0; it must be at least 1"),
        ({"lr": 0.0}, "--lr is 0.0; it must be more than 0"),
        ({"dropout": 1.5}, "--dropout is 1.5; it must be at most 0.99"),
        ({"micro_batch": 0}, "--micro-batch is 0; it must be at least 1"),
        ({"stop_after": 9, "steps": 5}, "--stop-after 9 is more than --steps 5"),
    ],
)
def test_values_that_cannot_work_are_refused(given, message):
    with pytest.raises(ConfigError) as caught:
        resolve(given)
    assert message in str(caught.value)


def test_only_options_that_decide_the_result_make_a_difference():
    earlier = asdict(resolve({"nproc": 2, "run": "a"}))
    assert differences(resolve({"nproc": 4, "run": "b", "resume": True}), earlier) == []
    assert differences(resolve({"context": 64}), earlier) == ["--context 128 -> 64"]


def test_a_resumed_start_takes_over_all_but_what_belongs_to_a_start():
    earlier = asdict(resolve({"steps": 50, "eval_every": 5, "nproc": 3, "stop_after": 4, "data": "text.txt"}))
    taken = inherited(earlier)
    assert (taken["steps"], taken["eval_every"], taken["data"]) == (50, 5, "text.txt")
    assert not {"nproc", "stop_after", "resume", "run", "device"} & set(taken)


def test_every_option_says_what_it_does():
    assert all(spec.metadata["help"] and spec.metadata["group"] for spec in fields(TrainConfig))
