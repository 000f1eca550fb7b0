"""Options of ``gradsync train``: file below flags, the nearest name, what is refused before anything starts."""

import pytest
import yaml

from gradsync.cli.main import main


def printed(capsys, *arguments) -> dict:
    assert main(["train", *arguments, "--print-config"]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def refused(capsys, *arguments) -> str:
    assert main(["train", *arguments]) in (1, 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def test_flags_win_over_the_file_and_the_file_over_the_preset(capsys, tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text("preset: gpt2\nlr: 1e-3\nwarmup-steps: 5\nsteps: 100\n")
    for order in (["--config", str(file), "--steps", "50"], ["--steps", "50", "--config", str(file)]):
        config = printed(capsys, *order)
        assert (config["steps"], config["lr"], config["warmup_steps"], config["context"]) == (50, 1e-3, 5, 1024)


def test_what_is_printed_can_be_read_back(capsys, tmp_path):
    file = tmp_path / "options.yaml"
    assert main(["train", "--preset", "small", "--micro-batch", "4", "--print-config"]) == 0
    file.write_text(capsys.readouterr().out)
    assert printed(capsys, "--config", str(file)) == yaml.safe_load(file.read_text())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stepz", "3"], "unknown option --stepz; did you mean --steps?"),
        (["--step", "3"], "unknown option --step; did you mean --steps?"),
        (["--batch-tokns=3"], "unknown option --batch-tokns; did you mean --batch-tokens?"),
        (["--lr", "fast"], "--lr is 'fast'; expected a number"),
        (["--preset", "huge"], "--preset is 'huge'; expected one of tiny, "),
        (["--micro-batch", "x"], "--micro-batch is 'x'; expected a whole number or null"),
        (["text.txt"], "unexpected argument 'text.txt'"),
        (["--batch-tokens", "1000", "--nproc", "2"], "the nearest values that do: 768 or 1024"),
        (["--nproc", "3", "--tp", "2"], "what works with 3: --dp 3 --tp 1 --pp 1;"),
        (["--nproc", "2", "--dp", "2", "--pp", "2"], "--dp 2 x --tp 1 x --pp 2 is 4"),
        (["--nproc", "2", "--tp", "2", "--strategy", "zero"], "take --strategy fsdp, --strategy ddp, or --tp 1 --pp 1"),
        (["--strategy", "magic"], "--strategy is 'magic'; expected one of ddp, zero, fsdp"),
        (["--data", "no/such/file"], "--data no/such/file does not exist"),
        (["--config", "no/such/file"], "--config no/such/file cannot be read"),
    ],
)
def test_refusals_are_one_line(capsys, tmp_path, arguments, message):
    assert message in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("learning_rate: 3", "unknown option --learning-rate"),
        ("stepz: 3", "unknown option --stepz; did you mean --steps?"),
        ("steps: many", "--steps is 'many'; expected a whole number"),
        ("[1, 2]", "must hold options"),
        ("a: [", "is not YAML"),
    ],
)
def test_a_wrong_file_is_named(capsys, tmp_path, content, message):
    file = tmp_path / "options.yaml"
    file.write_text(content)
    error = refused(capsys, "--config", str(file))
    assert message in error
    assert str(file) in error


def test_an_unwritable_run_folder_is_refused_before_anything_starts(capsys, tmp_path):
    (tmp_path / "file").write_text("keep me")
    assert "is not a folder" in refused(capsys, "--run", str(tmp_path / "file" / "run"))
    assert (tmp_path / "file").read_text() == "keep me"


def test_resuming_nothing_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "there is none" in refused(capsys, "--resume")
    assert "nothing to resume" in refused(capsys, "--resume", "--run", "empty")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "processes"),
    [({}, 4), ({"tp": 2}, 4), ({"pp": 3}, 3), ({"dp": 3, "tp": 2}, 6), ({"tp": 8}, 8), ({"batch_tokens": 128}, 1)],
)
def test_processes_are_as_many_as_the_degrees_and_the_cores_ask_for(monkeypatch, options, processes):
    from gradsync.cli import train
    from gradsync.train.config import resolve

    monkeypatch.setattr(train, "_num_places", lambda device: 4)
    assert train._choose_nproc(resolve(options)) == processes
