"""What a run tells of its ranks: the trace of a few steps, and who is late."""

import json
import time
from pathlib import Path

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from gradsync.cli.main import main
from gradsync.data.loader import GlobalBatchLoader
from gradsync.errors import ContractError
from gradsync.train.ranks import Group
from training_jobs import Notebook, metrics, options_for, train, write_text


@pytest.fixture
def folder(tmp_path):
    write_text(tmp_path)
    return tmp_path


def train_and_listen(rank, world, config, slow_rank=None):
    """Return what was said on this rank; one rank may be slow to get its data."""
    original = GlobalBatchLoader.next_step
    if rank == slow_rank:

        def slow(self):
            time.sleep(0.1)
            return original(self)

        GlobalBatchLoader.next_step = slow
    view = Notebook()
    try:
        train(config, Group(), view)
    finally:
        GlobalBatchLoader.next_step = original
    return view.notes


def test_a_trace_lies_in_the_run_folder_and_on_the_report(folder, ranks, capsys):
    config = options_for(folder, trace=True, trace_steps=3)
    notes, _ = ranks(train_and_listen, config)
    assert [note for note in notes if note.startswith("traced 3 steps: ")] != []
    run = Path(config.run)
    trace = json.loads((run / "trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"]} == {0, 1}
    recording = json.loads((run / "timeline.json").read_text())
    assert [p["number"] for p in recording["ranks"][1]["passes"]] == [2, 3, 4]
    assert main(["report", str(run)]) == 0
    assert '"verdict": ' in Path(capsys.readouterr().out.strip()).read_text()


def test_a_run_that_is_too_short_for_the_whole_trace_writes_what_there_is(folder, ranks):
    config = options_for(folder, trace=True, steps=4, checkpoint_every=0, eval_every=0)
    ranks(train_and_listen, config)
    recording = json.loads((Path(config.run) / "timeline.json").read_text())
    assert [p["number"] for p in recording["ranks"][0]["passes"]] == [2, 3]


def test_the_rank_that_is_late_is_told_once_and_kept_with_the_metrics(folder, ranks):
    config = options_for(folder, straggler_every=2)
    notes, _ = ranks(train_and_listen, config, slow_rank=1)
    told = [note for note in notes if "is late by" in note]
    assert len(told) == 1
    assert "rank 1 is late by" in told[0]
    assert told[0].endswith("a step, in data")
    late = [(record["step"], record["late"]) for record in metrics(config) if "late" in record]
    assert [(step, found["rank"], found["phase"]) for step, found in late[-2:]] == [(4, 1, "data"), (6, 1, "data")]
    assert late[-1][1]["delay_s"] > 0.05


def recording_of(config):
    return json.loads((Path(config.run) / "timeline.json").read_text())


def phases_of(record):
    return [span["phase"] for span in record["spans"]]


EVERY_STEP = ["data", "forward and backward", "gradient norm", "optimizer", "between steps"]


