"""A recording of passes as a Chrome trace: one process a rank, for chrome://tracing and ui.perfetto.dev.

A *recording* is plain JSON: ``ranks`` (each with ``rank``, ``host``, ``offset_s`` from its clock to rank 0's, and
``passes``), ``buckets``, ``groups``, ``times``, ``findings`` and ``verdict``. A rank may have ``buckets`` of its own,
where it holds a part of the model; ``steps``, the phases of a training loop around the passes; and a pass may have
``parts``, what of its computing was seen in pieces.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Recording = Mapping[str, Any]
Event = dict[str, Any]

_COMPUTE, _MARKS, _LOOP, _PARTS = range(4)
_LANES = {_COMPUTE: "what the rank does", _MARKS: "buckets ready", _LOOP: "training loop", _PARTS: "stages compute"}


def render_trace(recording: Recording) -> str:
    """Return the trace as JSON text."""
    return json.dumps(chrome_trace(recording), allow_nan=False)


def chrome_trace(recording: Recording) -> dict[str, Any]:
    """Return the trace as an object of the Chrome trace format; times are microseconds on rank 0's clock."""
    windows = ((rank, each) for rank in recording["ranks"] for each in (*rank["passes"], *rank.get("steps", ())))
    origin_s = min((each["began_s"] + rank["offset_s"] for rank, each in windows), default=0.0)
    events: list[Event] = []
    for rank in recording["ranks"]:
        events += _lane_of(rank)
        for record in rank["passes"]:
            start_s = record["began_s"] + rank["offset_s"] - origin_s
            events += _events_of(rank["rank"], record, start_s, rank.get("buckets", recording["buckets"]))
        for step in rank.get("steps", ()):
            start_s = step["began_s"] + rank["offset_s"] - origin_s
            events += _bars(rank["rank"], _LOOP, "step", step["number"], start_s, step["spans"])
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"verdict": recording["verdict"]}}


def _lane_of(rank: Mapping[str, Any]) -> Iterator[Event]:
    number = rank["rank"]
    name = f"rank {number} ({rank['host']})"
    yield {"ph": "M", "pid": number, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": number, "name": "process_sort_index", "args": {"sort_index": number}}
    is_used = {
        _COMPUTE: True,
        _MARKS: True,
        _LOOP: bool(rank.get("steps")),
        _PARTS: any(record.get("parts") for record in rank["passes"]),
    }
    for thread, label in _LANES.items():
        if not is_used[thread]:
            continue
        yield {"ph": "M", "pid": number, "tid": thread, "name": "thread_name", "args": {"name": label}}


def _events_of(rank: int, record: Mapping[str, Any], start_s: float, buckets: Any) -> Iterator[Event]:
    def at(seconds: float) -> float:
        return round((start_s + seconds) * 1e6, 3)

    yield from _bars(rank, _COMPUTE, "pass", record["number"], start_s, record["spans"])
    yield from _bars(rank, _PARTS, "pass", record["number"], start_s, record.get("parts", ()))
    for times in record["buckets"]:
        number = times["number"]
        if times["ready_s"] is not None:
            mark = {"pid": rank, "tid": _MARKS, "ts": at(times["ready_s"])}
            yield {"ph": "i", "s": "t", "name": f"bucket {number} ready", "cat": "ready", **mark}
        if times["launched_s"] is None or times["done_s"] is None:
            continue
        common = {"name": f"bucket {number}", "cat": "communication", "pid": rank, "tid": _COMPUTE}
        common["id"] = f"{rank}.{record['number']}.{number}"
        yield {**common, "ph": "b", "ts": at(times["launched_s"]), "args": _facts(times, number, buckets)}
        yield {**common, "ph": "e", "ts": at(max(times["done_s"], times["launched_s"]))}


def _bars(
    rank: int, lane: int, what: str, number: int, start_s: float, spans: Sequence[Mapping[str, Any]]
) -> Iterator[Event]:
    for span in spans:
        length = round((span["end_s"] - span["start_s"]) * 1e6, 3)
        place = {"pid": rank, "tid": lane, "ts": round((start_s + span["start_s"]) * 1e6, 3), "dur": length}
        name = span["phase"] if "phase" in span else span["name"]
        yield {"ph": "X", "name": name, "cat": "phase", "args": {what: number}, **place}


def _facts(times: Mapping[str, Any], number: int, buckets: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {} if times["wait_s"] is None else {"waited_ms": round(times["wait_s"] * 1e3, 3)}
    if number < len(buckets):
        facts["bytes"] = buckets[number]["num_bytes"]
        facts["parameters"] = [place["name"] for place in buckets[number]["parameters"]]
    return facts
