"""``gradsync eval``: how good a trained run is, on text or on completion tasks."""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gradsync.cli.options import new_parser
from gradsync.errors import ConfigError, DataError
from gradsync.observe.terminal import say
from gradsync.train.outline import check_texts
from gradsync.train.runfolder import check_trained

if TYPE_CHECKING:
    from gradsync.data.source import TokenSource
    from gradsync.train.trained import Trained

_DESCRIPTION = (
    "Evaluate a trained run: its loss on the text it held back, on other text (--data), or its accuracy on completion "
    "tasks (--hellaswag)."
)


def main(arguments: Sequence[str]) -> int:
    """Run ``gradsync eval`` and return its exit code."""
    parser = new_parser("eval", _DESCRIPTION)
    parser.option("run", str, None, "run folder, or one checkpoint in it")
    parser.option("--data", str | None, None, "text or prepared shards to take the loss on; 'stdlib' as in training")
    parser.option("--hellaswag", str | None, None, "JSON-lines file with ctx, endings and label")
    parser.option("--split", Literal["val", "train"], "val", "split of prepared shards, and of the run's own data")
    parser.option("--max-tokens", int | None, None, "tokens to take the loss on (default: all there are)")
    parser.option("--batch", int, 16, "sequences at once")
    parser.option("--checkpoint", Literal["newest", "best"], "newest", "which one to take")
    parser.option("--device", Literal["auto", "cpu", "cuda"], "auto", "where to compute")
    parser.option("--json", bool, False, "print one JSON object instead of lines")
    options = parser.parse_args(list(arguments))
    if options.batch < 1 or (options.max_tokens is not None and options.max_tokens < 1):
        raise ConfigError("--batch and --max-tokens must be at least 1")
    # While that costs nothing: torch takes seconds to import.
    check_trained(Path(options.run))
    check_texts(options.data, options.hellaswag)

    from gradsync.train.trained import load_trained

    trained = load_trained(Path(options.run), options.checkpoint, options.device)
    say(f"from {trained.checkpoint}", sys.stderr)
    results: dict[str, Any] = {"checkpoint": str(trained.checkpoint), "step": trained.step}
    if options.hellaswag is not None:
        results |= _accuracy(trained, Path(options.hellaswag))
    if options.data is not None or options.hellaswag is None:
        results |= _loss(trained, options)
    _print(results, options.json)
    return 0


@dataclass(frozen=True)
class _Text:
    source: "TokenSource"
    name: str


def _loss(trained: "Trained", options: Any) -> dict[str, Any]:
    from gradsync.data.loader import evaluation_batches
    from gradsync.parallel.replica import replica_of
    from gradsync.train.evaluate import evaluate
    from gradsync.train.ranks import Alone

    text = _text(trained, options)
    context = trained.model.config.context
    limit = None if options.max_tokens is None else -(-options.max_tokens // context)
    batches = evaluation_batches(text.source, context, 0, 1, options.batch, max_sequences=limit)
    result = evaluate(replica_of(trained.model), batches, Alone(), trained.device)
    return {"data": text.name, "loss": result.loss, "perplexity": _perplexity(result.loss), "tokens": result.tokens}


def _perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _text(trained: "Trained", options: Any) -> _Text:
    """Return what the options mean: all of a text, one split of shards or of the run's own data."""
    from gradsync.data.corpus import load_corpus
    from gradsync.data.manifest import MANIFEST
    from gradsync.train.runfolder import saved_option

    is_own = options.data is None
    data = saved_option(trained.run, "data", str) if is_own else options.data
    if is_own and data != "stdlib" and not Path(data).exists():
        raise DataError(f"{trained.run} was trained on {data}, which is not here; name the text with --data")
    is_whole = not is_own and data != "stdlib" and not (Path(data) / MANIFEST).is_file()
    fraction = 0.0 if is_whole else saved_option(trained.run, "val_fraction", float)
    corpus = load_corpus(data, trained.tokenizer.name, fraction)
    if is_whole:
        return _Text(corpus.train, corpus.name)
    split = corpus.val if options.split == "val" else corpus.train
    return _Text(split, f"{corpus.name}, {options.split}")


def _accuracy(trained: "Trained", path: Path) -> dict[str, Any]:
    from gradsync.parallel.replica import replica_of
    from gradsync.train.completions import completion_accuracy, read_examples
    from gradsync.train.ranks import Alone

    replica = replica_of(trained.model)
    found = completion_accuracy(replica, trained.tokenizer, read_examples(path), Alone(), trained.device)
    return {"accuracy": found.by_sum, "accuracy_normalised": found.by_mean, "examples": found.examples}


def _print(results: dict[str, Any], as_json: bool) -> None:
    if as_json:
        # JSON has no spelling for what is not finite.
        finite = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in results.items()}
        print(json.dumps(finite, allow_nan=False))
        return
    if "examples" in results:
        print(f"accuracy {results['accuracy']:.4f}, length-normalised {results['accuracy_normalised']:.4f}", end="")
        print(f" ({results['examples']:,} examples)")
    if "loss" in results:
        print(f"loss {results['loss']:.4f} nats per token, perplexity {results['perplexity']:.2f}", end="")
        say(f" ({results['tokens']:,} tokens of {results['data']})")
