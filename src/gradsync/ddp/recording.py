"""From a reducer's timeline to a report of this rank, and to a recording of all ranks.

A *recording* is plain JSON, for pages and traces: ``ranks`` (each with ``rank``, ``host``, ``offset_s`` from its
clock to rank 0's, and ``passes``), ``buckets``, ``groups``, ``times``, ``findings`` and ``verdict``.
"""

import json
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gradsync.comm.clocks import clock_offset
from gradsync.comm.groups import exchange_text
from gradsync.ddp.passes import map_of, rank_times, record_of
from gradsync.ddp.report import Group, Report
from gradsync.ddp.timeline import RawPass

if TYPE_CHECKING:
    from gradsync.ddp.reducer import Reducer

_CPU = torch.device("cpu")


def report_of(reducer: "Reducer", passes: Sequence[RawPass] | None = None) -> Report:
    """Return what is known of these passes, by default of the last ones."""
    passes = list(reducer.timeline.passes) if passes is None else passes
    told = [raw.telemetry for raw in passes if raw.telemetry]
    return Report(
        rank=reducer.rank,
        world_size=reducer.world_size,
        passes=tuple(record_of(raw, reducer.timeline.is_on_host) for raw in passes),
        buckets=map_of(reducer.plan),
        groups=tuple(_groups(reducer)),
        # the first windows hold what happens once: compilation, the first touch of memory, the optimizer's state
        ranks=rank_times(told[2:] or told),
    )


def record_all(reducer: "Reducer") -> dict[str, Any]:
    """Return a recording of what was recorded exactly, the same on all ranks; collective."""
    report = report_of(reducer, reducer.timeline.recorded)
    facts = report.as_json()
    mine = {"rank": reducer.rank, "host": socket.gethostname(), "offset_s": 0.0, "passes": facts["passes"]}
    if reducer.world_size == 1:
        everyone = [mine]
    else:
        group = reducer.control_group
        mine["offset_s"] = clock_offset(group)
        everyone = [json.loads(text) for text in exchange_text(group, json.dumps(mine), _CPU)]
    shared = ("buckets", "groups", "findings", "verdict")
    return {"ranks": everyone, "times": facts["ranks"], **{name: facts[name] for name in shared}}


def _groups(reducer: "Reducer") -> list[Group]:
    used: dict[int, tuple[list[str], Any]] = {}
    for carries, group in (
        ("buckets", reducer.group),
        ("control words", reducer.control_group),
    ):
        used.setdefault(id(group), ([], group))[0].append(carries)
    return [
        Group(" and ".join(carries), _backend(group), tuple(dist.get_process_group_ranks(group)))
        for carries, group in used.values()
    ]


def _backend(group: Any) -> str:
    return str(dist.get_backend(group))
