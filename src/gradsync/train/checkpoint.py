"""The folder of checkpoints: written whole or not at all, verified when read, the old ones removed.

One checkpoint is a folder ``step-00000200`` of tensor files (``storage.py``) and a manifest with the
size and SHA-256 of each file beside a few plain facts (step, position of the data, model). It is
written as ``.unfinished-...``, synced, and renamed; so a folder under its final name was complete
when it was written, and the manifest proves that it still is. What the tensors mean is the business
of ``state.py``.
"""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from gradsync.errors import CheckpointError
from gradsync.parallel.pieces import Pieces
from gradsync.train.ranks import Ranks, together
from gradsync.train.runfolder import MANIFEST_NAME
from gradsync.train.storage import load_tensors, save_tensors, tensor_shapes

T = TypeVar("T")

FORMAT = "gradsync-checkpoint"
VERSION = 1

_PREFIX = "step-"
_UNFINISHED = ".unfinished-"
_DISCARDED = ".discarded-"
_READ_BYTES = 1 << 22


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint on disk, its manifest read; ``verify`` says whether it is intact."""

    folder: Path
    step: int
    facts: dict[str, Any]
    files: dict[str, dict[str, Any]]

    @property
    def val_loss(self) -> float | None:
        """The validation loss of its step; None if none was taken, or no number came of it."""
        loss = self.facts.get("val_loss")
        return float(loss) if isinstance(loss, int | float) and math.isfinite(loss) else None

    def fact(self, name: str, kind: type[T]) -> T:
        """Return one of the facts.

        Raises:
            CheckpointError: it is missing, or something else than it should be.
        """
        value = self.facts.get(name)
        if not isinstance(value, kind):
            raise CheckpointError(
                f"{self.folder / MANIFEST_NAME} is damaged: its fact {name!r} is {value!r}, expected {kind.__name__}"
            )
        return value

    def verify(self) -> None:
        """Compare every file with the manifest.

        Raises:
            CheckpointError: a file is missing, cut short, changed or cannot be read.
        """
        for name, expected in self.files.items():
            path = self.folder / name
            try:
                size = path.stat().st_size
                if size != expected["bytes"]:
                    raise CheckpointError(f"{path} has {size} bytes instead of {expected['bytes']}")
                if _sha256(path) != expected["sha256"]:
                    raise CheckpointError(f"{path} was changed: its checksum is not the manifest's")
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the tensors held."""
        return tensor_shapes(self.folder)

    def load(self, tensors: Mapping[str, Tensor | Pieces]) -> None:
        """Fill tensors, and pieces of tensors, in place by name."""
        load_tensors(self.folder, tensors)


class CheckpointFolder:
    """Writes the checkpoints of a run and removes those that are no longer kept."""

    def __init__(self, folder: Path, ranks: Ranks, keep: int) -> None:
        self._folder = folder
        self._ranks = ranks
        self._keep = keep

    def save(self, step: int, tensors: Mapping[str, Tensor | Pieces], facts: dict[str, Any]) -> Path:
        """Write one checkpoint, all ranks together; ``facts`` are rank 0's and must be JSON.

        Raises:
            CheckpointError: on every rank, if any rank could not write; what was there before stays.
        """
        final = self._folder / f"{_PREFIX}{step:08d}"
        unfinished = self._folder / f"{_UNFINISHED}{final.name}"
        try:
            self._on_first(lambda: _make_empty(unfinished))
            save_tensors(unfinished, tensors, self._ranks.host_group)
            written = together(self._ranks, lambda: self._describe_own(unfinished))
            files = {name: entry for part in self._ranks.gather(written) for name, entry in part.items()}
            self._on_first(lambda: self._publish(unfinished, final, step, facts, files))
        except CheckpointError:
            if self._ranks.rank == 0:  # or it takes the room that the next one needs
                shutil.rmtree(unfinished, ignore_errors=True)
            raise
        return final

    def clean(self) -> None:
        """Remove what interrupted writes and removals left behind."""
        self._on_first(lambda: _remove_leftovers(self._folder))

    def _publish(self, unfinished: Path, final: Path, step: int, facts: dict[str, Any], files: dict[str, Any]) -> None:
        files = {**files, **_describe_files(unfinished, ".metadata")}
        manifest = {"format": FORMAT, "version": VERSION, "step": step, "facts": facts, "files": files}
        _write_synced(unfinished / MANIFEST_NAME, json.dumps(manifest, indent=1) + "\n")
        _sync_folder(unfinished)
        if final.exists():  # the same step again, after a fall back to an earlier checkpoint
            _discard(final)
        os.rename(unfinished, final)
        _sync_folder(self._folder)
        self._remove_old()

    def _remove_old(self) -> None:
        checkpoints = list_checkpoints(self._folder)
        kept = {checkpoint.step for checkpoint in checkpoints[: self._keep]}
        best = best_of(checkpoints)
        if best is not None:
            kept.add(best.step)
        for checkpoint in checkpoints:
            if checkpoint.step not in kept:
                _discard(checkpoint.folder)

    def _describe_own(self, unfinished: Path) -> dict[str, dict[str, Any]]:
        with self._disk_errors():
            return _describe_files(unfinished, f"__{self._ranks.rank}_")

    def _on_first(self, action: Callable[[], None]) -> None:
        def guarded() -> None:
            with self._disk_errors():
                if self._ranks.rank == 0:
                    action()

        together(self._ranks, guarded)

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise CheckpointError(f"{self._folder} could not be written: {error}") from error


