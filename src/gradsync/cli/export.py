"""``gradsync export``: a trained run in the form of another library."""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gradsync.cli.options import new_parser
from gradsync.errors import ConfigError
from gradsync.observe.terminal import say
from gradsync.train.runfolder import check_trained

if TYPE_CHECKING:
    from gradsync.train.trained import Trained

_DESCRIPTION = "Write a trained run as a Hugging Face folder, which transformers loads as GPT2LMHeadModel."


def main(arguments: Sequence[str]) -> int:
    """Run ``gradsync export`` and return its exit code."""
    parser = new_parser("export", _DESCRIPTION)
    parser.option("run", str, None, "run folder, or one checkpoint in it")
    parser.option("--format", Literal["huggingface"], "huggingface", "form of what is written")
    parser.option("--out", str | None, None, "folder to write (required); a new or an empty one")
    parser.option("--checkpoint", Literal["newest", "best"], "newest", "which one to take")
    options = parser.parse_args(list(arguments))
    if options.out is None:
        raise ConfigError("--out is missing; give the folder to write")
    out = Path(options.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out {out} exists and is not an empty folder; give another one")
    check_trained(Path(options.run))  # while that costs nothing: torch takes seconds to import

    from gradsync.model.huggingface import export_gpt2
    from gradsync.train.trained import load_trained

    trained = load_trained(Path(options.run), options.checkpoint, "cpu")
    say(f"from {trained.checkpoint}", sys.stderr)
    unfinished = out.with_name(out.name + ".unfinished")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        export_gpt2(trained.model, unfinished, trained.tokenizer.end_of_text)
        about_tokenizer = _copy_tokenizer(trained, unfinished)
        os.replace(unfinished, out)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error}; make room, or give another folder") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    say(f"wrote {out}; {about_tokenizer}")
    return 0


def _copy_tokenizer(trained: "Trained", out: Path) -> str:
    """Put the tokenizer beside the model where it is a file of its own; return what to say about it."""
    name = trained.tokenizer.name
    if name == "gpt2":
        return "its tokenizer is GPT-2's own"
    if name == "bytes":
        return "its tokens are the bytes of UTF-8 text, 256 ends a text"
    shutil.copyfile(name, out / "tokenizer.json")
    return "with tokenizer.json"
