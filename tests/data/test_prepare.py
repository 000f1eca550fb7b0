"""Prepare: the same folder whatever the workers and the interruptions; splits, tokenizers, refusals."""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradsync.data import inputs as inputs_module
from gradsync.data import prepare as prepare_module
from gradsync.data import tokenize as tokenize_module
from gradsync.data.corpus import load_corpus
from gradsync.data.documents import cut_into_pieces
from gradsync.data.inputs import InputOptions
from gradsync.data.prepare import PrepareOptions, PrepareProgress, prepare
from gradsync.data.shards import ShardWriter, open_shard
from gradsync.data.tokenize import batches
from gradsync.errors import ConfigError, DataError


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches, pieces and commits small enough that little text makes many of them."""
    monkeypatch.setattr(inputs_module, "cut_into_pieces", lambda chunks: cut_into_pieces(chunks, 300))
    monkeypatch.setattr(prepare_module, "batches", lambda pieces: batches(pieces, 500))
    monkeypatch.setattr(prepare_module, "_BATCHES_PER_COMMIT", 3)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Files of text and of records, some 60 kB."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(25):
        (folder / f"{number}.txt").write_text(f"This is line {number} of a text.\n" * (number + 10))
    rows = [json.dumps({"text": f"record {number} " * (number % 50)}) for number in range(200)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return folder


def _options(text: Path, out: Path, **changes: Any) -> PrepareOptions:
    return replace(PrepareOptions(InputOptions((str(text),), 0.1), out, shard_tokens=5000), **changes)


def _content(folder: Path) -> dict[str, str]:
    """Every file and a digest of it; what only remembers verification or a time is left out."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.name != "verified.json"
    }


class _Killed(BaseException):
    """Stands for the end of the process: nothing that catches errors catches it."""


def _killed_after(number: int) -> Callable[[PrepareProgress], None]:
    """A report that ends the work at its ``number``-th call."""
    calls = iter(range(number))

    def report(_: PrepareProgress) -> None:
        if next(calls, None) is None:
            raise _Killed

    return report


def test_every_document_is_in_one_split(text: Path, tmp_path: Path) -> None:
    result = prepare(_options(text, tmp_path / "out"))
    corpus = load_corpus(str(tmp_path / "out"))
    found = [
        document
        for source in (corpus.train, corpus.val)
        for document in corpus.tokenizer.decode([t for s in source.shards for t in s]).split("<|endoftext|>")
    ]
    rows = [json.loads(line)["text"] for line in (text / "rows.jsonl").read_text().splitlines()]
    expected = [path.read_text() for path in text.glob("*.txt")] + [row for row in rows if row]
    assert sorted(filter(None, found)) == sorted(expected)
    manifest = result.manifest
    assert manifest.num_documents("train") + manifest.num_documents("val") == len(expected)
    share = manifest.num_tokens("val") / (manifest.num_tokens("train") + manifest.num_tokens("val"))
    assert 0.05 < share < 0.15
    assert {entry.tokens for entry in manifest.splits["train"][:-1]} == {5000}
    assert len(manifest.splits["train"]) > 3


def test_the_folder_does_not_depend_on_the_number_of_workers(text: Path, tmp_path: Path) -> None:
    for num_workers in (1, 3):
        prepare(_options(text, tmp_path / str(num_workers), num_workers=num_workers))
    assert _content(tmp_path / "1") == _content(tmp_path / "3")


def test_the_folder_does_not_depend_on_interruptions(text: Path, tmp_path: Path) -> None:
    prepare(_options(text, tmp_path / "straight"))
    options = _options(text, tmp_path / "broken")
    num_kills = 0
    while True:
        try:
            # Every start gets 7 batches on, of which up to 2 are lost.
            result = prepare(options, _killed_after(7))
        except _Killed:
            num_kills += 1
        else:
            break
    assert num_kills > 5
    assert not result.was_there
    assert _content(tmp_path / "straight") == _content(tmp_path / "broken")


