"""Whole runs: the loss falls, a resumed run is the unbroken one, the number of ranks changes nothing."""

import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gradsync.data.inputs import InputOptions
from gradsync.data.prepare import PrepareOptions, prepare
from gradsync.errors import CheckpointError, ConfigError, DataError, NonFiniteError
from gradsync.observe.progress import Course, smoothed
from gradsync.train import job
from gradsync.train.build import build, check_same_data
from gradsync.train.checkpoint import list_checkpoints
from gradsync.train.config import MAX_SEED
from gradsync.train.interrupt import StopReason, StopRequests
from gradsync.train.modes import Modes
from gradsync.train.ranks import Alone
from gradsync.train.runfolder import RunFolder
from gradsync.train.storage import load_tensors, read_index
from gradsync.train.trained import load_trained
from training_jobs import Notebook, losses, metrics, options_for, train, train_on_rank, write_text


@pytest.fixture
def folder(tmp_path):
    write_text(tmp_path)
    return tmp_path


def saved_tensors(config, step):
    folder = Path(config.run) / "checkpoints" / f"step-{step:08d}"
    entries = read_index(folder).state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    load_tensors(folder, tensors)
    return tensors


def test_a_run_leaves_everything_in_its_folder(folder):
    config = options_for(folder, steps=40, lr=1e-2, eval_every=20)
    outcome = train(config)
    records = metrics(config)
    assert outcome.is_finished
    assert [record["step"] for record in records] == list(range(1, 41))
    assert [record["step"] for record in records if "val_loss" in record] == [20, 40]
    assert set(records[0]) == {"step", "loss", "lr", "grad_norm", "tokens_per_s"}
    assert records[-1]["val_loss"] == outcome.val_loss
    assert records[0]["loss"] == pytest.approx(math.log(257), abs=0.1)
    assert records[-1]["loss"] < 3.5
    run = Path(config.run)
    assert (run / "samples" / "step-00000040.txt").read_text(encoding="utf-8") == outcome.sample
    assert [c.step for c in list_checkpoints(run / "checkpoints")] == [40, 39, 36]


@pytest.mark.parametrize("world", [1, 2])
def test_stopped_and_resumed_is_the_unbroken_run_bit_for_bit(folder, ranks, world):
    def start(config):
        return train(config) if world == 1 else ranks(train_on_rank, config)[0]

    straight = options_for(folder, run=str(folder / "straight"), dropout=0.2)
    broken = replace(straight, run=str(folder / "broken"), stop_after=2)
    start(straight)
    assert not start(broken).is_finished
    outcome = start(replace(broken, resume=True, stop_after=None))
    assert outcome.is_finished
    for one, other in zip(metrics(straight), metrics(broken), strict=True):
        del one["tokens_per_s"], other["tokens_per_s"]
        assert one == other
    expected, got = saved_tensors(straight, 6), saved_tensors(broken, 6)
    assert expected.keys() == got.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(got[name], tensor)] == []


def test_the_number_of_ranks_and_micro_batches_does_not_change_the_losses(folder, ranks):
    layouts = {"alone": {}, "accumulating": {"micro_batch": 2}, "two": {}, "two-accumulating": {"micro_batch": 1}}
    results = {}
    for name, options in layouts.items():
        config = options_for(folder, steps=50, lr=1e-2, run=str(folder / name), **options)
        if name.startswith("two"):
            ranks(train_on_rank, config)
        else:
            train(config)
        results[name] = (losses(config), [r["val_loss"] for r in metrics(config) if "val_loss" in r])
    for name in ("accumulating", "two", "two-accumulating"):
        # Sums in another order differ in the last bits; fifty steps of training let that grow.
        assert results[name][0] == pytest.approx(results["alone"][0], abs=1e-4)
        assert results[name][1] == pytest.approx(results["alone"][1], abs=1e-4)


def test_a_run_goes_on_with_another_number_of_ranks(folder, ranks):
    straight = options_for(folder, run=str(folder / "straight"))
    broken = replace(straight, run=str(folder / "broken"), stop_after=3)
    train(straight)
    ranks(train_on_rank, broken)
    train(replace(broken, resume=True, stop_after=None))
    assert losses(broken) == pytest.approx(losses(straight), abs=1e-5)


def test_dropout_masks_differ_between_ranks(ranks):
    first, second = ranks(_dropout_mask)
    assert not torch.equal(first, second)


def _dropout_mask(rank, world):
    from gradsync.train.assemble import dropout_seed

    torch.manual_seed(dropout_seed(7, rank))
    return torch.nn.functional.dropout(torch.ones(100))


def test_a_damaged_checkpoint_is_passed_over_and_its_steps_are_taken_again(folder):
    straight = options_for(folder, run=str(folder / "straight"))
    broken = replace(straight, run=str(folder / "broken"), stop_after=5)
    train(straight)
    train(broken)
    for path in (folder / "broken" / "checkpoints" / "step-00000005").glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:-1])
    view = Notebook()
    train(replace(broken, resume=True, stop_after=None), view=view)
    assert any("damaged checkpoint passed over" in note for note in view.notes)
    assert losses(broken) == losses(straight)
    assert view.course == Course(3, 6, 128, smoothed(losses(straight)[:3])), "what is shown goes on from there"


