"""``gradsync prepare``: text to token shards, with a progress bar on a terminal and a summary at the end."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradsync.cli.options import new_parser
from gradsync.errors import ConfigError
from gradsync.observe.terminal import say

if TYPE_CHECKING:
    from collections.abc import Callable

    from gradsync.data.prepare import PrepareOptions, PrepareProgress, PrepareResult

_DESCRIPTION = (
    "Turn text into a folder of token shards that 'gradsync train --data' reads. Run again after an interruption, "
    "the same command goes on where it stopped."
)
_DEFAULT_TOKENIZER = "gpt2"


def main(arguments: Sequence[str]) -> int:
    """Run ``gradsync prepare`` and return its exit code."""
    options = _parse(arguments)
    from gradsync.data.prepare import prepare

    try:
        with _progress_bar() as report:
            result = prepare(options, report)
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on from here", file=sys.stderr)
        raise
    _print_summary(options.out, result)
    return 0


def _parse(arguments: Sequence[str]) -> "PrepareOptions":
    parser = new_parser("prepare", _DESCRIPTION)
    add = parser.add_argument
    add(
        "inputs",
        type=str,
        nargs="*",
        metavar="INPUT",
        help="text files, .jsonl and .parquet files, folders of them, or 'stdlib' (the sources of Python's library)",
    )
    add("--out", type=str | None, help="folder to make (required)")
    add("--tokenizer", type=str | None, help="bytes, gpt2, or a tokenizers JSON file (default: gpt2)")
    add("--train-tokenizer", type=int | None, metavar="VOCAB", help="train a byte-level BPE of VOCAB tokens and use it")
    add("--val-fraction", type=float, default=0.05, help="share of the text that is kept for validation")
    add("--workers", type=int, default=_num_cores(), help="processes that tokenize (default: one a core)")
    add("--text-field", type=str, default="text", help="field of JSON lines, parquet and data sets that holds the text")
    add("--dataset", type=str | None, metavar="NAME", help="data set of the Hugging Face hub, or a local one")
    add("--dataset-config", type=str | None, help="configuration of the data set")
    add("--dataset-split", type=str, default="train", help="split of the data set")
    add("--shard-tokens", type=int, default=100_000_000, help="tokens of a shard")
    return _options_of(parser.parse_args(list(arguments)))


def _options_of(given: Any) -> "PrepareOptions":
    from gradsync.data.inputs import InputOptions
    from gradsync.data.prepare import PrepareOptions

    if not given.out:
        raise ConfigError("--out is missing; name the folder to make")
    if not given.inputs and given.dataset is None:
        raise ConfigError("nothing to prepare; give a text file, a folder, 'stdlib', or --dataset")
    if given.tokenizer is not None and given.train_tokenizer is not None:
        raise ConfigError("give --tokenizer or --train-tokenizer, not both")
    for name in ("workers", "shard_tokens"):
        if getattr(given, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(given, name)}; it must be at least 1")
    inputs = InputOptions(
        inputs=tuple(given.inputs),
        val_fraction=given.val_fraction,
        text_field=given.text_field,
        dataset=given.dataset,
        dataset_config=given.dataset_config,
        dataset_split=given.dataset_split,
    )
    return PrepareOptions(
        inputs=inputs,
        out=Path(given.out),
        tokenizer=given.tokenizer or _DEFAULT_TOKENIZER,
        train_tokenizer=given.train_tokenizer,
        num_workers=given.workers,
        shard_tokens=given.shard_tokens,
    )


@contextmanager
def _progress_bar() -> Iterator["Callable[[PrepareProgress], None]"]:
    """Show how far the work is, on a terminal; elsewhere nothing."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task("reading", total=None)

        def report(state: "PrepareProgress") -> None:
            text = f"{state.tokens:,} tokens  {state.documents:,} documents"
            progress.update(task, completed=state.done_bytes, total=state.total_bytes, description=text)

        yield report


def _print_summary(out: Path, result: "PrepareResult") -> None:
    manifest = result.manifest
    for note in result.notes:
        say(f"note: {note}", sys.stderr)
    done = "was prepared before" if result.was_there else "is ready"
    say(f"{out} {done}: tokenizer {manifest.tokenizer}, vocabulary of {manifest.vocab_size:,}")
    for split, entries in manifest.splits.items():
        say(f"  {split:<6}{manifest.num_tokens(split):>16,} tokens in {len(entries):,} shard(s)")
    print(f"  documents: {sum(map(manifest.num_documents, manifest.splits)):,}")
    if manifest.num_tokens("val") == 0:
        print("note: there is no validation text; use a larger --val-fraction to have some", file=sys.stderr)
    token, share = manifest.commonest.token, manifest.commonest.share
    say(f"  most frequent token: {token} ({result.tokenizer.decode([token])!r}), {share:.1%} of all")


def _num_cores() -> int:
    # Those that this process may use, where the system can tell.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