@pytest.mark.parametrize("moment", ["commit", "close", "manifest"])
def test_a_kill_at_a_bad_moment_does_no_harm(
    text: Path, tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(_options(text, tmp_path / "straight"))

    def killed(*_: object) -> None:
        raise _Killed

    with monkeypatch.context() as patch:
        if moment == "commit":
            real_json = prepare_module.write_json
            writes = iter(range(2))
            patch.setattr(
                prepare_module,
                "write_json",
                lambda *a: killed() if next(writes, None) is None else real_json(*a),
            )
        elif moment == "close":
            real_close = ShardWriter.close
            patch.setattr(ShardWriter, "close", lambda self: (real_close(self), killed()))
        else:
            patch.setattr(prepare_module, "write_manifest", killed)
        with pytest.raises(_Killed):
            prepare(_options(text, tmp_path / "broken"))
    prepare(_options(text, tmp_path / "broken"))
    assert _content(tmp_path / "straight") == _content(tmp_path / "broken")


def test_a_full_disk_is_said_and_what_was_done_is_kept(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(_options(text, tmp_path / "straight"))
    real = ShardWriter.write
    writes = iter(range(40))

    def write(self: ShardWriter, ids: Any) -> None:
        if next(writes, None) is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, ids)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "write", write)
        with pytest.raises(DataError, match=r"cannot write .*broken: No space left on device; mend that"):
            prepare(_options(text, tmp_path / "broken"))
    prepare(_options(text, tmp_path / "broken"))
    assert _content(tmp_path / "straight") == _content(tmp_path / "broken")


def test_what_is_finished_is_left_as_it_is(text: Path, tmp_path: Path) -> None:
    first = prepare(_options(text, tmp_path / "out"))
    times = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()}
    again = prepare(_options(text, tmp_path / "out"))
    assert (first.was_there, again.was_there) == (False, True)
    assert again.manifest == first.manifest
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").iterdir()} == times


