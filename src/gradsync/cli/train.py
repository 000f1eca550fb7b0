"""``gradsync train``: options in, exit code out; where the ranks run is decided here.

One process on this machine trains in this very process; several are started and watched
(``launch.py``); under torchrun, srun or mpiexec this process already is a rank and joins the others. torch is
imported only once the options are known to be right.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gradsync.cli.cores import num_cores
from gradsync.cli.options import (
    Parser,
    add_config_options,
    checked_options,
    given_options,
    new_parser,
    print_config,
)
from gradsync.comm.launchers import Placement, adopt
from gradsync.errors import ConfigError
from gradsync.observe.terminal import lasting
from gradsync.train.batch import choose_num_processes
from gradsync.train.config import TrainConfig, inherited, resolve
from gradsync.train.outline import check_files, check_options
from gradsync.train.runfolder import RunFolder, check_usable, new_run_path, newest_run_path, read_config

_DESCRIPTION = "Train a GPT on text. Without options: a small one on the sources of Python's standard library."


def main(arguments: Sequence[str]) -> int:
    """Run ``gradsync train`` and return its exit code."""
    given = _given(arguments)
    is_printing, is_dry = given.pop("print_config", False), given.pop("dry_run", False)
    config = resolve(given)
    if is_printing:
        print_config(asdict(config))
        return 0
    place = adopt(os.environ)
    if is_dry:
        return _dry_run(config, place)
    if place is None:
        return _start(config)
    # Not the folder: rank 0 may be at work in it already.
    check_options(config, place.world_size, _device_type(config.device, place.local_world_size))
    from gradsync.cli.worker import join

    return join(config)


def _given(arguments: Sequence[str]) -> dict[str, Any]:
    parser = new_parser("train", _DESCRIPTION)
    add_config_options(parser)
    parser.option("--config", str | None, None, "YAML file of these options; the command line wins", "run")
    parser.option(
        "--auto-resume",
        bool,
        False,
        "continue the run in --run if there is one, else start it: for launchers that start the same command again",
        "run",
    )
    parser.option("--dry-run", bool, False, "say what the run would be, its memory and its files, and exit", "run")
    parser.option("--print-config", bool, False, "print the resulting options and exit", "run")
    given = given_options(parser, arguments)
    if given.pop("auto_resume", False):
        given["resume"] = _has_begun(given)
    return _with_inherited(parser, given)


def _has_begun(given: dict[str, Any]) -> bool:
    """Whether the run that ``--auto-resume`` is about has been started before."""
    if not given.get("run"):
        raise ConfigError("--auto-resume needs --run, the folder in which every start looks for the run")
    return RunFolder(given["run"]).config_file.is_file()


def _with_inherited(parser: Parser, given: dict[str, Any]) -> dict[str, Any]:
    """Put the saved options of a resumed run below the given ones."""
    if not given.get("resume"):
        return given
    run = given.get("run") or newest_run_path()
    is_there = Path(run).is_dir() and any(Path(run).iterdir())
    saved = checked_options(parser, inherited(read_config(Path(run))), RunFolder(run).config_file) if is_there else {}
    if given.get("tp") == 1:
        saved.pop("sequence_parallel", None)  # it is about the ranks of --tp, and would only be warned of
    return {**saved, **given, "run": run}


def _dry_run(config: TrainConfig, place: Placement | None) -> int:
    config, world, device_type = _checked(config, place)
    if place is not None and place.rank != 0:
        return 0
    from gradsync.train.dryrun import dry_run

    for line in dry_run(config, world, device_type):
        print(line)
    return 0


def _start(config: TrainConfig) -> int:
    """Train with processes of this machine."""
    config, nproc, _ = _checked(config, None)
    print(
        f"starting {nproc} process{'es' if nproc > 1 else ''}{_why_so_few(config, nproc)} ...",
        file=lasting(sys.stderr),
        flush=True,
    )
    return _start_ranks(config, nproc)


def _start_ranks(config: TrainConfig, nproc: int) -> int:
    if nproc == 1:
        from gradsync.cli.worker import run_alone

        return run_alone(config)
    from gradsync.cli.launch import launch

    return launch(config, nproc)


def _checked(config: TrainConfig, place: Placement | None) -> tuple[TrainConfig, int, str]:
    """Check all that can be before anything is started; returns what is to be, on how many processes and on what."""
    check_files(config)  # before the folder: who has mistyped a path would be sent to another folder, or to --resume
    config = replace(config, run=config.run or new_run_path(config.preset))
    check_usable(config)
    world = place.world_size if place is not None else config.nproc or _choose_nproc(config)
    device_type = _device_type(config.device, world if place is None else place.local_world_size)
    check_options(config, world, device_type)
    if config.backend != "auto":
        from gradsync.comm.backends import choose_backend

        choose_backend(config.backend)
    return config, world, device_type


def _choose_nproc(config: TrainConfig) -> int:
    """One process a GPU or core: as many replicas as divide the step evenly, or those that are asked for."""
    of_replica = config.tp * config.pp
    if config.dp is not None:
        return config.dp * of_replica
    places = max(_num_places(config.device) // of_replica, 1)
    return of_replica * choose_num_processes(config.batch_tokens, config.context, config.micro_batch, places)


def _why_so_few(config: TrainConfig, nproc: int) -> str:
    """Say why not every GPU or core has a process, if nobody has asked for fewer."""
    places = _num_places(config.device)
    if config.nproc is not None or config.dp is not None or nproc + config.tp * config.pp > places:
        return ""
    return f" (for {places} the {config.batch_tokens:,} tokens of a step do not divide evenly; see --batch-tokens)"


def _num_places(device: str) -> int:
    gpus = 0 if device == "cpu" else _num_gpus()
    return gpus or num_cores()


def _device_type(device: str, num_local: int) -> str:
    """Return what so many processes of a host compute on, refusing what it does not have."""
    gpus = 0 if device == "cpu" else _num_gpus()
    if device == "cuda" and not gpus:
        raise ConfigError("--device cuda: there is no CUDA device on this machine; use --device cpu or auto")
    if 0 < gpus < num_local:
        raise ConfigError(
            f"{num_local} processes on this machine need as many CUDA devices, and there are {gpus}; start fewer "
            f"(--nproc), or use --device cpu"
        )
    return "cuda" if gpus else "cpu"


def _num_gpus() -> int:
    # Saves the import of torch in the parent of CPU runs, where the driver's files tell enough.
    if sys.platform == "linux" and not Path("/dev/nvidiactl").exists() and not Path("/dev/dxg").exists():
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