def test_a_request_to_stop_ends_the_run_after_the_step_with_a_checkpoint(folder):
    requests = StopRequests()
    requests.ask(StopReason.TERMINATE)
    config = options_for(folder)
    outcome = train(config, requests=requests)
    assert (outcome.step, outcome.reason) == (1, StopReason.TERMINATE)
    assert [c.step for c in list_checkpoints(Path(config.run) / "checkpoints")] == [1]


def test_a_request_on_one_rank_stops_all_after_the_same_step(folder, ranks):
    outcomes = ranks(_stop_on_last_rank, options_for(folder))
    assert [(outcome.step, outcome.reason) for outcome in outcomes] == [(1, StopReason.TERMINATE)] * 2


def _stop_on_last_rank(rank, world, config):
    from gradsync.train.ranks import Group

    requests = StopRequests()
    if rank == world - 1:
        requests.ask(StopReason.TERMINATE)
    return train(config, Group(), requests=requests)


def test_a_run_killed_before_its_first_checkpoint_starts_again(folder):
    config = options_for(folder)
    train(replace(config, stop_after=1))
    (checkpoint,) = list_checkpoints(Path(config.run) / "checkpoints")
    for path in checkpoint.folder.iterdir():
        path.unlink()
    checkpoint.folder.rmdir()
    view = Notebook()
    assert train(replace(config, resume=True), view=view).is_finished
    assert "no checkpoint yet: starting from step 0" in view.notes
    assert [record["step"] for record in metrics(config)] == list(range(1, 7))


def test_a_finished_run_that_is_resumed_does_nothing(folder):
    config = options_for(folder)
    train(config)
    before = metrics(config)
    assert train(replace(config, resume=True)).is_finished
    assert metrics(config) == before


def test_another_text_is_not_gone_on_with(folder):
    config = options_for(folder, stop_after=3)
    train(config)
    text = folder / "text.txt"
    text.write_text(text.read_text().replace("line", "LINE"))
    with pytest.raises(CheckpointError, match="is not the one that run .* was trained on"):
        train(replace(config, resume=True))


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [("", DataError, "empty"), ("too short", DataError, "shorter than one step"), (None, ConfigError, "no such file")],
)
def test_bad_text_is_refused_before_anything_is_written(folder, text, error, message):
    path = folder / "text.txt"
    path.unlink() if text is None else path.write_text(text)
    config = options_for(folder)
    with pytest.raises(error, match=message):
        train(config)
    assert not Path(config.run).exists()


def test_an_error_of_one_rank_is_raised_on_all(folder, ranks):
    outcomes = ranks.run_expecting(_other_text_on_last_rank, options_for(folder))
    assert [outcome.type_name for outcome in outcomes] == ["ConfigError", "ConfigError"]
    assert "rank 1: no such file" in outcomes[0].text
    assert not (folder / "run").exists()


def _other_text_on_last_rank(rank, world, config):
    from gradsync.train.ranks import Group

    return train(replace(config, data="missing.txt") if rank == world - 1 else config, Group())


def _poison(model, steps_until):
    """Make the loss of one forward not a number."""
    calls = [0]

    def hook(module, inputs, output):
        calls[0] += 1
        logits, loss = output
        return (logits, loss * float("nan")) if calls[0] == steps_until else output

    model.register_forward_hook(hook)


@pytest.fixture
def poisoned(monkeypatch):
    """The third forward of training gives a loss that is not a number."""
    from gradsync.train import assemble

    original = assemble.parallelize

    def parallelize(model, wanted, device):
        _poison(model, 3)
        return original(model, wanted, device)

    monkeypatch.setattr(assemble, "parallelize", parallelize)


def test_a_loss_that_is_not_finite_stops_the_run(folder, poisoned):
    config = options_for(folder)
    message = r"step 3: the loss is not finite on rank 0 .*; no checkpoint is there\. .*--non-finite skip"
    with pytest.raises(NonFiniteError, match=message):
        train(config)
    assert [record["step"] for record in metrics(config)] == [1, 2]


def test_and_the_checkpoint_to_go_on_from_is_named(folder, poisoned):
    with pytest.raises(NonFiniteError, match="the last checkpoint is that of step 2"):
        train(options_for(folder, checkpoint_every=2))


def test_or_the_step_is_skipped_and_said_so(folder, poisoned):
    config = options_for(folder, non_finite="skip")
    view = Notebook()
    assert train(config, view=view).is_finished
    assert [record["step"] for record in metrics(config) if record.get("skipped")] == [3]
    assert any("step 3: the loss is not finite on rank 0" in note for note in view.notes)
    assert math.isfinite(losses(config)[-1])


