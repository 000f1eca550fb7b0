"""torch.distributed.checkpoint without its two doors to foreign code.

The format's index (``.metadata``) is a pickle, and non-tensor entries are pickles too. Here the
index is read by an unpickler that knows only the classes an index is made of, and non-tensor entries
are refused: we write none. Files outside the checkpoint's folder are never opened.
"""

import math
import pickle
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import is_dataclass
from pathlib import Path
from typing import IO, Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from gradsync.errors import CheckpointError
from gradsync.parallel.pieces import Pieces

INDEX_NAME = ".metadata"

_INDEX_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
}


# The one written in Python, which can be told not to change a class; typeshed doesn't know it.
_PythonUnpickler: Any = pickle._Unpickler  # type: ignore[attr-defined]


class _IndexUnpickler(_PythonUnpickler):  # type: ignore[misc]
    dispatch = dict(_PythonUnpickler.dispatch)

    def load_build(self) -> None:
        # Only what the index itself brings may be filled: a class, a function or a member of an enumeration is shared
        # with the whole process.
        built = self.stack[-2]
        if not (is_dataclass(built) and not isinstance(built, type)):
            raise CheckpointError(
                f"the checkpoint's index changes {built!r}, which is not its own; it was made to do harm, and is not "
                f"loaded"
            )
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and name in _DTYPE_NAMES
        if is_dtype or name in _INDEX_CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise CheckpointError(
            f"the checkpoint's index names {module}.{name}, which no index that gradsync wrote contains; "
            f"the file is damaged or was made to run code, and is not loaded"
        )


_DTYPE_NAMES = {
    "float64", "float32", "float16", "bfloat16", "complex64", "complex128",
    "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool",
}  # fmt: skip


class _SavePieces(DefaultSavePlanner):
    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.state_dict[index.fqn]
        return _piece_at(found, index) if isinstance(found, Pieces) else super().lookup_object(index)


class _TensorsOnly(DefaultLoadPlanner):
    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        # The default one gives memory to meta tensors, of which there are none, and knows no pieces.
        self.state_dict, self.original_state_dict = state_dict, state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        found = self.state_dict[index.fqn]
        return _piece_at(found, index) if isinstance(found, Pieces) else super().lookup_tensor(index)

    def load_bytes(self, read_item: Any, value: IO[bytes]) -> None:
        raise CheckpointError(f"{read_item.dest_index.fqn} is no tensor; the checkpoint was not written by gradsync")


class _Reader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        index = read_index(Path(self.path))
        index.storage_meta.load_id = self.load_id  # type: ignore[union-attr]
        return index


def save_tensors(folder: Path, tensors: Mapping[str, Tensor | Pieces], group: Any) -> None:
    """Write the tensors of all ranks of ``group`` (None: of this process alone) into ``folder``.

    What several ranks hold under one name is written once, by one of them; pieces make up whole tensors.

    Raises:
        CheckpointError: on every rank, if any rank could not write.
    """
    writer = FileSystemWriter(folder, sync_files=True)
    try:
        with _alone_is_intended():
            planner = _SavePieces(flatten_state_dict=False, flatten_sharded_tensors=False)
            save(dict(tensors), storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise CheckpointError(f"{folder} could not be written: {_first_failure(error)}") from error


def load_tensors(folder: Path, tensors: Mapping[str, Tensor | Pieces]) -> None:
    """Fill the given tensors, and pieces of tensors, in place from a folder; each rank reads for itself.

    Raises:
        CheckpointError: a tensor is missing or has another shape.
    """
    try:
        with _alone_is_intended():
            planner = _TensorsOnly(flatten_state_dict=False, flatten_sharded_tensors=False)
            load(dict(tensors), storage_reader=_Reader(folder), planner=planner, no_dist=True)
    except CheckpointException as error:
        raise CheckpointError(f"{folder} could not be loaded: {_first_failure(error)}") from error


def read_index(folder: Path) -> Metadata:
    """Return the index of a folder without executing anything that it names.

    Raises:
        CheckpointError: the index is missing, damaged, or names what an index does not contain.
    """
    path = folder / INDEX_NAME
    try:
        with path.open("rb") as file:
            index = _IndexUnpickler(file).load()
        if not isinstance(index, Metadata):
            raise CheckpointError(f"{path} is not the index of a checkpoint")
        _check_index(path, index)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises almost anything
        raise CheckpointError(f"{path} could not be read: {type(error).__name__}: {error}") from error
    return index


def _check_index(path: Path, index: Metadata) -> None:
    """Raise if an index names files elsewhere, or (anything) if it is not made of what torch writes."""
    for info in (index.storage_data or {}).values():
        name = info.relative_path
        if Path(name).name != str(name):
            raise CheckpointError(f"{path} names {name}, a file outside the checkpoint")
        if not (type(info.offset) is type(info.length) is int and info.offset >= 0 and info.length >= 0):
            raise CheckpointError(f"{path} is damaged: {name} has no bytes {info.offset!r} + {info.length!r}")
    for key, entry in index.state_dict_metadata.items():
        if not isinstance(key, str) or not isinstance(entry, TensorStorageMetadata):
            continue
        shapes = [entry.size, *(part for chunk in entry.chunks for part in (chunk.offsets, chunk.sizes))]
        if not all(type(number) is int and number >= 0 for shape in shapes for number in shape):
            raise CheckpointError(f"{path} is damaged: {key} has no shape {entry.size!r}")
        if sum(math.prod(chunk.sizes) for chunk in entry.chunks) != math.prod(entry.size):
            raise CheckpointError(f"{path} is damaged: its pieces of {key} do not make up {tuple(entry.size)}")


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors in a folder."""
    entries = read_index(folder).state_dict_metadata.items()
    return {name: tuple(entry.size) for name, entry in entries if isinstance(entry, TensorStorageMetadata)}


def _piece_at(pieces: Pieces, index: MetadataIndex) -> Tensor:
    assert index.offset is not None
    return pieces.at(index.offset)


@contextmanager
def _alone_is_intended() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _first_failure(error: CheckpointException) -> str:
    rank, (cause, _) = next(iter(error.failures.items()))
    return f"rank {rank}: {type(cause).__name__}: {cause}"
