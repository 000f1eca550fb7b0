"""``gradsync train``: options in, exit code out; where the ranks run is decided here.

One process on this machine trains in this very process; several are started and watched
(``launch.py``); under torchrun this process already is a rank and joins the others. torch is imported
only once the options are known to be right.
"""

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gradsync.cli.options import add_config_options, given_options, new_parser, print_config
from gradsync.errors import ConfigError, DataError
from gradsync.train.batch import choose_num_processes, plan_batch
from gradsync.train.config import TrainConfig, inherited, resolve
from gradsync.train.runfolder import check_usable, new_run_path, newest_run_path, read_config

_DESCRIPTION = "Train a GPT on text. Without options: a small one on the sources of Python's standard library."


def main(arguments: Sequence[str]) -> int:
    """Run ``gradsync train`` and return its exit code."""
    parser = new_parser("train", _DESCRIPTION)
    add_config_options(parser)
    parser.option("--config", str | None, None, "YAML file of these options; the command line wins", "run")
    parser.option("--print-config", bool, False, "print the resulting options and exit", "run")
    given = given_options(parser, arguments)
    is_printing = given.pop("print_config", False)
    config = resolve(_with_inherited(given))
    if is_printing:
        print_config(asdict(config))
        return 0
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        from gradsync.cli.worker import join

        return join(config)
    return _start(config)


def _with_inherited(given: dict[str, Any]) -> dict[str, Any]:
    """Put the saved options of a resumed run below the given ones."""
    if not given.get("resume"):
        return given
    run = given.get("run") or newest_run_path()
    saved = inherited(read_config(Path(run))) if Path(run).is_dir() and any(Path(run).iterdir()) else {}
    return {**saved, **given, "run": run}


def _start(config: TrainConfig) -> int:
    """Check what can be checked without torch, then train with processes of this machine."""
    config = replace(config, run=config.run or new_run_path(config.preset))
    check_usable(config)
    if config.data != "stdlib" and not Path(config.data).exists():
        raise DataError(f"--data {config.data} does not exist; give a text file, a folder, or 'stdlib'")
    nproc = config.nproc or _choose_nproc(config)
    plan_batch(config.batch_tokens, config.context, nproc, config.micro_batch, config.max_micro_batch)
    print(f"starting {nproc} process{'es' if nproc > 1 else ''} ...", file=sys.stderr, flush=True)
    if nproc == 1:
        from gradsync.cli.worker import run_alone

        return run_alone(config)
    from gradsync.cli.launch import launch

    return launch(config, nproc)


def _choose_nproc(config: TrainConfig) -> int:
    """One process a GPU or core, as many of them as divide the step evenly."""
    return choose_num_processes(config.batch_tokens, config.context, config.micro_batch, _num_places(config.device))


def _num_places(device: str) -> int:
    if device != "cpu" and _may_have_cuda():
        import torch

        if torch.cuda.is_available():
            return torch.cuda.device_count()
    if device == "cuda":
        raise ConfigError("--device cuda: there is no CUDA device on this machine; use --device cpu or auto")
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _may_have_cuda() -> bool:
    # Saves the import of torch in the parent of CPU runs, where the driver's files tell enough.
    return sys.platform != "linux" or Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()
