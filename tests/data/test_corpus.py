"""What --data means: text files, folders, prepared shards, the standard library; and what is refused."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from gradsync.data import corpus as corpus_module
from gradsync.data.corpus import Corpus, load_corpus
from gradsync.data.prepare import PrepareOptions, PrepareResult
from gradsync.data.source import TokenSource
from gradsync.errors import ConfigError, DataError

_END = 256


def _tokens(source: TokenSource) -> list[int]:
    return [int(token) for shard in source.shards for token in shard]


def _text(corpus: Corpus, split: str) -> str:
    return corpus.tokenizer.decode(_tokens(getattr(corpus, split)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Forty small files in two folders."""
    folder = tmp_path / "texts"
    for number in range(40):
        path = folder / ("even" if number % 2 == 0 else "odd") / f"{number:02d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"text number {number}\n" * 5)
    return folder


def test_one_file_is_cut_near_its_end_at_the_beginning_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("012345678\n" * 10)
    corpus = load_corpus(str(path), val_fraction=0.25)
    assert _text(corpus, "train") == "012345678\n" * 8
    assert _text(corpus, "val") == "012345678\n" * 2 + "<|endoftext|>"
    assert corpus.tokenizer.name == "bytes"
    assert corpus.train.shards[0].dtype == np.uint16


def test_a_few_files_are_cut_as_one_text(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / name).write_text(f"{name}\n" * 10)
    corpus = load_corpus(str(tmp_path), val_fraction=0.375)
    assert _text(corpus, "train") == "a\n" * 10 + "<|endoftext|>" + "b\n" * 10 + "<|endoftext|>" + "c\n" * 5
    assert _text(corpus, "val") == "c\n" * 5 + "<|endoftext|>" + "d\n" * 10 + "<|endoftext|>"


def test_a_folder_is_split_by_whole_documents(folder: Path) -> None:
    corpus = load_corpus(str(folder), val_fraction=0.2)
    train, val = (_text(corpus, split).split("<|endoftext|>")[:-1] for split in ("train", "val"))
    assert sorted(train + val) == sorted(f"text number {n}\n" * 5 for n in range(40))
    total = corpus.train.num_tokens + corpus.val.num_tokens
    assert 0.15 < corpus.val.num_tokens / total <= 0.2


def test_the_split_and_the_order_do_not_change(folder: Path) -> None:
    one, two = (load_corpus(str(folder)) for _ in range(2))
    assert _tokens(one.train) == _tokens(two.train)
    assert _tokens(one.val) == _tokens(two.val)


def test_no_validation_is_legal(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("some text")
    corpus = load_corpus(str(path), val_fraction=0.0)
    assert (corpus.train.num_tokens, corpus.val.num_tokens) == (10, 0)


def test_the_standard_library_is_there_and_the_same_each_time() -> None:
    corpus = load_corpus("stdlib")
    assert corpus.train.num_tokens > 5e6
    assert 0.03 < corpus.val.num_tokens / corpus.train.num_tokens < 0.06
    assert "def " in corpus.tokenizer.decode(corpus.train.shards[0][:20000].tolist())
    assert corpus.name.startswith("stdlib (")
    again = load_corpus("stdlib")
    assert np.array_equal(corpus.train.shards[0], again.train.shards[0])


def test_a_small_text_has_a_size(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("line\n" * 2_000)
    assert load_corpus(str(tmp_path / "text.txt")).name.endswith("text.txt (1 file(s), 10.0 kB)")


def test_another_tokenizer_may_be_named(folder: Path, tokenizer_file: Path) -> None:
    corpus = load_corpus(str(folder), tokenizer=str(tokenizer_file))
    assert corpus.tokenizer.vocab_size == 270
    assert "text number" in _text(corpus, "train")


def test_a_cache_gives_the_same_corpus_and_is_used_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = load_corpus(str(folder))
    cached = load_corpus(str(folder), cache=tmp_path / "cache")
    monkeypatch.setattr(corpus_module, "prepare", None)
    again = load_corpus(str(folder), cache=tmp_path / "cache")
    for corpus in (cached, again):
        assert _tokens(corpus.train) == _tokens(plain.train)
        assert _tokens(corpus.val) == _tokens(plain.val)
        assert isinstance(corpus.train.shards[0], np.memmap)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "texts"]


def test_a_cache_of_other_text_or_options_is_made_anew(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    load_corpus(str(folder), cache=cache)
    (folder / "even" / "00.txt").write_text("changed")
    assert _tokens(load_corpus(str(folder), cache=cache).train) == _tokens(load_corpus(str(folder)).train)
    half = load_corpus(str(folder), cache=cache, val_fraction=0.5)
    assert _tokens(half.val) == _tokens(load_corpus(str(folder), val_fraction=0.5).val)


def test_another_process_may_fill_the_cache_first(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = corpus_module.prepare

    def overtaken(options: PrepareOptions) -> PrepareResult:
        real(replace(options, out=tmp_path / "cache"))
        return real(options)

    monkeypatch.setattr(corpus_module, "prepare", overtaken)
    cached = load_corpus(str(folder), cache=tmp_path / "cache")
    assert _tokens(cached.train) == _tokens(load_corpus(str(folder)).train)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "texts"]


def test_a_damaged_cache_is_made_anew_or_refused(folder: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    expected = _tokens(load_corpus(str(folder), cache=cache).train)
    (cache / "manifest.json").write_text("{")
    assert _tokens(load_corpus(str(folder), cache=cache).train) == expected
    shard = cache / "train-00000.tokens"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"train-00000\.tokens is truncated"):
        load_corpus(str(folder), cache=cache)


def test_a_cache_of_a_tokenizer_file_that_changed_is_made_anew(
    folder: Path, tmp_path: Path, tokenizer_file: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(tokenizer_file.read_bytes())
    before = load_corpus(str(folder), tokenizer=str(path), cache=tmp_path / "cache")
    content = json.loads(path.read_text())
    content["model"]["merges"] = content["model"]["merges"][:2]
    path.write_text(json.dumps(content))
    after = load_corpus(str(folder), tokenizer=str(path), cache=tmp_path / "cache")
    assert after.train.num_tokens > before.train.num_tokens


def test_prepared_shards_bring_their_tokenizer(folder: Path, tmp_path: Path) -> None:
    made = load_corpus(str(folder), cache=tmp_path / "shards")
    opened = load_corpus(str(tmp_path / "shards"))
    assert _tokens(opened.train) == _tokens(made.train)
    assert opened.tokenizer.name == "bytes"
    with pytest.raises(ConfigError, match=r"was prepared with the tokenizer 'bytes', not "):
        load_corpus(str(tmp_path / "shards"), tokenizer="gpt2")


def test_shards_of_a_tokenizer_that_has_changed_are_refused(folder: Path, tmp_path: Path) -> None:
    load_corpus(str(folder), cache=tmp_path / "shards")
    manifest = tmp_path / "shards" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"vocab_size": 300}))
    with pytest.raises(DataError, match="made with a vocabulary of 300 tokens"):
        load_corpus(str(tmp_path / "shards"))


