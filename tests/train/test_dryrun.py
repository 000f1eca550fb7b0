"""The dry run: its figures are those of the run, and it writes nothing."""

import math

import pytest
import torch
from torch.distributed.tensor import DTensor

from gradsync.cli.main import main
from gradsync.model.gpt2 import GPT2, GPT2Config
from gradsync.parallel.apply import Wanted, parallelize
from gradsync.parallel.degrees import Degrees
from gradsync.parallel.division import Flow
from gradsync.train import dryrun
from gradsync.train.batch import plan_batch
from gradsync.train.checkpoint import list_checkpoints
from gradsync.train.dryrun import dry_run
from gradsync.train.modes import Modes
from training_jobs import options_for, train, write_text

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    write_text(tmp_path)
    return tmp_path


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_fake_tensors_tell_what_real_ones_would_keep(is_checkpointed):
    config = GPT2Config(2, 2, 16, 12, 101)
    plan = plan_batch(48, 12, 1, None, 4)
    modes = Modes("float32", CPU, is_compiled=False)
    real = GPT2(config, activation_checkpointing=is_checkpointed)
    with dryrun.FakeTensorMode():
        fake = GPT2(config, activation_checkpointing=is_checkpointed)
        found = dryrun._kept(fake, plan, modes, CPU)
    assert found == dryrun._kept(real, plan, modes, CPU)
    assert found.between > 0


def _kept_on_ranks(rank, world, shape, cuts_sequences):
    """Bytes that a rank keeps, its tensors taken for what they are."""
    flow = Flow("1f1b", 1, 4, shape.context, cuts_sequences)
    replica = parallelize(GPT2(shape), Wanted("ddp", Degrees(1, world), flow), CPU)

    def local(tensor):
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def keep(tensor):
        kept[local(tensor.detach()).untyped_storage()._cdata] = local(tensor.detach())
        return tensor

    kept: dict[int, torch.Tensor] = {}
    own = {local(parameter.detach()).untyped_storage()._cdata for parameter in replica.modules()[0].parameters()}
    tokens = torch.zeros(4, shape.context, dtype=torch.int64)
    with replica._losses(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        replica._training_loss(tokens, tokens)
    return sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in own)


@pytest.mark.parametrize("cuts_sequences", [False, True])
def test_what_ranks_of_cut_matrices_keep_is_foretold(ranks, cuts_sequences):
    shape = GPT2Config(2, 4, 32, 32, 128, dropout=0.1)  # two heads a rank: of one, torch keeps another form
    whole = dryrun._kept(GPT2(shape), plan_batch(128, 32, 1, None, 4), Modes("float32", CPU, is_compiled=False), CPU)
    kept = ranks(_kept_on_ranks, shape, cuts_sequences)
    assert kept == [pytest.approx(whole.on_rank(2, cuts_sequences), rel=0.05)] * 2
    assert whole.on_rank(2, True) < 0.9 * whole.on_rank(2, False)


def figure(lines, name) -> float:
    (line,) = [line for line in lines if line.strip().startswith(name)]
    return float(line.split()[-2].replace(",", ""))


def test_the_figures_are_those_of_the_run(folder):
    config = options_for(folder, width=64, checkpoint_every=0)
    lines = dry_run(config, 1, "cpu")
    train(config)
    (checkpoint,) = list_checkpoints(folder / "run" / "checkpoints")
    size_mib = sum(entry["bytes"] for name, entry in checkpoint.files.items() if name.endswith("distcp")) / 2**20
    promised = next(float(line.split()[2]) for line in lines if "checkpoints of" in line)
    assert size_mib == pytest.approx(promised, abs=0.2)  # names and headers come on top
    assert "6 steps = 768 tokens" in "\n".join(lines)


def test_several_ranks_have_buckets_and_share_the_copy(folder):
    alone, shared = (dry_run(options_for(folder, width=64), world, "cpu") for world in (1, 2))
    assert (figure(alone, "buckets"), figure(shared, "buckets") > 0) == (0.0, True)
    assert figure(shared, "checkpoint copy") <= math.ceil(figure(alone, "checkpoint copy") * 10 / 2) / 10


def test_the_command_prints_and_writes_nothing(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    write_text(folder, 20_000)
    before = sorted(folder.rglob("*"))
    assert main(["train", "--dry-run", "--preset", "gpt2", "--data", "text.txt", "--nproc", "2"]) == 0
    out = capsys.readouterr().out
    assert "19,073 steps = 9,999,745,024 tokens" in out
    assert "524,288 tokens = 512 sequences = 2 replica(s) x 256 micro-batch(es) x 1 sequences x 1024 tokens" in out
    assert sorted(folder.rglob("*")) == before


def test_the_files_that_are_named_are_those_that_are_written(folder, monkeypatch):
    monkeypatch.chdir(folder)
    write_text(folder, 2_000)
    assert main(["prepare", "text.txt", "--out", "tokens", "--train-tokenizer", "300"]) == 0
    wanted = {"data": "tokens", "trace": True, "tensorboard": True}
    for options in ({}, wanted):
        config = options_for(folder, **options, run=f"run-{len(options)}")
        (line,) = [line for line in dry_run(config, 1, "cpu") if line.startswith("writes ")]
        train(config)
        written = [f"{path.name}/" if path.is_dir() else path.name for path in (folder / config.run).iterdir()]
        assert sorted(line.partition(": ")[2].split(", ")) == sorted(written)
    assert any("trace.json, timeline.json" in line for line in dry_run(config, 2, "cpu"))  # one process has none


def test_strategies_divide_what_they_say(folder):
    def lines(world, **options):
        return dry_run(options_for(folder, width=64, layers=2, **options), world, "cpu")

    whole, zero, fsdp = lines(2), lines(2, strategy="zero"), lines(2, strategy="fsdp")
    assert figure(zero, "parameters   ") == figure(whole, "parameters   ")
    assert figure(zero, "moments") == pytest.approx(figure(whole, "moments") / 2, abs=0.1)
    assert figure(fsdp, "parameters   ") == pytest.approx(figure(whole, "parameters   ") / 2, abs=0.1)
    assert [line for line in fsdp if "checkpoints of" in line] == [line for line in whole if "checkpoints of" in line]
    tensor, pipeline = lines(2, tp=2), lines(2, pp=2)
    assert figure(tensor, "parameters   ") < 0.6 * figure(whole, "parameters   ")
    assert figure(pipeline, "parameters   ") < 0.7 * figure(whole, "parameters   ")
    assert "layout      2 process(es): ddp, 1 replica(s) x 1 slice(s) of tensors x 2 stage(s)" in pipeline
    sequence = lines(2, tp=2, sequence_parallel=True)
    assert "layout      2 process(es): ddp, 1 replica(s) x 2 slice(s) of tensors and sequences x 1 stage(s)" in sequence
    assert figure(sequence, "activations") < figure(tensor, "activations")
