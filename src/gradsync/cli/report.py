"""``gradsync report``: one page about one run, or several side by side."""

import os
from collections.abc import Sequence
from pathlib import Path

from gradsync.cli.options import check_can_be_written, new_parser
from gradsync.errors import ConfigError
from gradsync.observe.page import read_run, render
from gradsync.observe.terminal import say
from gradsync.train.runfolder import read_config

_DESCRIPTION = "Write a page about a run, or one that compares several: curves, samples, configuration, hardware."


def main(arguments: Sequence[str]) -> int:
    """Run ``gradsync report`` and return its exit code."""
    parser = new_parser("report", _DESCRIPTION)
    parser.add_argument("runs", type=str, nargs="+", help="run folders")
    parser.option("--out", str | None, None, "file to write (default: report.html in the first run folder)")
    options = parser.parse_args(list(arguments))
    check_can_be_written("--out", options.out)
    folders = [Path(run) for run in options.runs]
    names = short_names(folders)
    runs = [read_run(folder, name, read_config(folder)) for folder, name in zip(folders, names, strict=True)]
    out = Path(options.out) if options.out is not None else folders[0] / "report.html"
    try:
        if options.out is None:
            _write_into_run(out, render(runs))
        else:
            out.write_text(render(runs), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}") from error
    say(str(out))
    return 0


def _write_into_run(path: Path, text: str) -> None:
    """Write a file in place of what has its name: a link in a folder that comes from others must not be followed."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.unfinished")
    try:
        with unfinished.open("x", encoding="utf-8") as file:
            file.write(text)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return the folders' own names where they tell them apart, else their whole paths."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]
