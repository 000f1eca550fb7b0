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
from gradsync.comm.launchers import adopt
from gradsync.errors import ConfigError, DataError
from gradsync.parallel.degrees import check_strategy, resolve_degrees
from gradsync.train.batch import choose_num_processes, plan_batch
from gradsync.train.config import TrainConfig, inherited, resolve
from gradsync.train.runfolder import RunFolder, check_usable, new_run_path, newest_run_path, read_config

_DESCRIPTION = "Train a GPT on text. Without options: a small one on the sources of Python's standard library."


def main(arguments: Sequence[str]) -> int:
    """Run ``gradsync train`` and return its exit code."""
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
    is_printing, is_dry = given.pop("print_config", False), given.pop("dry_run", False)
    config = resolve(_with_inherited(parser, given))
    if is_printing:
        print_config(asdict(config))
        return 0
    if is_dry:
        return _dry_run(config)
    if adopt(os.environ) is not None:
        from gradsync.cli.worker import join

        return join(config)
    return _start(config)


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
    return {**saved, **given, "run": run}


def _dry_run(config: TrainConfig) -> int:
    from gradsync.train.dryrun import dry_run

    config = replace(config, run=config.run or new_run_path(config.preset))
    device_type = config.device if config.device != "auto" else ("cuda" if _num_gpus() else "cpu")
    for line in dry_run(config, config.nproc or _choose_nproc(config), device_type):
        print(line)
    return 0


def _start(config: TrainConfig) -> int:
    """Check what can be checked without torch, then train with processes of this machine."""
    config = replace(config, run=config.run or new_run_path(config.preset))
    check_usable(config)
    if config.data != "stdlib" and not Path(config.data).exists():
        raise DataError(f"--data {config.data} does not exist; give a text file, a folder, or 'stdlib'")
    nproc = config.nproc or _choose_nproc(config)
    degrees = resolve_degrees(nproc, config.dp, config.tp, config.pp)
    check_strategy(config.strategy, degrees)
    plan_batch(config.batch_tokens, config.context, degrees.data, config.micro_batch, config.max_micro_batch)
    print(f"starting {nproc} process{'es' if nproc > 1 else ''} ...", file=sys.stderr, flush=True)
    if nproc == 1:
        from gradsync.cli.worker import run_alone

        return run_alone(config)
    from gradsync.cli.launch import launch

    return launch(config, nproc)


def _choose_nproc(config: TrainConfig) -> int:
    """One process a GPU or core: as many replicas as divide the step evenly, or those that are asked for."""
    of_replica = config.tp * config.pp
    if config.dp is not None:
        return config.dp * of_replica
    places = max(_num_places(config.device) // of_replica, 1)
    return of_replica * choose_num_processes(config.batch_tokens, config.context, config.micro_batch, places)


def _num_places(device: str) -> int:
    gpus = 0 if device == "cpu" else _num_gpus()
    if device == "cuda" and not gpus:
        raise ConfigError("--device cuda: there is no CUDA device on this machine; use --device cpu or auto")
    return gpus or num_cores()


def _num_gpus() -> int:
    # Saves the import of torch in the parent of CPU runs, where the driver's files tell enough.
    if sys.platform == "linux" and not Path("/dev/nvidiactl").exists() and not Path("/dev/dxg").exists():
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0
