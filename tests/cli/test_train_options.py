"""Options of ``gradsync train``: file below flags, the nearest name, what is refused before anything starts."""

import pytest
import yaml

from gradsync.cli.main import main


def printed(capsys, *arguments) -> dict:
    assert main(["train", *arguments, "--print-config"]) == 0
    return yaml.safe_load(capsys.readouterr().out)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A folder to start from, where nothing can be started; there is a tokenizer that ends no text in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gradsync.cli.train._start_ranks", lambda *_: pytest.fail("started"))
    tokenizers = pytest.importorskip("tokenizers")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save("endless.json")
    return tmp_path


def refused(capsys, *arguments) -> str:
    assert main(["train", *arguments]) == 2
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
        (
            ["--batch-tokens", "1000", "--nproc", "2"],
            "context 128 x 2 replica(s) = 256 tokens; the nearest values that do: 768 or 1024",
        ),
        (
            ["--batch-tokens", "2048", "--nproc", "4", "--pp", "2", "--micro-batch", "3"],
            "x 2 replica(s) x micro-batch 3",
        ),
        (["--hellaswag", "no/such/file"], "--hellaswag no/such/file: there is no such file"),
        (["--tokenizer", "endless.json"], "endless.json has no token that ends a text"),
        (["--tokenizer", "no/such/file"], "unknown tokenizer"),
        (["--init-from", "."], "neither a run folder nor a Hugging Face folder"),
        (["--backend", "tin-cans"], "backend 'tin-cans' is unknown"),
        (["--device", "cuda", "--nproc", "999"], "CUDA device"),
        (["--nproc", "3", "--tp", "2"], "and there are 3; what works with 3: --dp 1 --tp 1 --pp 3\n"),
        (
            ["--nproc", "2", "--dp", "2", "--pp", "2"],
            "--dp 2 x --tp 1 x --pp 2 needs 4 processes, and there are 2; what works with 2: ",
        ),
        (["--nproc", "7", "--tp", "2"], "with 7 no degrees work for this model and this step\n"),
        (
            [
                "--nproc",
                "2",
                "--tp",
                "2",
                "--heads",
                "2",
                "--sequence-parallel",
                "--context",
                "127",
                "--batch-tokens",
                "1016",
            ],
            "leave --sequence-parallel out; what works with 2: --dp 2 --tp 1 --pp 1; --dp 1 --tp 1 --pp 2\n",
        ),
        (["--tp", "2"], "--tp 2 does not divide the model's 5 heads"),
        (["--heads", "3"], "width 160 does not divide by 3 heads"),
        (["--pp", "8", "--nproc", "8"], "makes 8 stages, and the model has 4 layer(s)"),
        (["--pp", "4", "--schedule", "interleaved"], "makes 8 stages"),
        (["--nproc", "2", "--pp", "2", "--micro-batch", "16"], "needs at least 2 micro-batches a step"),
        (
            ["--nproc", "2", "--tp", "2", "--strategy", "zero"],
            "or --strategy ddp; what works with 2: --dp 2 --tp 1 --pp 1\n",
        ),
        (["--strategy", "magic"], "--strategy is 'magic'; expected one of ddp, zero, fsdp"),
        (["--data", "no/such/file"], "--data no/such/file does not exist"),
        (["--config", "no/such/file"], "--config no/such/file cannot be read"),
    ],
)
def test_refusals_are_one_line_whether_it_is_to_run_or_not(capsys, folder, arguments, message):
    told = refused(capsys, *arguments)
    assert message in told
    assert refused(capsys, *arguments, "--dry-run") == told
    assert sorted(path.name for path in folder.iterdir()) == ["endless.json"]


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


@pytest.mark.parametrize(("more", "is_kept"), [([], True), (["--tp", "4"], True), (["--tp", "1"], False)])
def test_cut_sequences_are_kept_by_a_resumed_run_that_has_ranks_for_them(capsys, tmp_path, more, is_kept):
    saved = printed(capsys, "--tp", "2", "--sequence-parallel", "--run", str(tmp_path))
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(saved))
    assert printed(capsys, "--run", str(tmp_path), "--resume", *more)["sequence_parallel"] is is_kept


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
