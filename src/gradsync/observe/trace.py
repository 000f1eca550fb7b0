"""A recording of passes as a Chrome trace: one process a rank, for chrome://tracing and ui.perfetto.dev.

A *recording* is plain JSON: ``ranks`` (each with ``rank``, ``host``, ``offset_s`` from its clock to rank 0's, and
``passes``), ``buckets``, ``groups``, ``times``, ``findings`` and ``verdict``.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

Recording = Mapping[str, Any]
Event = dict[str, Any]

_COMPUTE, _MARKS = 0, 1


def render_trace(recording: Recording) -> str:
    """Return the trace as JSON text."""
    return json.dumps(chrome_trace(recording), allow_nan=False)


def chrome_trace(recording: Recording) -> dict[str, Any]:
    """Return the trace as an object of the Chrome trace format; times are microseconds on rank 0's clock."""
    origin_s = min(
        (p["began_s"] + rank["offset_s"] for rank in recording["ranks"] for p in rank["passes"]), default=0.0
    )
    events: list[Event] = []
    for rank in recording["ranks"]:
        events += _lane_of(rank)
        for record in rank["passes"]:
            start_s = record["began_s"] + rank["offset_s"] - origin_s
            events += _events_of(rank["rank"], record, start_s, recording["buckets"])
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"verdict": recording["verdict"]}}


def _lane_of(rank: Mapping[str, Any]) -> Iterator[Event]:
    number = rank["rank"]
    name = f"rank {number} ({rank['host']})"
    yield {"ph": "M", "pid": number, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": number, "name": "process_sort_index", "args": {"sort_index": number}}
    for thread, label in ((_COMPUTE, "what the rank does"), (_MARKS, "buckets ready")):
        yield {"ph": "M", "pid": number, "tid": thread, "name": "thread_name", "args": {"name": label}}


def _events_of(rank: int, record: Mapping[str, Any], start_s: float, buckets: Any) -> Iterator[Event]:
    def at(seconds: float) -> float:
        return round((start_s + seconds) * 1e6, 3)

    for span in record["spans"]:
        length = round((span["end_s"] - span["start_s"]) * 1e6, 3)
        place = {"pid": rank, "tid": _COMPUTE, "ts": at(span["start_s"]), "dur": length}
        yield {"ph": "X", "name": span["phase"], "cat": "phase", "args": {"pass": record["number"]}, **place}
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


def _facts(times: Mapping[str, Any], number: int, buckets: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {} if times["wait_s"] is None else {"waited_ms": round(times["wait_s"] * 1e3, 3)}
    if number < len(buckets):
        facts["bytes"] = buckets[number]["num_bytes"]
        facts["parameters"] = [place["name"] for place in buckets[number]["parameters"]]
    return facts
