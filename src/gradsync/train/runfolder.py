"""The folder of a run: what lies where, and who may write into it.

``config.yaml`` (options, resolved), ``metrics.jsonl``, ``starts.jsonl`` (one object for each start:
machine, versions, ranks), ``checkpoints/``, ``samples/``, ``tensorboard/``, ``errors.log``. Knows no
torch.
"""

import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import yaml

from gradsync.errors import CheckpointError, ConfigError
from gradsync.train.config import TrainConfig, differences
from gradsync.train.folderlock import FolderLock

T = TypeVar("T")

MANIFEST_NAME = "manifest.json"  # of a checkpoint

_RUNS = Path("runs")


class RunFolder:
    """The paths of one run."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @property
    def config_file(self) -> Path:
        """The resolved options."""
        return self.path / "config.yaml"

    @property
    def metrics_file(self) -> Path:
        """One JSON object a step."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def samples(self) -> Path:
        """The folder of samples, one file each time."""
        return self.path / "samples"

    @property
    def tokenizer_file(self) -> Path:
        """A copy of the tokenizer's file, where the tokenizer is made from one."""
        return self.path / "tokenizer.json"

    @property
    def error_log(self) -> Path:
        """Where tracebacks are kept."""
        return self.path / "errors.log"

    def create(self, config: TrainConfig) -> FolderLock:
        """Make the folder, or take over the one that is resumed; returns what keeps others out.

        Raises:
            ConfigError: it cannot be written, another process is at work in it, or it may not be used for this
                configuration.
        """
        check_usable(config)
        with _writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            lock = FolderLock(self.path)
            check_usable(config)  # another run may have been quicker
            for folder in (self.checkpoints, self.samples):
                folder.mkdir(exist_ok=True)
            _write_atomically(self.config_file, yaml.safe_dump(asdict(config), sort_keys=False))
        return lock

    def append_start(self, start: dict[str, Any]) -> None:
        """Note where and on what a start ran."""
        path = self.path / "starts.jsonl"
        with _writing(self.path):
            _drop_cut_line(path)
            with path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(start) + "\n")

    def keep_tokenizer(self, source: Path | None) -> None:
        """Copy a tokenizer's file, if it is made from one, so that the folder is enough to sample from."""
        if source is not None and source.resolve() != self.tokenizer_file.resolve():
            with _writing(self.path):
                shutil.copyfile(source, self.tokenizer_file)

    def write_sample(self, step: int, text: str) -> None:
        """Keep a sample."""
        (self.samples / f"step-{step:08d}.txt").write_text(text, encoding="utf-8", errors="replace")


def check_usable(config: TrainConfig) -> None:
    """Check that a run may start in its folder; writes nothing.

    Raises:
        ConfigError: the folder cannot exist, holds something and isn't resumed, holds nothing to
            resume, or belongs to a run of another configuration.
    """
    assert config.run is not None
    path = Path(config.run)
    if path.exists() and not path.is_dir():
        raise ConfigError(f"run folder {path} is a file; give a folder with --run")
    blocker = next((parent for parent in path.parents if parent.exists()), Path())
    if not blocker.is_dir():
        raise ConfigError(f"run folder {path} cannot be made: {blocker} is not a folder; give another one with --run")
    is_taken = path.is_dir() and any(path.iterdir())
    if config.resume:
        if not is_taken:
            raise ConfigError(f"there is nothing to resume in {path}; leave --resume out to start a new run there")
        _check_same_run(config, read_config(path))
    elif is_taken:
        raise ConfigError(
            f"run folder {path} is not empty; continue the run in it with --resume, or give another folder with --run"
        )


def check_trained(path: Path) -> None:
    """Check that a path is a run folder or one checkpoint.

    Raises:
        ConfigError: it is neither.
        CheckpointError: the run folder's options cannot be read, or are damaged.
    """
    if not (path / MANIFEST_NAME).is_file():
        read_config(path)


def read_config(path: Path) -> dict[str, Any]:
    """Return the options that a run folder was made with.

    Raises:
        ConfigError: it isn't a run folder.
        CheckpointError: what it holds cannot be read, or is damaged.
    """
    try:
        options = yaml.safe_load(RunFolder(path).config_file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        what = "it holds no config.yaml" if path.is_dir() else "there is no such folder"
        raise ConfigError(
            f"{path} is not a run folder: {what}; give the folder that gradsync train was given with --run"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path / 'config.yaml'} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path / 'config.yaml'} is damaged: {' '.join(str(error).split())}") from error
    if not isinstance(options, dict):
        raise CheckpointError(f"{path / 'config.yaml'} is damaged: it holds no options")
    for name, value in options.items():
        if not isinstance(name, str) or not isinstance(value, str | int | float | None):
            raise CheckpointError(
                f"{path / 'config.yaml'} is damaged: {name!r} is {value!r}, which is no option's value"
            )
    return options


def saved_option(path: Path, name: str, kind: type[T]) -> T:
    """Return one of the options that a run folder was made with.

    Raises:
        ConfigError: it isn't a run folder.
        CheckpointError: the option is missing or of another kind.
    """
    value = read_config(path).get(name)
    if not isinstance(value, kind):
        raise CheckpointError(
            f"{path / 'config.yaml'} is damaged: {name} is {value!r}, expected a value of type {kind.__name__}"
        )
    return value


def new_run_path(preset: str) -> str:
    """Return a path for a run that was given none."""
    return str(_RUNS / f"{preset}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")


def newest_run_path() -> str:
    """Return the run that was started last below ``runs/``.

    Raises:
        ConfigError: there is none.
    """
    runs = [path.parent for path in _RUNS.glob("*/config.yaml")]
    if not runs:
        raise ConfigError(f"--resume without --run continues the newest run below {_RUNS}/, and there is none")
    return str(max(runs, key=lambda run: (run / "config.yaml").stat().st_mtime))


def _check_same_run(config: TrainConfig, earlier: dict[str, Any]) -> None:
    changed = differences(config, earlier)
    if changed:
        raise ConfigError(
            f"run folder {config.run} belongs to a run of another configuration: {', '.join(changed)}; "
            f"leave these options out to continue it, or give another folder with --run"
        )


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"run folder {path} cannot be written: {error}; give another one with --run") from error


def _write_atomically(path: Path, text: str) -> None:
    unfinished = path.with_name(path.name + ".unfinished")
    unfinished.unlink(missing_ok=True)
    with unfinished.open("x", encoding="utf-8") as file:  # never through a link that lies there
        file.write(text)
    os.replace(unfinished, path)


def _drop_cut_line(path: Path) -> None:
    """Remove what a kill has left of a last line."""
    content = path.read_bytes() if path.exists() else b""
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)