@pytest.mark.parametrize("layout", [{"strategy": "fsdp"}, {"tp": 2}, {"pp": 2}], ids=str)
def test_every_layout_is_traced_with_the_phases_of_its_steps(folder, ranks, layout):
    config = options_for(folder, trace=True, trace_steps=3, steps=7, layers=2, eval_every=4, **layout)
    notes, _ = ranks(train_and_listen, config)
    (told,) = [note for note in notes if note.startswith("traced 3 steps: ")]
    assert "a step takes " in told and " forward and backward" in told
    for rank in recording_of(config)["ranks"]:
        assert [record["number"] for record in rank["passes"]] == [3, 4, 5]
        first, second, _ = (phases_of(record) for record in rank["passes"])
        assert first == [*EVERY_STEP, "checkpoint", "between steps"][: len(first)]
        assert second == [*EVERY_STEP[:-1], "evaluation", "between steps"]
    events = json.loads((Path(config.run) / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["name"] == "forward and backward"} == {0, 1}


def test_a_pipeline_shows_which_micro_batch_each_stage_computed_when(folder, ranks):
    config = options_for(folder, trace=True, trace_steps=2, steps=5, layers=2, pp=2, micro_batch=2)
    ranks(train_and_listen, config)
    everyone = recording_of(config)["ranks"]
    for rank in everyone:
        for record in rank["passes"]:
            names = [part["name"] for part in record["parts"]]
            assert sorted(names) == sorted(f"{what} {n}" for what in ("backward", "forward") for n in range(4))
            (compute,) = [span for span in record["spans"] if span["phase"] == "forward and backward"]
            assert all(
                compute["start_s"] <= part["start_s"] <= part["end_s"] <= compute["end_s"] for part in record["parts"]
            )
    assert [part["name"] for part in everyone[1]["passes"][0]["parts"]][:2] == ["forward 0", "backward 0"]


def test_the_engine_over_the_data_axis_shows_its_buckets_inside_the_steps(folder, ranks4):
    config = options_for(folder, trace=True, trace_steps=2, steps=5, layers=2, dp=2, tp=2)
    ranks4(train_and_listen, config)
    recording = recording_of(config)
    assert {tuple(group["ranks"]) for group in recording["groups"]} == {(0, 2), (1, 3)}
    for rank in recording["ranks"]:
        names = {place["name"] for bucket in rank["buckets"] for place in bucket["parameters"]}
        assert any("attn" in name for name in names)
        for record in rank["passes"]:
            assert [times["number"] for times in record["buckets"]] == list(range(len(rank["buckets"])))
            (compute,) = [span for span in record["spans"] if span["phase"] == "forward and backward"]
            for times in record["buckets"]:
                assert compute["start_s"] <= times["launched_s"] <= times["done_s"] <= compute["end_s"]


@pytest.mark.parametrize("layout", [{"strategy": "fsdp"}, {"pp": 2}], ids=str)
def test_who_is_late_in_what_it_does_alone_is_told_in_every_layout(folder, ranks, layout):
    config = options_for(folder, straggler_every=2, layers=2, steps=8, **layout)
    notes, _ = ranks(train_and_listen, config, slow_rank=1)
    told = [note for note in notes if "is late by" in note]
    assert len(told) == 1 and "rank 1 is late by" in told[0] and told[0].endswith("a step, in data")
    late = {record["step"]: record["late"] for record in metrics(config) if "late" in record}
    assert late[8]["rank"] == 1 and late[8]["delay_s"] > 0.05


def test_the_loops_phases_lie_beside_the_engines_passes(folder, ranks):
    config = options_for(folder, trace=True, trace_steps=2, steps=5)
    ranks(train_and_listen, config)
    for rank in recording_of(config)["ranks"]:
        assert [record["number"] for record in rank["passes"]] == [2, 3]
        assert [step["number"] for step in rank["steps"]] == [3, 4]
    events = json.loads((Path(config.run) / "trace.json").read_text())["traceEvents"]
    loop = [event for event in events if event.get("name") == "gradient norm"]
    assert [(event["pid"], event["args"]["step"]) for event in loop] == [(0, 3), (0, 4), (1, 3), (1, 4)]


def test_a_lone_process_says_that_there_is_nothing_to_trace(folder):
    view = Notebook()
    config = options_for(folder, trace=True, steps=2)
    train(config, view=view)
    assert [note for note in view.notes if note.startswith("--trace: nothing is traced")] != []
    assert not (Path(config.run) / "trace.json").exists()


def train_with_a_broken_replica(rank, world, config, broken_step):
    steps = []

    def corrupt(optimizer, *_):
        steps.append(1)
        if rank == 1 and len(steps) == broken_step:
            with torch.no_grad():
                optimizer.param_groups[0]["params"][0].view(-1)[0] += 1e-3

    handle = register_optimizer_step_post_hook(corrupt)
    try:
        with pytest.raises(ContractError) as caught:
            train(config, Group())
    finally:
        handle.remove()
    return str(caught.value)


def test_the_step_in_which_a_replica_first_differs_is_named(folder, ranks):
    messages = ranks(train_with_a_broken_replica, options_for(folder, check_replicas_every=1), 3)
    for rank, message in enumerate(messages):
        assert message.startswith(f"step 4: rank {rank}: the replicas differ: ")
        assert "has other values on rank(s) 1 than on rank 0" in message