def test_a_folder_of_something_else_is_not_touched(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    prepare(_options(text, out))
    content = _content(out)
    with pytest.raises(ConfigError, match=r"from something else \(different: shard_tokens\); choose another --out"):
        prepare(_options(text, out, shard_tokens=7))
    (text / "0.txt").write_text("changed")
    with pytest.raises(ConfigError, match=r"different: bytes, listing_crc32"):
        prepare(_options(text, out))
    assert _content(out) == content


def test_an_unfinished_folder_of_something_else_is_not_touched(text: Path, tmp_path: Path) -> None:
    with pytest.raises(_Killed):
        prepare(_options(text, tmp_path / "out"), _killed_after(10))
    content = _content(tmp_path / "out")
    with pytest.raises(ConfigError, match="from something else"):
        prepare(_options(text, tmp_path / "out", shard_tokens=7))
    assert _content(tmp_path / "out") == content


def test_an_attempt_that_came_to_nothing_is_not_in_the_way(text: Path, tmp_path: Path, tokenizer_file: Path) -> None:
    for tokenizer in (str(tokenizer_file), "bytes"):
        with pytest.raises(_Killed):
            prepare(_options(text, tmp_path / "out", tokenizer=tokenizer), _killed_after(1))
    prepare(_options(text, tmp_path / "out", train_tokenizer=300))
    prepare(_options(text, tmp_path / "straight", train_tokenizer=300))
    assert _content(tmp_path / "out") == _content(tmp_path / "straight")


def test_a_folder_that_is_not_ours_is_refused(text: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not empty and not a folder of prepared data"):
        prepare(_options(text, text))


@pytest.mark.skipif(sys.platform == "win32", reason="no lock there")
def test_two_at_once_are_refused(text: Path, tmp_path: Path) -> None:
    options = _options(text, tmp_path / "out")

    def meet(_: PrepareProgress) -> None:
        with pytest.raises(ConfigError, match="another process is preparing data"):
            prepare(options)
        raise _Killed

    with pytest.raises(_Killed):
        prepare(options, meet)
    prepare(options)


def test_the_tokenizer_file_is_kept_with_the_data(text: Path, tmp_path: Path, tokenizer_file: Path) -> None:
    own = tmp_path / "mine.json"
    own.write_bytes(tokenizer_file.read_bytes())
    result = prepare(_options(text, tmp_path / "out", tokenizer=str(own)))
    own.unlink()
    corpus = load_corpus(str(tmp_path / "out"))
    assert result.manifest.tokenizer == "tokenizer.json"
    assert corpus.tokenizer.vocab_size == 270
    assert "of a text" in corpus.tokenizer.decode(corpus.train.shards[0][:100].tolist())
    assert load_corpus(str(tmp_path / "out"), tokenizer=str(tokenizer_file)).name == str(tmp_path / "out")


def test_a_tokenizer_is_trained_and_the_same_each_time(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    results = [prepare(_options(text, tmp_path / name, train_tokenizer=300)) for name in "ab"]
    assert _content(tmp_path / "a") == _content(tmp_path / "b")
    assert results[0].tokenizer.vocab_size == 300
    corpus = load_corpus(str(tmp_path / "a"))
    text_of_all = corpus.tokenizer.decode(corpus.train.shards[0].tolist())
    assert "This is line" in text_of_all
    with_bytes = prepare(_options(text, tmp_path / "bytes"))
    assert results[0].manifest.num_tokens("train") < 0.7 * with_bytes.manifest.num_tokens("train")
    assert corpus.tokenizer.decode(corpus.tokenizer.encode("日本 \x00\x7f")) == "日本 \x00\x7f"


def test_a_kill_while_the_tokenizer_is_trained_does_no_harm(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tokenizers")
    options = _options(text, tmp_path / "out", train_tokenizer=300)

    def killed(_inputs: object, _vocab: int, path: Path) -> None:
        path.write_text("half")
        raise _Killed

    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "train_tokenizer", killed)
        with pytest.raises(_Killed):
            prepare(options)
    prepare(options)
    prepare(replace(options, out=tmp_path / "straight"))
    assert _content(tmp_path / "out") == _content(tmp_path / "straight")


def test_a_tokenizer_smaller_than_its_bytes_is_refused(text: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"at least 257 tokens .* got 100"):
        prepare(_options(text, tmp_path / "out", train_tokenizer=100))


def test_gpt2_tokens_are_those_of_the_whole_text(tmp_path: Path, gpt2_files: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("It was the best of times,\nit was the worst of times.\n\nIt was  the age\n" * 40)
    options = PrepareOptions(InputOptions((str(path),), 0.0), tmp_path / "out", "gpt2", num_workers=2)
    result = prepare(options)
    assert result.manifest.vocab_size == 50257
    (entry,) = result.manifest.splits["train"]
    expected = [*result.tokenizer.encode(path.read_text()), 50256]
    assert open_shard(tmp_path / "out" / entry.name).tokens.tolist() == expected


def test_a_local_data_set_is_prepared(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    rows = [json.dumps({"content": f"row {number}"}) for number in range(50)]
    (tmp_path / "set" / "train.jsonl").write_text("\n".join(rows))
    inputs = InputOptions((), 0.1, text_field="content", dataset=str(tmp_path / "set"))
    manifest = prepare(PrepareOptions(inputs, tmp_path / "out")).manifest
    assert (manifest.num_documents("train"), manifest.num_documents("val")) == (45, 5)


def test_the_progress_ends_with_everything(text: Path, tmp_path: Path) -> None:
    seen: list[PrepareProgress] = []
    manifest = prepare(_options(text, tmp_path / "out"), seen.append).manifest
    assert [progress.tokens for progress in seen] == sorted(progress.tokens for progress in seen)
    last = seen[-1]
    assert last.done_bytes == last.total_bytes == sum(path.stat().st_size for path in text.iterdir())
    assert last.tokens == manifest.num_tokens("train") + manifest.num_tokens("val")
    assert last.documents == manifest.num_documents("train") + manifest.num_documents("val")


def test_a_text_of_one_token_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "zeros.txt").write_text("0" * 1000)
    options = PrepareOptions(InputOptions((str(tmp_path / "zeros.txt"),), 0.0), tmp_path / "out")
    assert "100% of all tokens are the same one (48, '0')" in prepare(options).notes[0]
    assert "100% of all tokens are the same one (48, '0')" in prepare(options).notes[0]


def test_records_without_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": ""}\n{"text": ""}\n')
    options = PrepareOptions(InputOptions((str(tmp_path / "rows.jsonl"),), 0.0), tmp_path / "out")
    with pytest.raises(DataError, match="there is no text in any document"):
        prepare(options)


def _die(_: object) -> None:
    os._exit(9)


def test_a_worker_that_dies_is_said(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenize_module, "_tokenize_in_worker", _die)
    with pytest.raises(DataError, match=r"a worker process ended without a word .*run the same command again"):
        prepare(_options(text, tmp_path / "out", num_workers=2))


def test_a_bad_line_ends_the_work_with_its_place(text: Path, tmp_path: Path) -> None:
    with (text / "rows.jsonl").open("a") as file:
        file.write("\nnot json")
    with pytest.raises(DataError, match=r"rows\.jsonl:201 is not JSON"):
        prepare(_options(text, tmp_path / "out", num_workers=2))


_PROGRAM = """
import sys, time
from pathlib import Path
from gradsync.data.inputs import InputOptions
from gradsync.data.prepare import PrepareOptions, prepare

def report(progress):
    print(progress.tokens, flush=True)
    time.sleep(0.05)

if __name__ == "__main__":
    inputs = InputOptions((sys.argv[1],), 0.1)
    prepare(PrepareOptions(inputs, Path(sys.argv[2]), num_workers=2, shard_tokens=2_000_000), report)
"""


@pytest.fixture
def large_text(tmp_path: Path) -> Path:
    path = tmp_path / "large.txt"
    path.write_text("All work and no play makes a dull text.\n" * 200_000)
    return path


def _children(pid: int) -> set[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {int(child) for child in children}


def _wait_for_end(pids: set[int]) -> Iterator[int]:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (alive := {pid for pid in pids if _is_alive(pid)}):
        time.sleep(0.05)
    yield from alive


def _is_alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_kill_9_leaves_no_process_and_the_next_start_finishes(large_text: Path, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    source = Path(prepare_module.__file__).parents[2]
    command = [sys.executable, str(program), str(large_text)]
    environment = os.environ | {"PYTHONPATH": str(source)}
    with subprocess.Popen([*command, str(tmp_path / "broken")], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        children = _children(process.pid)
        process.send_signal(signal.SIGKILL)
    assert len(children) >= 2
    assert list(_wait_for_end(children)) == []
    assert not (tmp_path / "broken" / "manifest.json").exists()
    for out in ("broken", "straight"):
        subprocess.run([*command, str(tmp_path / out)], env=environment, check=True, capture_output=True)
    assert _content(tmp_path / "broken") == _content(tmp_path / "straight")


def test_the_folder_that_is_made_is_no_part_of_the_text_it_lies_in(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text\n" * 50)
    options = PrepareOptions(InputOptions((str(tmp_path),), 0.1), tmp_path / "deep" / "tokens")
    first = prepare(options)
    assert first.manifest.num_documents("val") == 1
    assert prepare(options).was_there


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=r"pipe is no regular file"):
        prepare(PrepareOptions(InputOptions((str(tmp_path / "pipe"),), 0.1), tmp_path / "out"))
