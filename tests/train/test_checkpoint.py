"""Checkpoints on disk: whole or absent, verified, the newest intact one found, the right ones kept."""

import errno
import json

import pytest
import torch

from gradsync.errors import CheckpointError
from gradsync.train import checkpoint as checkpoints
from gradsync.train.checkpoint import (
    MANIFEST_NAME,
    CheckpointFolder,
    best_of,
    list_checkpoints,
    newest_intact,
    open_checkpoint,
)
from gradsync.train.ranks import Alone


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def save(folder, steps, keep=10, losses=None):
    writer = CheckpointFolder(folder, Alone(), keep)
    for step in steps:
        loss = (losses or {}).get(step)
        writer.save(step, {"value": torch.full((4,), float(step))}, {"val_loss": loss})
    return writer


def steps_in(folder):
    return [checkpoint.step for checkpoint in list_checkpoints(folder)]


def test_a_checkpoint_holds_what_was_saved(folder):
    save(folder, [3])
    checkpoint = newest_intact(folder, pytest.fail)
    value = torch.zeros(4)
    checkpoint.load({"value": value})
    assert (checkpoint.step, checkpoint.shapes(), value.tolist()) == (3, {"value": (4,)}, [3.0] * 4)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000003"]


def test_the_newest_ones_and_the_best_are_kept(folder):
    save(folder, range(1, 7), keep=2, losses={1: 3.0, 2: 1.0, 3: 2.0, 6: 5.0})
    assert steps_in(folder) == [6, 5, 2]


@pytest.mark.parametrize("strange", [float("nan"), float("-inf"), "low"])
def test_a_loss_that_is_no_number_is_never_the_best(folder, strange):
    save(folder, range(1, 5), keep=1, losses={1: strange, 2: 1.0, 3: strange})
    assert steps_in(folder) == [4, 2]


def _truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def _flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [_truncate, _flip_a_bit, lambda path: path.unlink()])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(folder, damage, name):
    save(folder, [1, 2])
    damage(folder / "step-00000002" / name)
    complaints = []
    assert newest_intact(folder, complaints.append).step == 1
    assert len(complaints) == 1
    assert name in complaints[0]


def test_a_checkpoint_that_cannot_be_read_is_passed_over(folder, monkeypatch):
    save(folder, [1, 2])
    read = checkpoints._sha256

    def failing(path):
        if "step-00000002" in str(path):
            raise OSError(errno.EIO, "Input/output error")
        return read(path)

    monkeypatch.setattr(checkpoints, "_sha256", failing)
    complaints = []
    assert newest_intact(folder, complaints.append).step == 1
    assert complaints[0].endswith("cannot be read: Input/output error")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "x"}'])
def test_a_damaged_manifest_is_passed_over(folder, content):
    save(folder, [1, 2])
    (folder / "step-00000002" / MANIFEST_NAME).write_text(content)
    complaints = []
    assert newest_intact(folder, complaints.append).step == 1
    assert complaints


@pytest.mark.parametrize(
    "change",
    [
        {"step": "2"},
        {"step": True},
        {"facts": None},
        {"files": []},
        {"files": {"__0_0.distcp": {}}},
        {"files": {"__0_0.distcp": {"bytes": "1", "sha256": "x"}}},
        {"files": {"__0_0.distcp": 5}},
    ],
    ids=str,
)
def test_a_manifest_of_other_content_is_passed_over(folder, change):
    save(folder, [1, 2])
    path = folder / "step-00000002" / MANIFEST_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    complaints = []
    assert newest_intact(folder, complaints.append).step == 1
    assert "damaged" in complaints[0]


def test_a_fact_is_there_and_of_its_kind(folder):
    save(folder, [1])
    checkpoint = newest_intact(folder, pytest.fail)
    assert checkpoint.val_loss is None
    with pytest.raises(CheckpointError, match="its fact 'model' is None, expected dict"):
        checkpoint.fact("model", dict)


def test_the_best_has_a_loss_that_is_a_number(folder):
    save(folder, range(1, 5), keep=1, losses={1: float("nan"), 2: 1.0, 3: float("inf")})
    assert steps_in(folder) == [4, 2]
    assert best_of(list_checkpoints(folder)).step == 2


def test_another_version_is_refused(folder):
    save(folder, [1])
    path = folder / "step-00000001" / MANIFEST_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 99}))
    with pytest.raises(CheckpointError, match="version 1"):
        open_checkpoint(path.parent)


def test_no_checkpoint_is_no_checkpoint(folder):
    assert newest_intact(folder, pytest.fail) is None


def test_leftovers_of_interrupted_writes_are_not_found_and_are_removed(folder):
    writer = save(folder, [1])
    for name in (".unfinished-step-00000002", ".discarded-step-00000000"):
        (folder / name).mkdir()
        (folder / name / "part").write_text("x")
    assert newest_intact(folder, pytest.fail).step == 1
    writer.clean()
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]


def test_the_same_step_can_be_saved_again(folder):
    save(folder, [1, 1])
    assert newest_intact(folder, pytest.fail).step == 1


def test_a_write_that_fails_leaves_the_earlier_ones(folder, monkeypatch):
    writer = save(folder, [1])

    def no_space(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gradsync.train.checkpoint.os.rename", no_space)
    with pytest.raises(CheckpointError, match="No space left on device"):
        writer.save(2, {"value": torch.zeros(4)}, {})
    monkeypatch.undo()
    assert newest_intact(folder, pytest.fail).step == 1
    assert [path.name for path in folder.iterdir()] == ["step-00000001"], "half a checkpoint takes the room of the next"


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "..", "sub/file"])
def test_a_manifest_cannot_name_files_elsewhere(folder, name):
    save(folder, [1])
    path = folder / "step-00000001" / MANIFEST_NAME
    manifest = json.loads(path.read_text())
    manifest["files"][name] = {"bytes": 0, "sha256": ""}
    path.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="no file of the checkpoint's own folder"):
        open_checkpoint(folder / "step-00000001")
    assert newest_intact(folder, lambda text: None) is None
