"""Tensors on disk: the same bits back, and nothing that a file names is ever executed."""

import pickle

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

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
    with pytest.raises(CheckpointError, match="which is not its own"):
        read_index(folder)


def builds(module: str, name: str, attribute: str, argument: bytes = b"") -> bytes:
    """A pickle that takes something of this process (or a member of it) and sets an attribute there."""
    fetch = b"c" + module.encode() + b"\n" + name.encode() + b"\n" + argument
    return fetch + b"(N" + pickle.dumps({attribute: 1}, protocol=0)[:-1] + b"tb."


@pytest.mark.parametrize(
    "program",
    [
        builds("torch.serialization", "_get_layout", "__doc__"),
        builds("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING", "_value_", b"(I0\ntR"),
    ],
    ids=["function", "member of an enumeration"],
)
def test_an_index_that_changes_what_is_not_its_own_is_refused(stored, program):
    folder, _ = stored
    before = torch.serialization._get_layout.__doc__, _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT.value
    (folder / INDEX_NAME).write_bytes(program)
    with pytest.raises(CheckpointError, match="which is not its own"):
        read_index(folder)
    assert before == (torch.serialization._get_layout.__doc__, _MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT.value)


def _forget_a_piece(index):
    index.state_dict_metadata["matrix"].chunks.clear()


def _spoil_a_shape(index):
    index.state_dict_metadata["matrix"].size = ("5", 3)


def _spoil_a_place(index):
    next(iter(index.storage_data.values())).offset = -1


@pytest.mark.parametrize("change", [_forget_a_piece, _spoil_a_shape, _spoil_a_place])
def test_an_index_that_would_leave_values_as_they_are_is_refused(stored, change):
    folder, _ = stored
    index = read_index(folder)
    change(index)
    (folder / INDEX_NAME).write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match="damaged"):
        tensor_shapes(folder)


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
