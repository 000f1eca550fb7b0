"""Precision and compilation: bfloat16 trains as well, and only training steps are compiled."""

import pytest
import torch

from gradsync.observe.peaks import peak_flops
from gradsync.train import build
from gradsync.train.modes import Modes
from training_jobs import losses, metrics, options_for, train, train_on_rank, write_text

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path):
    write_text(tmp_path)
    return tmp_path


def product_dtype(context) -> torch.dtype:
    with context:
        return (torch.ones(2, 2) @ torch.ones(2, 2)).dtype


@pytest.mark.parametrize(
    ("name", "dtype"), [("auto", torch.float32), ("float32", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_the_dtype_of_products_on_the_cpu(name, dtype):
    modes = Modes(name, CPU, is_compiled=False)
    assert product_dtype(modes.training()) == product_dtype(modes.elsewhere()) == dtype
    assert modes.dtype_name == str(dtype).removeprefix("torch.")
    assert product_dtype(torch.no_grad()) is torch.float32


def test_bfloat16_trains_like_float32(folder):
    both = {}
    for dtype in ("float32", "bfloat16"):
        config = options_for(folder, steps=40, lr=1e-2, run=str(folder / dtype), dtype=dtype)
        train(config)
        both[dtype] = losses(config)
    assert both["bfloat16"] != both["float32"]
    assert both["bfloat16"] == pytest.approx(both["float32"], abs=0.05)


def test_activation_checkpointing_changes_nothing(folder):
    plain = options_for(folder, dropout=0.1)
    saving = options_for(folder, dropout=0.1, run=str(folder / "saving"), activation_checkpointing=True)
    train(plain)
    train(saving)
    assert losses(plain) == losses(saving)


@pytest.fixture
def counter(monkeypatch):
    """Blocks compiled by a backend that counts graphs and changes nothing."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    count = CompileCounter()

    monkeypatch.setattr(build, "compile_block", lambda block: block.compile(backend=count, dynamic=False))
    yield count
    torch._dynamo.reset()


@pytest.mark.slow
# The compiler itself looks at these, and cannot hide the warning where warnings are errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_validation_and_samples_compile_nothing(folder, counter):
    plain = options_for(folder)
    train(plain)
    bare = options_for(folder, run=str(folder / "bare"), compile=True, eval_every=0, sample_tokens=0, stop_after=4)
    train(bare)
    graphs = counter.frame_count
    assert graphs >= 1
    torch._dynamo.reset()
    counter.clear()
    full = options_for(folder, run=str(folder / "full"), compile=True, eval_every=1, sample_every=1, sample_tokens=20)
    train(full)
    assert counter.frame_count == graphs
    assert losses(full) == pytest.approx(losses(plain), abs=1e-5)


def test_completion_tasks_are_taken_with_each_validation(folder, ranks):
    tasks = folder / "tasks.jsonl"
    tasks.write_text('{"ctx": "The", "endings": ["5th", "line"], "label": 1}\n' * 3)
    config = options_for(folder, hellaswag=str(tasks))
    ranks(train_on_rank, config)
    evaluated = [record for record in metrics(config) if "val_loss" in record]
    assert len(evaluated) == 2
    assert all(0 <= record["accuracy"] <= 1 and 0 <= record["accuracy_normalised"] <= 1 for record in evaluated)


def test_known_peaks():
    assert peak_flops("NVIDIA H100 80GB HBM3", "bfloat16") == 989e12
    assert peak_flops("NVIDIA H100 PCIe", "bfloat16") == 756e12
    assert peak_flops("NVIDIA A100-SXM4-40GB", "float32") == 156e12
    assert peak_flops("NVIDIA A10G", "bfloat16") is None
    assert peak_flops("Tesla V100-SXM2-16GB", "float32") is None
    assert peak_flops("cpu", "float32") is None
