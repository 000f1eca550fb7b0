"""``gradsync sample``: text from a run's checkpoint, on standard output as it comes."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from gradsync.cli.options import new_parser
from gradsync.errors import ConfigError
from gradsync.observe.terminal import fit_for, say
from gradsync.train.config import MAX_SEED
from gradsync.train.runfolder import check_trained

_DESCRIPTION = "Print text that a trained run goes on with."


def main(arguments: Sequence[str]) -> int:
    """Run ``gradsync sample`` and return its exit code."""
    parser = new_parser("sample", _DESCRIPTION)
    parser.option("run", str, None, "run folder, or one checkpoint in it")
    parser.option("--prompt", str | None, None, "text to go on from (without one: the start of a text)")
    parser.option("--prompt-file", str | None, None, "file of prompts, one a line; '-' is standard input")
    parser.option("--num-samples", int, 1, "samples of each prompt")
    parser.option("--max-tokens", int, 256, "most tokens of a sample")
    parser.option("--temperature", float, 0.8, "0 takes the likeliest token")
    parser.option("--top-k", int | None, 50, "draw among this many tokens only; null: all")
    parser.option("--seed", int, 0, "the same seed gives the same samples")
    parser.option("--checkpoint", Literal["newest", "best"], "newest", "which one to take")
    parser.option("--device", Literal["auto", "cpu", "cuda"], "auto", "where to compute")
    options = parser.parse_args(list(arguments))
    prompts = list(_prompts(options.prompt, options.prompt_file))
    _check(options)
    check_trained(Path(options.run))  # while that costs nothing: torch takes seconds to import

    from gradsync.train.sample import SampleOptions, stream_text
    from gradsync.train.trained import load_trained

    trained = load_trained(Path(options.run), options.checkpoint, options.device)
    say(f"from {trained.checkpoint}", sys.stderr)
    is_one = len(prompts) * options.num_samples == 1
    for prompt in prompts:
        for number in range(options.num_samples):
            how = SampleOptions(options.max_tokens, options.temperature, options.top_k, options.seed + number)
            pieces = stream_text(trained.model, trained.tokenizer, prompt, how, trained.device)
            _print_stream(prompt, pieces, is_one)
    return 0


def _print_stream(prompt: str, pieces: Iterator[str], is_one: bool) -> None:
    if not is_one:
        print("---")
    sys.stdout.write(fit_for(sys.stdout, prompt))
    for piece in pieces:
        sys.stdout.write(fit_for(sys.stdout, piece))
        sys.stdout.flush()
    print(flush=True)


def _prompts(prompt: str | None, file: str | None) -> Iterator[str]:
    if prompt is not None and file is not None:
        raise ConfigError("give --prompt or --prompt-file, not both")
    if file is None:
        yield prompt or ""
        return
    try:
        lines = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompt-file {file} cannot be read: {error}") from error
    found = [prompt for line in lines.split("\n") if (prompt := line.removesuffix("\r"))]
    if not found:
        raise ConfigError(f"--prompt-file {file} holds no prompt; write one a line")
    yield from found


def _check(options: Any) -> None:
    for name, least in (("num_samples", 1), ("max_tokens", 1), ("temperature", 0), ("top_k", 1), ("seed", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")
    if options.seed + options.num_samples > MAX_SEED:
        raise ConfigError(f"--seed is {options.seed}; it must be less than 2**63")
