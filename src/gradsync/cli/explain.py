"""``gradsync explain``: a page that walks through a few real steps of data-parallel training."""

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gradsync import __version__
from gradsync.cli.local_ranks import run_ranks
from gradsync.cli.options import check_can_be_written, check_model, new_parser
from gradsync.comm.launchers import adopt
from gradsync.errors import ConfigError
from gradsync.observe.explain_page import LANGUAGES, render_explanation
from gradsync.observe.terminal import say

_DESCRIPTION = (
    "Run a few real steps on several processes and write a page that explains, with this run's own numbers, what "
    "data-parallel training does: broadcast, buckets, hooks, all-reduce, no_sync, unused parameters, and where the "
    "time goes."
)
_NAMES = {"toy": "SimpleModel", "gpt": "a small GPT"}


def main(arguments: Sequence[str]) -> int:
    """Run ``gradsync explain`` and return its exit code."""
    parser = new_parser("explain", _DESCRIPTION)
    parser.option(
        "--model", str, "toy", "toy, gpt, or MODULE:FUNCTION that returns (module, batch) or (module, batch, loss)"
    )
    parser.option("--nproc", int, 2, "processes; at least 2")
    parser.option("--steps", int, 8, "steps that are recorded; at least 3")
    parser.option("--backend", str, "auto", "process group backend: auto, gloo, nccl, shm, ...")
    parser.option("--out", str, "explain.html", "page to write")
    parser.option("--lang", str, "en", f"language of the page: {', '.join(LANGUAGES)}")
    options = parser.parse_args(list(arguments))
    _check(options)
    out = Path(options.out)
    story = _story(options, shlex.join(["gradsync", "explain", *arguments]))
    try:
        out.write_text(render_explanation(story, options.lang), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}") from error
    say(story["recording"]["verdict"])
    say(str(out))
    return 0


def _check(options: Any) -> None:
    place = adopt(os.environ)
    if place is not None:
        raise ConfigError(
            f"it starts its own processes (--nproc), but {place.launcher} has started this one; start it alone"
        )
    if options.lang not in LANGUAGES:
        raise ConfigError(f"--lang is {options.lang!r}; expected one of {', '.join(LANGUAGES)}")
    if options.nproc < 2:
        raise ConfigError(f"--nproc is {options.nproc}; it takes at least 2 processes to synchronise anything")
    if options.steps < 3:
        raise ConfigError(f"--steps is {options.steps}; the engine learns in the first two, so take at least 3")
    if options.model not in _NAMES and ":" not in options.model:
        raise ConfigError(f"--model is {options.model!r}; expected toy, gpt or MODULE:FUNCTION")
    if options.model not in _NAMES:
        check_model(options.model)
    check_can_be_written("--out", options.out)


def _story(options: Any, command: str) -> dict[str, Any]:
    """Run the ranks, and tell of all of them together."""
    import torch

    from gradsync.cli.explain_job import ExplainJob, explain_on_rank

    job = ExplainJob(options.model, options.steps, options.backend)
    by_rank = run_ranks(explain_on_rank, options.nproc, job)
    found = [by_rank[rank] for rank in range(options.nproc)]
    first = found[0]
    recording = _with_gradients(first["recording"], [rank["arrivals"] for rank in found])
    return {
        "model": _NAMES.get(options.model, options.model),
        "command": command,
        "version": __version__,
        "torch": torch.__version__,
        "nproc": options.nproc,
        "steps": options.steps,
        "backend": recording["groups"][0]["backend"],
        "recording": recording,
        "processes": [rank["process"] for rank in found],
        "last_losses": [rank["last_loss"] for rank in found],
        "average": [rank["average"] for rank in found],
        "average_pass": first["average_pass"],
        "last_pass": recording["ranks"][0]["passes"][-1]["number"],
        "order": _order(recording["ranks"][0]["passes"][-1]),
        "no_sync": {"num_passes": first["no_sync"]["num_passes"], "rows": [r["no_sync"]["row"] for r in found]},
        "unused": {
            "lonely": "only_on_rank_0",
            "spare": "used_nowhere",
            "lonely_used": first["unused"]["lonely_used"],
            "spare_used": first["unused"]["spare_used"],
            "rows": [rank["unused"]["row"] for rank in found],
        },
        **{name: first[name] for name in ("num_parameters", "num_tensors", "cap_bytes", "shown")},
    }


def _with_gradients(recording: dict[str, Any], arrivals: Sequence[Sequence[Sequence[Any]]]) -> dict[str, Any]:
    """Put into each pass when the gradients arrived, in seconds since its window began."""
    for rank, of_rank in zip(recording["ranks"], arrivals, strict=True):
        for record, moments in zip(rank["passes"], of_rank, strict=True):
            record["gradients"] = [{"name": name, "at_s": at - record["began_s"]} for name, at in moments]
    return recording


def _order(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return which gradients of a pass came first and last, and how many buckets left early."""
    backward = [span for span in record["spans"] if span["phase"] == "backward"][-1]
    first, last = record["gradients"][0], record["gradients"][-1]
    return {
        "first": first["name"],
        "first_s": first["at_s"] - backward["start_s"],
        "last": last["name"],
        "last_s": last["at_s"] - backward["start_s"],
        "num_early": sum(1 for b in record["buckets"] if b["launched_s"] and b["launched_s"] < backward["end_s"]),
    }
