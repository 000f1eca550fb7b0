"""Whole runs under every parallelism: the losses of one process, and checkpoints that any layout goes on from."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gradsync.train.checkpoint import open_checkpoint
from gradsync.train.ranks import Group
from gradsync.train.storage import load_tensors, read_index
from gradsync.train.trained import load_trained
from training_jobs import Notebook, losses, metrics, options_for, train, train_on_rank, write_text

SHAPE = {
    "layers": 2,
    "heads": 2,
    "width": 16,
    "lr": 1e-2,
    "eval_every": 25,
    "eval_tokens": 64,
    "sample_tokens": 3,
    "check_replicas_every": 10,
}
LAYOUTS = {
    "ddp": (2, {}),
    "zero": (2, {"strategy": "zero"}),
    "fsdp": (2, {"strategy": "fsdp"}),
    "tensor": (2, {"tp": 2, "layers": 1}),
    "gpipe": (2, {"pp": 2, "schedule": "gpipe"}),
    "1f1b": (2, {"pp": 2}),
    "interleaved": (2, {"pp": 2, "schedule": "interleaved", "layers": 4}),
    "ddp x tensor": (4, {"dp": 2, "tp": 2, "layers": 1}),
    "ddp x pipeline": (4, {"dp": 2, "pp": 2}),
    "fsdp x tensor": (4, {"strategy": "fsdp", "dp": 2, "tp": 2, "layers": 1}),
    "fsdp x pipeline": (4, {"strategy": "fsdp", "dp": 2, "pp": 2}),
    "tensor x pipeline": (4, {"tp": 2, "pp": 2, "micro_batch": 4}),
    "sequence": (2, {"tp": 2, "layers": 1, "sequence_parallel": True}),
    "ddp x sequence": (4, {"dp": 2, "tp": 2, "layers": 1, "sequence_parallel": True}),
}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Runs of one process on the whole batch, by number of layers."""
    folder = tmp_path_factory.mktemp("alone")
    write_text(folder)
    runs = {}

    def run(layers):
        if layers not in runs:
            runs[layers] = options_for(folder, steps=50, run=str(folder / str(layers)), **{**SHAPE, "layers": layers})
            train(runs[layers])
        return runs[layers]

    return run


@pytest.mark.parametrize("name", LAYOUTS)
def test_fifty_steps_have_the_losses_of_one_process(alone, tmp_path, request, name):
    world, options = LAYOUTS[name]
    alone = alone(options.get("layers", 2))
    config = replace(alone, run=str(tmp_path / "run"), **options)
    pool = request.getfixturevalue("ranks" if world == 2 else "ranks4")
    pool(train_on_rank, config, timeout_s=150)
    # Sums in another order differ in the last bits; fifty steps of training let that grow.
    assert losses(config) == pytest.approx(losses(alone), abs=1e-4)
    for key in ("grad_norm", "val_loss"):
        expected = [record[key] for record in metrics(alone) if key in record]
        assert [r[key] for r in metrics(config) if key in r] == pytest.approx(expected, rel=1e-3)
    assert (tmp_path / "run" / "samples" / "step-00000050.txt").is_file()


def saved_tensors(config, step, prefix=("model.", "optimizer.")):
    folder = Path(config.run) / "checkpoints" / f"step-{step:08d}"
    entries = read_index(folder).state_dict_metadata
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    load_tensors(folder, tensors)
    return {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}


CHAIN = ["ddp", "zero", "fsdp x tensor", "sequence", "tensor", "1f1b", "fsdp", "tensor x pipeline"]
RESUMABLE = {**LAYOUTS, "alone": (1, {})}


def test_a_run_goes_on_under_any_other_layout(tmp_path, request):
    """Each start takes two steps under another layout and world size; the result is the unbroken run's."""
    write_text(tmp_path)
    steps = 2 * (len(CHAIN) + 1)
    straight = options_for(tmp_path, steps=steps, run=str(tmp_path / "straight"), **SHAPE)
    train(straight)
    broken = replace(straight, run=str(tmp_path / "broken"), stop_after=2)
    train(broken)
    for name in CHAIN:
        world, options = RESUMABLE[name]
        pool = request.getfixturevalue("ranks" if world == 2 else "ranks4")
        pool(train_on_rank, replace(broken, resume=True, **{**options, "layers": 2}), timeout_s=150)
    assert losses(broken) == pytest.approx(losses(straight), abs=1e-5)
    expected, got = saved_tensors(straight, steps), saved_tensors(broken, steps)
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            got[name], tensor, rtol=1e-3, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}"
        )
    taken = load_trained(Path(broken.run), "newest", "cpu").model.state_dict()
    for name, tensor in taken.items():
        assert torch.equal(tensor, got.get(f"model.{name}", tensor)), name
    assert open_checkpoint(tmp_path / "broken" / "checkpoints" / f"step-{steps:08d}").facts["layout"]["pipeline"] == 2


