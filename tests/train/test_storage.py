"""Tensors on disk: the same bits back, and nothing that a file names is ever executed."""

import pickle

import pytest
import torch

from gradsync.errors import CheckpointError
from gradsync.train.storage import INDEX_NAME, load_tensors, read_index, save_tensors, tensor_shapes


@pytest.fixture
def stored(tmp_path):
    tensors = {
        "matrix": torch.randn(5, 3),
        "scalar": torch.tensor(3.5),
        "bf16": torch.randn(4).bfloat16(),
        "random": torch.get_rng_state(),
    }
    save_tensors(tmp_path, tensors, None)
    return tmp_path, tensors


def test_what_was_saved_comes_back(stored):
    folder, tensors = stored
    got = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    load_tensors(folder, got)
    assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())
    assert tensor_shapes(folder) == {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def test_a_missing_tensor_and_another_shape_are_errors(stored):
    folder, _ = stored
    with pytest.raises(CheckpointError, match="nowhere"):
        load_tensors(folder, {"nowhere": torch.zeros(1)})
    with pytest.raises(CheckpointError, match="matrix"):
        load_tensors(folder, {"matrix": torch.zeros(3, 5)})


class _Runs:
    """Pickles as a call that leaves a trace."""

    def __init__(self, trace: str) -> None:
        self.trace = trace

    def __reduce__(self):
        return open, (self.trace, "w")


def test_an_index_that_would_run_code_is_refused(stored, tmp_path):
    folder, _ = stored
    trace = tmp_path / "trace"
    (folder / INDEX_NAME).write_bytes(pickle.dumps(_Runs(str(trace))))
    with pytest.raises(CheckpointError, match=r"open, which no index that gradsync wrote contains"):
        load_tensors(folder, {"matrix": torch.zeros(5, 3)})
    with pytest.raises(CheckpointError):
        tensor_shapes(folder)
    assert not trace.exists()


def test_an_index_that_points_outside_is_refused(stored):
    folder, _ = stored
    index = read_index(folder)
    next(iter(index.storage_data.values())).relative_path = "../elsewhere"
    (folder / INDEX_NAME).write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match=r"\.\./elsewhere, a file outside"):
        read_index(folder)


@pytest.mark.parametrize("content", [b"", b"not a pickle", pickle.dumps({"a": 1})])
def test_a_damaged_index_is_an_error(stored, content):
    folder, _ = stored
    (folder / INDEX_NAME).write_bytes(content)
    with pytest.raises(CheckpointError):
        read_index(folder)


def test_an_index_that_changes_a_class_is_refused(stored):
    folder, _ = stored
    module, name = "torch.distributed.checkpoint.metadata", "Metadata"
    changes = pickle.dumps({"state_dict_metadata": {}}, protocol=0)[:-1]
    program = b"c" + module.encode() + b"\n" + name.encode() + b"\n(N" + changes + b"tb."
    (folder / INDEX_NAME).write_bytes(program)
    with pytest.raises(CheckpointError, match="changes a class"):
        read_index(folder)


def test_tensor_files_that_would_run_code_are_refused(stored, tmp_path):
    folder, _ = stored
    trace = tmp_path / "trace"
    (data,) = folder.glob("*.distcp")
    torch.save(_Runs(str(trace)), data)
    index = read_index(folder)
    for info in index.storage_data.values():
        info.offset, info.length = 0, data.stat().st_size
    (folder / INDEX_NAME).write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError):
        load_tensors(folder, {"matrix": torch.zeros(5, 3)})
    assert not trace.exists()
