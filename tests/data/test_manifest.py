"""The manifest of a folder of shards: round trip, verification once, and what it must not open."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gradsync.data.manifest import (
    MANIFEST,
    Commonest,
    Manifest,
    ShardEntry,
    open_split,
    read_manifest,
    write_manifest,
)
from gradsync.data.shards import Shard, ShardWriter
from gradsync.errors import DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    entries = []
    for number in range(2):
        name = f"train-{number:05d}.tokens"
        with ShardWriter(folder / name, 257) as writer:
            writer.write(np.arange(10 + number))
        entries.append(ShardEntry(name, 10 + number, 1))
    splits = {"train": tuple(entries), "val": ()}
    write_manifest(folder, Manifest("bytes", 257, 256, splits, {"from": "x"}, Commonest(0, 0.1)))
    return folder


def _rewrite(folder: Path, **changes: Any) -> None:
    content = json.loads((folder / MANIFEST).read_text()) | changes
    (folder / MANIFEST).write_text(json.dumps(content))


def _count_verifications(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    verified = []
    real = Shard.verify
    monkeypatch.setattr(Shard, "verify", lambda self: (verified.append(self.path.name), real(self))[1])
    return verified


def test_round_trip(folder: Path) -> None:
    manifest = read_manifest(folder)
    assert (manifest.num_tokens("train"), manifest.num_documents("train")) == (21, 2)
    assert (manifest.num_tokens("val"), manifest.num_tokens("nonsense")) == (0, 0)
    assert [len(shard.tokens) for shard in open_split(folder, manifest, "train")] == [10, 11]
    write_manifest(folder, manifest)
    assert read_manifest(folder) == manifest


def test_tokens_are_checked_once_and_again_after_a_change(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verified = _count_verifications(monkeypatch)
    manifest = read_manifest(folder)
    for _ in range(3):
        open_split(folder, manifest, "train")
    assert verified == ["train-00000.tokens", "train-00001.tokens"]
    path = folder / "train-00001.tokens"
    os.utime(path, ns=(1, 1))
    open_split(folder, manifest, "train")
    assert verified[2:] == ["train-00001.tokens"]


def test_damage_is_found_at_opening(folder: Path) -> None:
    manifest = read_manifest(folder)
    open_split(folder, manifest, "train")
    path = folder / "train-00001.tokens"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match=r"train-00001\.tokens is damaged"):
        open_split(folder, manifest, "train")


def test_a_folder_of_others_is_verified_whatever_it_says_of_itself(folder: Path, tmp_path: Path) -> None:
    open_split(folder, read_manifest(folder), "train")
    copy = tmp_path / "from others"
    shutil.copytree(folder, copy)
    path = copy / "train-00001.tokens"
    times = path.stat()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(DataError, match=r"train-00001\.tokens is damaged"):
        open_split(copy, read_manifest(copy), "train")


@pytest.mark.parametrize("name", ["/etc/passwd", "../tokenizer.json", "sub/tokenizer.json", "", None])
def test_a_tokenizer_elsewhere_is_not_opened(folder: Path, name: str | None) -> None:
    _rewrite(folder, tokenizer=name)
    with pytest.raises(DataError, match="is no tokenizer; a file of one lies beside the manifest"):
        read_manifest(folder)


def test_a_damaged_memory_of_verification_is_harmless(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "verified.json").write_text("[1")
    verified = _count_verifications(monkeypatch)
    open_split(folder, read_manifest(folder), "train")
    assert len(verified) == 2


def test_a_shard_of_another_folder_is_refused(folder: Path) -> None:
    with ShardWriter(folder / "train-00000.tokens", 257) as writer:
        writer.write(np.arange(7))
    with pytest.raises(DataError, match=r"train-00000\.tokens is not the shard that .* names: it has 7 tokens"):
        open_split(folder, read_manifest(folder), "train")


@pytest.mark.parametrize("name", ["../secret.tokens", "/etc/passwd", "..", "", "a/b.tokens", "a\\b.tokens"])
def test_names_cannot_leave_the_folder(folder: Path, name: str) -> None:
    _rewrite(folder, splits={"train": [{"name": name, "tokens": 1, "documents": 1}]})
    with pytest.raises(DataError, match="not a plain file name"):
        read_manifest(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "other"}, "is not the manifest of a gradsync data folder"),
        ({"version": 99}, "has version 99"),
        ({"splits": {"train": [{"name": "a.tokens"}]}}, "is damaged: KeyError"),
        ({"splits": []}, "is damaged: AttributeError"),
        ({"vocab_size": "many"}, "is damaged: ValueError"),
    ],
)
def test_a_manifest_that_cannot_be_used_is_refused(folder: Path, changes: dict[str, Any], message: str) -> None:
    _rewrite(folder, **changes)
    with pytest.raises(DataError, match=message):
        read_manifest(folder)


def test_a_manifest_that_is_no_json_is_refused(folder: Path) -> None:
    (folder / MANIFEST).write_text("{")
    with pytest.raises(DataError, match=r"manifest\.json is damaged: not JSON"):
        read_manifest(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / "train-00001.tokens").unlink()
    with pytest.raises(DataError, match=r"train-00001\.tokens: No such file"):
        open_split(folder, read_manifest(folder), "train")