def test_what_is_not_utf8_is_replaced_and_said(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("café".encode("latin-1"))
    corpus = load_corpus(str(path), val_fraction=0.0)
    assert _text(corpus, "train") == "caf\ufffd<|endoftext|>"
    assert corpus.notes == (f"what UTF-8 cannot say became U+FFFD in {path}",)


def test_binary_and_hidden_files_of_a_folder_are_left_out(folder: Path) -> None:
    expected = _tokens(load_corpus(str(folder)).train)
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0")
    (folder / ".secret").write_text("hidden")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("hidden")
    (folder / "empty.txt").write_text("")
    corpus = load_corpus(str(folder))
    assert _tokens(corpus.train) == expected
    assert corpus.notes == (f"left out as binary: {folder / 'picture.png'}",)


def test_a_text_of_one_token_is_warned_of(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "zeros.txt"
    path.write_text("0" * 1000)
    message = "100% of all tokens are the same one (48, '0'): is this the right tokenizer for this text?"
    assert load_corpus(str(path)).notes == (message,)
    load_corpus(str(path), cache=tmp_path / "shards")
    assert load_corpus(str(tmp_path / "shards")).notes == (message,)
    assert load_corpus(str(folder)).notes == ()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("empty.txt", b"", "the file is empty"), ("picture.png", b"\x89PNG\0\0", "the file is binary")],
)
def test_a_file_without_text_is_refused(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name} holds no text: {message}"):
        load_corpus(str(tmp_path / name))


def test_a_folder_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="an empty folder, there is no text in it"):
        load_corpus(str(tmp_path))
    (tmp_path / "a").write_bytes(b"\0")
    (tmp_path / "b").write_bytes(b"")
    with pytest.raises(DataError, match="of 2 files 1 are binary, 1 empty"):
        load_corpus(str(tmp_path))


def test_what_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such file or folder: .*nothing; give text files"):
        load_corpus(str(tmp_path / "nothing"))


def test_a_fraction_that_cannot_be_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="validation fraction must be in"):
        load_corpus(str(folder), val_fraction=1.0)


def test_half_a_surrogate_pair_becomes_a_replacement_and_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "whole \\ud83d\\ude00"}\n{"text": "half \\ud83d, and on"}\n')
    corpus = load_corpus(str(path), val_fraction=0.0)
    assert _text(corpus, "train") == "whole \U0001f600<|endoftext|>half \ufffd, and on<|endoftext|>"
    assert corpus.notes == ("what UTF-8 cannot say became U+FFFD in record 1",)


@pytest.mark.parametrize("left", ["train-00000.tokens", "train-00000.tokens.unfinished", "journal.json"])
def test_what_was_not_prepared_to_the_end_is_no_text(tmp_path: Path, left: str) -> None:
    (tmp_path / left).write_text('{"batches": 64}')
    with pytest.raises(DataError, match=r"no manifest\.json: it was not prepared to the end"):
        load_corpus(str(tmp_path))


def test_a_shard_by_itself_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "train-00000.tokens"
    path.write_bytes(b"GRDSYNCT" + bytes(100))
    with pytest.raises(DataError, match="is one token shard; name the folder"):
        load_corpus(str(path))
