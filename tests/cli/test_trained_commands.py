"""Commands on a trained run, in this process: sample and eval."""

import io
import json
import math
import shutil
import subprocess
import sys

import pytest
from commands import environment

from gradsync.cli.main import main
from gradsync.data.corpus import load_corpus
from gradsync.errors import ConfigError
from training_jobs import losses, options_for, train, write_text


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("trained")
    write_text(path)
    train(options_for(path, steps=30, lr=1e-2, eval_every=10, eval_tokens=0))
    return path


@pytest.fixture
def run(folder):
    return str(folder / "run")


def output(capsys, *arguments) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def failure(capsys, *arguments) -> str:
    assert main(list(arguments)) in (1, 2)
    return capsys.readouterr().err


def test_a_sample_goes_on_from_the_prompt_and_can_be_repeated(capsys, run):
    first = output(capsys, "sample", run, "--prompt", "The ", "--max-tokens", "20")
    assert first.startswith("The ")
    assert output(capsys, "sample", run, "--prompt", "The ", "--max-tokens", "20") == first
    assert output(capsys, "sample", run, "--prompt", "The ", "--max-tokens", "20", "--seed", "1") != first


def test_several_samples_differ(capsys, run):
    text = output(capsys, "sample", run, "--num-samples", "3", "--max-tokens", "20")
    samples = text.split("---\n")[1:]
    assert len(set(samples)) == 3


@pytest.mark.parametrize("from_stdin", [False, True])
def test_prompts_come_from_a_file(capsys, monkeypatch, run, tmp_path, from_stdin):
    path = tmp_path / "prompts.txt"
    path.write_text("The 1\n\nline\n")
    if from_stdin:
        monkeypatch.setattr(sys, "stdin", io.StringIO(path.read_text()))
    text = output(capsys, "sample", run, "--prompt-file", "-" if from_stdin else str(path), "--max-tokens", "3")
    assert [sample[:4] for sample in text.split("---\n")[1:]] == ["The ", "line"]


def test_greedy_samples_do_not_depend_on_the_seed(capsys, run):
    arguments = ["sample", run, "--prompt", "The ", "--max-tokens", "10", "--temperature", "0"]
    assert output(capsys, *arguments, "--seed", "1") == output(capsys, *arguments, "--seed", "2")


def test_the_loss_on_the_text_held_back_is_the_one_of_training(capsys, folder, run):
    found = json.loads(output(capsys, "eval", run, "--json"))
    last = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert found["loss"] == pytest.approx(last["val_loss"], abs=1e-6)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert found["step"] == 30


def test_all_of_another_text_is_evaluated(capsys, folder, run):
    found = json.loads(output(capsys, "eval", run, "--data", str(folder / "text.txt"), "--json"))
    assert found["tokens"] == load_corpus(str(folder / "text.txt"), val_fraction=0.0).train.num_tokens - 1
    lines = output(capsys, "eval", run, "--data", str(folder / "text.txt"), "--max-tokens", "100")
    assert lines.startswith("loss ")
    assert "(112 tokens of" in lines


def test_accuracy_on_completion_tasks(capsys, folder, run):
    path = folder / "tasks.jsonl"
    path.write_text(json.dumps({"ctx": "The 5th", "endings": ["\x01\x02\x03\x04 \x05", "line"], "label": 1}) + "\n")
    assert output(capsys, "eval", run, "--hellaswag", str(path)) == (
        "accuracy 1.0000, length-normalised 1.0000 (1 examples)\n"
    )


def test_what_is_wrong_is_one_line(capsys, folder, run):
    cases = {
        "is not a run folder": ["sample", str(folder / "nowhere")],
        "--top-k is 0; it must be at least 1": ["sample", run, "--top-k", "0"],
        "not both": ["sample", run, "--prompt", "a", "--prompt-file", "b"],
        "cannot be read": ["sample", run, "--prompt-file", str(folder / "nowhere")],
        "the following arguments are required: run": ["eval"],
        "must be at least 1": ["eval", run, "--batch", "0"],
        "does not exist": ["eval", run, "--data", str(folder / "nowhere")],
    }
    for message, arguments in cases.items():
        error = failure(capsys, *arguments).splitlines()
        assert message in error[-1], error


def test_text_of_a_run_that_is_gone_is_no_wrong_usage(capsys, folder, run, tmp_path):
    copy = shutil.copytree(run, tmp_path / "run")
    config = copy / "config.yaml"
    config.write_text(config.read_text().replace(str(folder / "text.txt"), str(tmp_path / "gone.txt")))
    assert main(["eval", str(copy)]) == 1
    assert "gone.txt, which is not here; name the text with --data" in capsys.readouterr().err


def test_an_exported_run_is_a_hugging_face_folder_that_training_starts_from(capsys, folder, run, tmp_path):
    pytest.importorskip("safetensors")
    out = str(tmp_path / "exported")
    assert "256 ends a text" in output(capsys, "export", run, "--out", out)
    config = options_for(folder, run=str(tmp_path / "run"), init_from=out, layers=None, heads=None, width=None, lr=1e-6)
    train(config)
    from_run = options_for(folder, run=str(tmp_path / "again"), init_from=run, lr=1e-6)
    train(from_run)
    last_loss = losses(options_for(folder))[-1]
    assert losses(config)[0] == pytest.approx(losses(from_run)[0], abs=1e-6)
    assert losses(config)[0] < last_loss + 0.5, "it started from what had been learned"
    assert "is not an empty folder" in failure(capsys, "export", run, "--out", out)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"init_from": "nowhere"}, "neither a run folder nor a Hugging Face folder"),
        ({"width": 32}, "--width is 32, but --init-from"),
        ({"context": 32}, "--context 32 is more than the 16"),
    ],
)
def test_what_does_not_fit_the_weights_is_refused(folder, run, tmp_path, options, message):
    with pytest.raises(ConfigError, match=message):
        train(options_for(folder, **{"run": str(tmp_path / "run"), "init_from": run, **options}))


def test_an_export_without_room_leaves_nothing(capsys, run, tmp_path, monkeypatch):
    safetensors = pytest.importorskip("safetensors.torch")
    (tmp_path / "file").write_text("")
    assert "cannot be written" in failure(capsys, "export", run, "--out", str(tmp_path / "file" / "exported"))

    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise RuntimeError("I/O error: No space left on device")

    monkeypatch.setattr(safetensors, "save_file", full)
    assert "No space left" in failure(capsys, "export", run, "--out", str(tmp_path / "exported"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_reader_that_has_seen_enough_is_no_error(folder, run):
    command = [sys.executable, "-m", "gradsync", "sample", run, "--max-tokens", "100000"]
    with subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.read(20)
        process.stdout.close()
        errors = process.stderr.read().decode()
    assert errors.startswith("from ") and len(errors.splitlines()) == 1
    assert process.returncode == 1
