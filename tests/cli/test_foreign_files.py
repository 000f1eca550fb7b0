"""Files that come from others: refused in one line when damaged, and they can neither act nor reach elsewhere."""

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gradsync.cli.main import main
from training_jobs import options_for, train, write_text

ESCAPE = "\x1b[2J"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    path = tmp_path_factory.mktemp("original")
    write_text(path)
    train(options_for(path, steps=2, checkpoint_every=0))
    return path


@pytest.fixture
def folder(original, tmp_path):
    """A text and a run, as they might have been unpacked from an archive."""
    return Path(shutil.copytree(original, tmp_path / "unpacked"))


def refusal(capsys, *arguments: str) -> str:
    assert main(list(arguments)) in (1, 2)
    error = capsys.readouterr().err.splitlines()
    assert error[-1].startswith("gradsync ")
    return str(error[-1])


def change_manifest(run: Path, **facts: Any) -> None:
    (path,) = run.glob("checkpoints/*/manifest.json")
    manifest = json.loads(path.read_text())
    manifest["facts"] |= facts
    path.write_text(json.dumps(manifest))


FACTS = [
    {"model": None},
    {"model": {"num_layers": 1}},
    {"model": {"num_layers": 1, "num_heads": 2, "width": 16, "context": 16, "vocab_size": float("nan")}},
    {"model": {"num_layers": 1, "num_heads": 2, "width": 16, "context": 16, "vocab_size": 257, "dropout": "x"}},
    {"tokenizer": None},
    {"tokenizer": ["bytes"]},
]


@pytest.mark.parametrize("facts", FACTS, ids=str)
def test_a_checkpoint_that_says_what_cannot_be_is_refused(capsys, folder, facts):
    change_manifest(folder / "run", **facts)
    assert "is damaged" in refusal(capsys, "sample", str(folder / "run"))


@pytest.mark.parametrize("facts", [{"loader": 5}, {"loader": {"position": -1}}, {"data": 7}], ids=str)
def test_a_checkpoint_with_a_place_in_the_data_that_cannot_be_is_not_resumed(capsys, folder, facts):
    change_manifest(folder / "run", **facts)
    assert "is damaged" in refusal(capsys, "train", "--run", str(folder / "run"), "--resume", "--nproc", "1")


def test_a_checkpoint_cannot_have_a_tokenizer_read_from_elsewhere(capsys, folder, tmp_path):
    from tokenizers import Tokenizer, models

    elsewhere = tmp_path / "private.json"
    Tokenizer(models.WordLevel({f"w{n}": n for n in range(256)} | {"<|endoftext|>": 256})).save(str(elsewhere))
    change_manifest(folder / "run", tokenizer=str(elsewhere))
    assert "needs the tokenizer 'private.json', and its run's copy" in refusal(capsys, "sample", str(folder / "run"))
    shutil.copyfile(elsewhere, folder / "run" / "tokenizer.json")
    assert main(["sample", str(folder / "run"), "--max-tokens", "3"]) == 0


OPTIONS = [
    {"batch_tokens": "many"},
    {"steps": None},
    {"beta1": {"a": 1}},
    {"data": ["text.txt"]},
    {"lr": float("nan")},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_of_another_kind_are_not_resumed_with(capsys, folder, options):
    path = folder / "run" / "config.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | options))
    message = refusal(capsys, "train", "--run", str(folder / "run"), "--resume", "--nproc", "1")
    assert next(iter(options)).replace("_", "-") in message.replace("_", "-")


@pytest.mark.parametrize(
    "text", ["!!python/object/apply:os.system ['touch owned']", "data: !!python/name:os.system", "a: &a [*a]", "a: ["]
)
def test_options_can_execute_nothing(capsys, folder, monkeypatch, text):
    monkeypatch.chdir(folder)
    (folder / "run" / "config.yaml").write_text(text + "\n")
    assert "is damaged" in refusal(capsys, "eval", "run")
    assert "options.yaml" in refusal_of_config(capsys, folder, text)
    assert not (folder / "owned").exists()


def refusal_of_config(capsys, folder: Path, text: str) -> str:
    (folder / "options.yaml").write_text(text + "\n")
    return refusal(capsys, "train", "--config", str(folder / "options.yaml"), "--dry-run")


def append(path: Path, content: bytes) -> None:
    with path.open("ab") as file:
        file.write(content)


@pytest.mark.parametrize("name", ["metrics.jsonl", "starts.jsonl"])
@pytest.mark.parametrize("line", [b"{", b"[1]", b"\xff\xfe", b'"text"', b"[" * 100_000])
def test_a_report_leaves_damaged_records_out(folder, name, line):
    before = report(folder / "run")
    append(folder / "run" / name, line + b"\n")
    assert report(folder / "run") == before


def report(run: Path) -> str:
    assert main(["report", str(run)]) == 0
    return (run / "report.html").read_text()


def test_what_has_no_place_on_a_report_is_left_out(folder):
    run = folder / "run"
    append(run / "metrics.jsonl", b'{"step": 3, "loss": NaN, "lr": "high", "late": 7}\n{"step": 4, "lo')
    append(run / "starts.jsonl", b'{"host": Infinity}\n{"host": "cut o')
    (run / "config.yaml").write_text("lr: .nan\nwidth: 2020-01-01\n")
    assert main(["report", str(run)]) == 1, "a date is no option"
    (run / "config.yaml").write_text("lr: .nan\n")
    (run / "samples" / "step-x.txt").write_text("no step")
    (run / "samples" / "step-00000001.txt").write_bytes(b"\xff")
    (run / "timeline.json").write_text('{"ranks": [], "buckets": 1}')
    assert main(["report", str(run)]) == 0
    assert "NaN" not in (run / "report.html").read_text().partition("const RUNS = ")[2].partition("\n")[0]


def test_a_report_is_not_written_through_a_link(folder, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (folder / "run" / "report.html").symlink_to(victim)
    assert main(["report", str(folder / "run")]) == 0
    assert victim.read_text() == "precious"
    assert not (folder / "run" / "report.html").is_symlink()
    assert not list((folder / "run").glob("*.unfinished"))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_names_from_elsewhere_cannot_move_the_cursor(folder, monkeypatch):
    """Of folders, of files in them, and of checkpoints."""
    run = (folder / "run").rename(folder / f"run{ESCAPE}")
    (checkpoint,) = run.glob("checkpoints/*")
    checkpoint.rename(checkpoint.with_name(f"step-1{ESCAPE}"))
    texts = folder / "texts"
    texts.mkdir()
    (texts / f"picture{ESCAPE}.txt").write_bytes(b"\0" * 10)
    (texts / f"latin{ESCAPE}.txt").write_bytes(b"\xe9t\xe9 " * 100)
    (texts / "text.txt").write_text(f"{ESCAPE}\n" * 500)
    screen = Terminal()
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    prepare = [
        "prepare",
        str(texts),
        "--out",
        str(folder / f"shards{ESCAPE}"),
        "--tokenizer",
        "bytes",
        "--workers",
        "1",
    ]
    for arguments in (
        ["report", str(run)],
        ["sample", str(run), "--prompt", ESCAPE, "--max-tokens", "3"],
        ["eval", str(run), "--data", str(texts), "--max-tokens", "64"],
        ["export", str(run), "--out", str(folder / f"out{ESCAPE}")],
        prepare,
    ):
        assert main(arguments) == 0, screen.getvalue()
    assert main([*prepare, "--val-fraction", "0.5"]) == 2
    text = screen.getvalue()
    assert "picture" in text and "latin" in text and "from " in text
    assert "\x1b" not in text, repr(text)