@pytest.mark.parametrize("name", ["zero", "fsdp", "tensor", "1f1b", "sequence"])
def test_stopped_and_resumed_is_the_unbroken_run_bit_for_bit(tmp_path, ranks, name):
    write_text(tmp_path)
    _, options = LAYOUTS[name]
    straight = options_for(tmp_path, run=str(tmp_path / "straight"), dropout=0.2, **{**SHAPE, **options})
    broken = replace(straight, run=str(tmp_path / "broken"), stop_after=3)
    for config in (straight, broken, replace(broken, resume=True, stop_after=None)):
        ranks(train_on_rank, config)
    assert losses(broken) == losses(straight)
    expected, got = saved_tensors(straight, 6), saved_tensors(broken, 6)
    assert [name for name, tensor in expected.items() if not torch.equal(got[name], tensor)] == []


@pytest.mark.parametrize("name", ["zero", "fsdp", "tensor", "1f1b", "sequence"])
def test_completion_tasks_are_shared_out_whatever_the_layout(tmp_path, ranks, name):
    """Three tasks on two ranks: whoever has none left runs along."""
    write_text(tmp_path)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"ctx": "The 5th", "endings": ["line of 25 lines.", "zzz"], "label": 0}\n' * 3)
    plain = options_for(tmp_path, steps=2, run=str(tmp_path / "plain"), hellaswag=str(tasks), **SHAPE)
    _, options = LAYOUTS[name]
    divided = replace(plain, run=str(tmp_path / "divided"), **{**options, "layers": 2})
    train(plain)
    ranks(train_on_rank, divided)
    assert metrics(divided)[-1]["accuracy"] == metrics(plain)[-1]["accuracy"]
    assert metrics(divided)[-1]["accuracy_normalised"] == metrics(plain)[-1]["accuracy_normalised"]


def _train_compiled(rank, world, config):
    """Through the whole compiler but its last part, which takes half a minute; returns the number of graphs."""
    from torch._dynamo.utils import counters

    from gradsync.train import build

    original = build.compile_block
    torch._dynamo.reset()
    counters.clear()
    build.compile_block = lambda block: block.compile(backend="aot_eager", dynamic=False)
    try:
        train_on_rank(rank, world, config)
        return counters["stats"]["unique_graphs"]
    finally:
        build.compile_block = original
        torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tensor", "sequence", "1f1b", "fsdp"])
def test_compiled_blocks_of_a_divided_model_compute_what_one_process_does(alone, tmp_path, ranks, name):
    _, options = LAYOUTS[name]
    alone = alone(options.get("layers", 2))
    shortly = {"stop_after": 5, "eval_every": 0, "sample_tokens": 0}
    config = replace(alone, run=str(tmp_path / "run"), compile=True, **shortly, **options)
    graphs = ranks(_train_compiled, config, timeout_s=150, warnings_as_errors=False)
    assert losses(config) == pytest.approx(losses(alone)[:5], abs=1e-4)
    assert min(graphs) >= 1


def _train_with_a_bad_token(rank, world, config):
    """One row of the table is infinite on every rank that has it, so that sequences with this token have no loss."""
    from gradsync.train import assemble

    original = assemble.parallelize

    def parallelize(model, wanted, device):
        with torch.no_grad():
            model.transformer.wpe.weight[3] = float("inf")
        return original(model, wanted, device)

    assemble.parallelize = parallelize
    try:
        return train(config, Group())
    finally:
        assemble.parallelize = original


@pytest.mark.parametrize("name", ["zero", "fsdp", "tensor", "1f1b"])
def test_a_step_that_is_not_finite_stops_all_ranks_and_says_where(tmp_path, ranks, name):
    write_text(tmp_path)
    _, options = LAYOUTS[name]
    config = options_for(tmp_path, **{**SHAPE, **options})
    outcomes = ranks.run_expecting(_train_with_a_bad_token, config, warnings_as_errors=False)
    assert [outcome.type_name for outcome in outcomes] == ["NonFiniteError"] * 2
    assert "step 1: the loss is not finite on rank" in outcomes[0].text
    assert "(sequences: " in outcomes[0].text
    assert "none by itself" not in outcomes[0].text


def test_a_single_replica_has_nothing_to_divide(tmp_path):
    write_text(tmp_path)
    view = Notebook()
    train(options_for(tmp_path, steps=1, strategy="fsdp", **SHAPE), view=view)
    assert any(note.startswith("warning: --strategy fsdp divides what replicas hold alike") for note in view.notes)


def test_without_tensor_parallel_there_is_no_sequence_to_cut(tmp_path):
    write_text(tmp_path)
    view = Notebook()
    train(options_for(tmp_path, steps=1, sequence_parallel=True, **SHAPE), view=view)
    assert any(note.startswith("warning: --sequence-parallel divides what the ranks of --tp") for note in view.notes)


def test_processes_that_a_launcher_has_not_started_are_told_of(tmp_path):
    write_text(tmp_path)
    view = Notebook()
    train(options_for(tmp_path, steps=1, nproc=3, **SHAPE), view=view)
    assert "warning: --nproc 3 has no effect: a launcher has started 1 process(es)" in view.notes


def test_slices_of_a_sequence_have_dropout_masks_of_their_own(tmp_path, ranks):
    """As many generators as slices, and each goes its own way from the start."""
    write_text(tmp_path)
    cut = options_for(tmp_path, steps=1, tp=2, dropout=0.2, sequence_parallel=True, **SHAPE)
    ranks(train_on_rank, cut)
    states = saved_tensors(cut, 1, "random.")
    assert sorted(states) == ["random.0.cpu", "random.0.slice1.cpu"]
    assert not torch.equal(*states.values())