def test_a_trained_model_can_be_taken_from_its_run(folder):
    config = options_for(folder, keep_checkpoints=1)
    outcome = train(config)
    newest, best = (load_trained(Path(config.run), which, "cpu") for which in ("newest", "best"))
    assert newest.step == 6
    assert best.facts["val_loss"] <= outcome.val_loss
    with pytest.raises(ConfigError, match="is not a run folder"):
        load_trained(folder / "nowhere", "newest", "cpu")
    with pytest.raises(ConfigError, match="is not a run folder"):
        load_trained(folder, "newest", "cpu")


def test_text_without_any_to_validate_with_is_refused_before_the_first_step(folder):
    prepared = folder / "shards"
    prepare(PrepareOptions(InputOptions((str(folder / "text.txt"),), val_fraction=0.0), prepared))
    config = options_for(folder, data=str(prepared))
    with pytest.raises(DataError, match="has 0 tokens; evaluation needs at least 2"):
        train(config)
    assert not Path(config.run).exists()


def test_a_resumed_run_does_without_what_it_was_started_from(folder):
    first = options_for(folder, run=str(folder / "first"))
    train(first)
    straight = options_for(folder, run=str(folder / "straight"), init_from=first.run)
    train(straight)
    broken = options_for(folder, run=str(folder / "broken"), init_from=first.run, stop_after=2)
    train(broken)
    shutil.rmtree(first.run)
    train(replace(broken, stop_after=None, resume=True))
    assert losses(broken) == losses(straight)
    shutil.rmtree(Path(broken.run) / "checkpoints")
    with pytest.raises(ConfigError, match=r"holds no intact checkpoint|neither a run folder"):
        train(replace(broken, stop_after=None, resume=True))


def test_a_sample_that_cannot_be_had_ends_no_run(folder, monkeypatch):
    def full(self, step, text):
        raise OSError("No space left on device")

    monkeypatch.setattr(RunFolder, "write_sample", full)
    view = Notebook()
    outcome = train(options_for(folder), view=view)
    assert outcome.is_finished and outcome.sample is None
    assert "warning: no sample of step 6: No space left on device" in view.notes


def test_a_run_of_nothing_but_skipped_steps_ends(folder):
    view = Notebook()
    with pytest.raises(NonFiniteError, match=r"step 21: .*20th in a row that is skipped.*--init-from"):
        train(options_for(folder, lr=1e30, clip=0, steps=40, non_finite="skip"), view=view)
    assert sum(note.endswith("; skipped") for note in view.notes) == 19


class Elsewhere(Alone):
    """Two ranks, of which the other sends what is given in place of its own."""

    world = 2

    def __init__(self, changed):
        self._changed = changed

    def gather(self, value):
        return [value, self._changed(value)]


def test_ranks_that_read_other_data_or_the_same_batch_are_told_apart(folder):
    config = options_for(folder)
    material = build(config, 0, 2, torch.device("cpu"), Modes("float32", torch.device("cpu"), False))
    other = {"tokens": 5, "crc32": 7}
    with pytest.raises(
        DataError, match=r"ranks 0 and 1 do not read the same data: .* rank 1 5 tokens \(CRC 00000007\)"
    ):
        check_same_data(Elsewhere(lambda mine: ((other, *mine[0][1:]), 1, range(1, 8, 2))), material)
    with pytest.raises(DataError, match="ranks 0 and 1 hold the same first batch"):
        check_same_data(Elsewhere(lambda mine: (mine[0], 1, mine[2])), material)
    check_same_data(Elsewhere(lambda mine: mine), material)  # two ranks of one replica
    check_same_data(Elsewhere(lambda mine: (mine[0], 1, range(1, 8, 2))), material)


def test_any_seed_that_is_taken_works(folder):
    train(options_for(folder, seed=MAX_SEED, steps=1))
    with pytest.raises(ConfigError, match="--seed is 9223372036854775808; it must be at most"):
        options_for(folder, seed=MAX_SEED + 1)


def test_metrics_that_cannot_be_written_end_no_run(folder, monkeypatch):
    class Broken:
        def write(self, record):
            raise OSError("No space left on device")

        def close(self):
            self.write(None)

    monkeypatch.setattr(job, "open_sinks", lambda *_: [Broken()])
    view = Notebook()
    assert train(options_for(folder), view=view).is_finished
    (told,) = [note for note in view.notes if "metrics cannot be written" in note]
    assert told.endswith("they are missing from step 1 on: No space left on device")
    assert "warning: the last metrics could not be written: No space left on device" in view.notes


def test_a_run_of_which_no_checkpoint_is_intact_is_not_begun_anew(folder):
    config = options_for(folder, stop_after=3)
    train(config)
    for path in (Path(config.run) / "checkpoints").glob("step-*/__0_0.distcp"):
        path.write_bytes(b"")
    view = Notebook()
    with pytest.raises(CheckpointError, match=r"none of the 1 checkpoint\(s\) in .* is intact; put back one"):
        train(replace(config, resume=True, stop_after=None), view=view)
    assert "has 0 bytes instead of" in view.notes[-1]
    assert len(losses(config)) == 3
