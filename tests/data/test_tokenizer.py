"""Tokenizers: round trips, special tokens as text, streaming, files that are missing or foreign."""

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gradsync.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from gradsync.errors import ConfigError, DataError

_TEXTS = ["", "hello world", "naïve café — 日本語 🙂🙃", "tabs\tand\r\nlines\n\n  ", "x <|endoftext|> y"]


@pytest.fixture(params=["bytes", "gpt2", "file"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    if request.param == "bytes":
        return ByteTokenizer()
    if request.param == "gpt2":
        request.getfixturevalue("gpt2_files")
        return load_tokenizer("gpt2")
    return load_tokenizer(str(request.getfixturevalue("tokenizer_file")))


@pytest.mark.parametrize("text", _TEXTS)
def test_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int64
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("text", _TEXTS)
def test_ids_are_in_the_vocabulary_and_never_end_a_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert all(0 <= token < tokenizer.vocab_size for token in ids)
    assert tokenizer.end_of_text not in ids


def test_what_utf_8_cannot_say_is_replaced(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode("caf\udce9 \ud83d\ude00")) == "caf\ufffd \U0001f600"


def test_the_end_of_text_is_shown(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("a"), tokenizer.end_of_text, *tokenizer.encode("b")]
    assert tokenizer.decode(ids) == "a<|endoftext|>b"


@pytest.mark.parametrize("text", _TEXTS)
def test_streaming_gives_the_same_text(tokenizer: Tokenizer, text: str) -> None:
    decoder = tokenizer.stream_decoder()
    pieces = [decoder.feed(int(token)) for token in tokenizer.encode(text)]
    assert "".join(pieces) + decoder.finish() == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_streaming_gives_the_same_text_for_a_cut_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("ab🙂")[:-1]
    decoder = tokenizer.stream_decoder()
    streamed = "".join(decoder.feed(int(token)) for token in ids) + decoder.finish()
    assert streamed == tokenizer.decode(ids)


@given(st.lists(st.integers(0, 256), max_size=40))
def test_any_ids_stream_to_what_they_decode_to(ids: list[int]) -> None:
    tokenizer = ByteTokenizer()
    decoder = tokenizer.stream_decoder()
    assert "".join(map(decoder.feed, ids)) + decoder.finish() == tokenizer.decode(ids)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 269), max_size=30))
def test_any_ids_of_a_file_stream_to_what_they_decode_to(tokenizer_file: Path, ids: list[int]) -> None:
    tokenizer = load_tokenizer(str(tokenizer_file))
    decoder = tokenizer.stream_decoder()
    assert "".join(map(decoder.feed, ids)) + decoder.finish() == tokenizer.decode(ids)


def test_sizes(gpt2_files: Path, tokenizer_file: Path) -> None:
    sizes = {name: load_tokenizer(name) for name in ("bytes", "gpt2", str(tokenizer_file))}
    found = [(tokenizer.vocab_size, tokenizer.end_of_text) for tokenizer in sizes.values()]
    assert found == [(257, 256), (50257, 50256), (270, 0)]
    assert list(sizes) == [tokenizer.name for tokenizer in sizes.values()]


def test_gpt2_gives_the_published_ids(gpt2_files: Path) -> None:
    assert load_tokenizer("gpt2").encode("Hello, world!").tolist() == [15496, 11, 995, 0]


def test_gpt2_without_its_files_names_both_remedies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiktoken_load = pytest.importorskip("tiktoken.load")

    def no_network(address: str) -> bytes:
        raise OSError("network is unreachable")

    monkeypatch.setattr(tiktoken_load, "read_file", no_network)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(DataError, match=r"connect this machine to a network.*TIKTOKEN_CACHE_DIR"):
        load_tokenizer("gpt2")
    assert os.listdir(tmp_path) == []


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown tokenizer 'gpt3'"):
        load_tokenizer("gpt3")


def test_a_foreign_file_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path = tmp_path / "foreign.json"
    path.write_text('{"not": "a tokenizer"}')
    with pytest.raises(DataError, match=r"foreign\.json is not a JSON file of the tokenizers library"):
        load_tokenizer(str(path))


def test_a_file_without_an_end_of_text_is_refused(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path / "endless.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(str(path))
    with pytest.raises(ConfigError, match=r"endless\.json has no token that ends a text"):
        load_tokenizer(str(path))
