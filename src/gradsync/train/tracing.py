"""Recordings of the training loop itself: what every layout has, whatever engine runs inside.

A recording is plain JSON as the engine's own is (see ``ddp.recording``), with steps in place of passes. Inside a step
are the buckets of the engine where it runs over the data axis, and the micro-batches that a stage of a pipeline
computed. What ranks wait for inside torch's own collectives is not seen, and not told.
"""

import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from gradsync.comm.clocks import clock_offset
from gradsync.ddp.module import DistributedDataParallel
from gradsync.ddp.passes import RankTimes, median
from gradsync.ddp.recording import report_of
from gradsync.ddp.report import Straggler, find_straggler, milliseconds
from gradsync.parallel.replica import Replica
from gradsync.train.phases import BETWEEN, COMPUTE, DATA, OPTIMIZER, Step
from gradsync.train.ranks import Ranks

_WORTH_A_WORD = 0.02


def record_steps(ranks: Ranks, replica: Replica, steps: Sequence[Step]) -> dict[str, Any]:
    """Return a recording of some steps, the same on all ranks; collective."""
    engines = [_Engine(wrapper) for wrapper in replica.engines]
    mine: dict[str, Any] = {
        "rank": ranks.rank,
        "host": socket.gethostname(),
        "offset_s": clock_offset(ranks.host_group),
        "passes": [_with_insides(step, engines, replica) for step in steps],
        "buckets": [each for engine in engines for each in engine.buckets],
        "groups": [each for engine in engines for each in engine.groups],
        "own": own_times(steps),
        "step_s": median([step.total_s(*_phases_of(step)) for step in steps]),
    }
    everyone = ranks.gather(mine)
    times = [RankTimes(each["rank"], **each["own"]) for each in everyone]
    groups = {str(group): group for each in everyone for group in each["groups"]}
    return {
        "ranks": everyone,
        "times": [asdict(each) for each in times],
        "buckets": everyone[0]["buckets"],
        "groups": list(groups.values()),
        "findings": None,
        "verdict": _verdict(everyone, find_straggler(times, everyone[0]["step_s"])),
    }


def steps_of_all(ranks: Ranks, steps: Sequence[Step]) -> list[list[dict[str, Any]]]:
    """Return every rank's steps; collective."""
    return ranks.gather([step.as_json() for step in steps])


def late_rank(ranks: Ranks, steps: Sequence[Step]) -> Straggler | None:
    """Return who is late by what it does alone, before others can wait for it; collective."""
    everyone = ranks.gather((own_times(steps), median([step.total_s(*_phases_of(step)) for step in steps])))
    return find_straggler([RankTimes(rank, **own) for rank, (own, _) in enumerate(everyone)], everyone[0][1])


def own_times(steps: Sequence[Step]) -> dict[str, float]:
    """Return the median seconds of what a rank does by itself in a step.

    All ranks leave the vote on a step together; from there to the next forward nobody waits for anybody.
    """
    return {
        "data_s": median([step.total_s(DATA, BETWEEN) for step in steps]),
        "forward_s": 0.0,
        "backward_s": 0.0,
        "optimizer_s": median([step.total_s(OPTIMIZER) for step in steps]),
    }


class _Engine:
    """What the engine over the data axis has recorded of one module: a whole share of the model, or a stage."""

    def __init__(self, wrapper: DistributedDataParallel) -> None:
        report = report_of(wrapper.reducer, wrapper.reducer.timeline.recorded).as_json()
        self.buckets: list[dict[str, Any]] = report["buckets"]
        self.groups: list[dict[str, Any]] = report["groups"]
        self._passes: list[dict[str, Any]] = report["passes"]

    def inside(self, step: Step) -> Iterator[tuple[dict[str, Any], float]]:
        """Yield the passes whose collectives ran in a step, each with its begin in the step's time."""
        for record in self._passes:
            end_s = record["began_s"] + record["duration_s"]
            if step.began_ns * 1e-9 < end_s <= step.ended_ns * 1e-9:
                yield record, record["began_s"] - step.began_ns * 1e-9


def _with_insides(step: Step, engines: Sequence[_Engine], replica: Replica) -> dict[str, Any]:
    record, first_number = step.as_json(), 0
    for engine in engines:
        for inner, shift_s in engine.inside(step):
            record["buckets"] += [_shifted(each, first_number, shift_s) for each in inner["buckets"]]
            ends = [span["end_s"] + shift_s for span in inner["spans"] if span["phase"] == "backward"]
            record["local_s"] = max([record.get("local_s", 0.0), *ends])
        first_number += len(engine.buckets)
    began_s = step.began_ns * 1e-9
    record["parts"] = [
        {"name": name, "start_s": begin * 1e-9 - began_s, "end_s": end * 1e-9 - began_s}
        for name, begin, end in replica.computed
        if step.began_ns <= begin < step.ended_ns
    ]
    return record


def _shifted(times: dict[str, Any], first_number: int, shift_s: float) -> dict[str, Any]:
    moved = {
        name: None if times[name] is None else times[name] + shift_s for name in ("ready_s", "launched_s", "done_s")
    }
    return {**times, **moved, "number": times["number"] + first_number}


def _phases_of(step: Step) -> set[str]:
    """Those of every step: validations, checkpoints and samples come now and then."""
    return {phase for phase, _, _ in step.spans} - {"evaluation", "checkpoint", "sample"}


def _verdict(everyone: Sequence[dict[str, Any]], late: Straggler | None) -> str:
    parts = [f"a step takes {milliseconds(everyone[0]['step_s'])}", *_shares(everyone[0])]
    busy = [_computing_s(each) for each in everyone]
    if any(busy):
        each = ", ".join(milliseconds(seconds) for seconds in busy)
        parts.append(f"the ranks' stages compute {each} of it, in order of the ranks")
    if late is not None:
        parts.append(f"rank {late.rank} is late by {milliseconds(late.delay_s)} in {late.phase}")
    return "; ".join(parts)


def _shares(rank: dict[str, Any]) -> list[str]:
    found = []
    for phase in (COMPUTE, DATA, OPTIMIZER):
        seconds = [
            sum(span["end_s"] - span["start_s"] for span in record["spans"] if span["phase"] == phase)
            for record in rank["passes"]
        ]
        if median(seconds) > _WORTH_A_WORD * rank["step_s"]:
            found.append(f"{milliseconds(median(seconds))} {phase}")
    return [f"rank 0: {', '.join(found)}"] if found else []


def _computing_s(rank: dict[str, Any]) -> float:
    return median([sum(part["end_s"] - part["start_s"] for part in record["parts"]) for record in rank["passes"]])