def all_of(folder: Path) -> list[Path]:
    """Return every checkpoint that was written to its end, intact or not, the newest first."""
    return sorted(folder.glob(f"{_PREFIX}*"), reverse=True)


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the checkpoints whose manifest can be read, the newest first."""
    found = []
    for path in all_of(folder):
        try:
            found.append(open_checkpoint(path))
        except CheckpointError:
            continue
    return sorted(found, key=lambda checkpoint: checkpoint.step, reverse=True)


def best_of(checkpoints: Iterable[Checkpoint]) -> Checkpoint | None:
    """Return the checkpoint with the lowest validation loss, if any has one."""
    scored = [(checkpoint.val_loss, checkpoint) for checkpoint in checkpoints if checkpoint.val_loss is not None]
    return min(scored, key=lambda pair: pair[0])[1] if scored else None


def newest_intact(folder: Path, complain: Callable[[str], None]) -> Checkpoint | None:
    """Return the newest checkpoint that is intact; those that are not are complained about and passed over."""
    for path in all_of(folder):
        try:
            checkpoint = open_checkpoint(path)
            checkpoint.verify()
        except CheckpointError as error:
            complain(f"damaged checkpoint passed over: {error}")
        else:
            return checkpoint
    return None


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read the manifest of a checkpoint.

    Raises:
        CheckpointError: there is none, or it isn't one of ours.
    """
    path = folder / MANIFEST_NAME
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
        is_ours = manifest["format"] == FORMAT
        version = manifest["version"]
        checkpoint = Checkpoint(folder, manifest["step"], manifest["facts"], manifest["files"])
    except OSError as error:
        raise CheckpointError(f"{path} could not be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    if not is_ours or version != VERSION:
        raise CheckpointError(f"{path} is not a gradsync checkpoint of version {VERSION}")
    if not _is_well_formed(checkpoint):
        raise CheckpointError(f"{path} is damaged: its step, facts or files are not what gradsync writes")
    foreign = [name for name in checkpoint.files if name != os.path.basename(name) or name in ("", ".", "..")]
    if foreign:
        raise CheckpointError(f"{path} names {foreign[0]!r}, which is no file of the checkpoint's own folder")
    return checkpoint


def _is_well_formed(checkpoint: Checkpoint) -> bool:
    is_whole = (
        type(checkpoint.step) is int and isinstance(checkpoint.facts, dict) and isinstance(checkpoint.files, dict)
    )
    return is_whole and all(
        isinstance(entry, dict) and type(entry.get("bytes")) is int and isinstance(entry.get("sha256"), str)
        for entry in checkpoint.files.values()
    )


def _describe_files(folder: Path, prefix: str) -> dict[str, dict[str, Any]]:
    return {
        path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in sorted(folder.glob(f"{prefix}*"))
    }


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _discard(folder: Path) -> None:
    # Renamed first: a removal cut short must not leave half a checkpoint under a valid name.
    discarded = folder.with_name(f"{_DISCARDED}{folder.name}")
    shutil.rmtree(discarded, ignore_errors=True)
    os.rename(folder, discarded)
    shutil.rmtree(discarded, ignore_errors=True)


def _remove_leftovers(folder: Path) -> None:
    for pattern in (f"{_UNFINISHED}*", f"{_DISCARDED}*"):
        for leftover in folder.glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
