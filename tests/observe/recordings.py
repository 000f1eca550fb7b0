"""A recording made by hand, for pages and traces: two ranks, two buckets, two passes."""

import copy
from typing import Any


def make_recording(name: str = "layer.weight") -> dict[str, Any]:
    buckets = [
        {"number": 0, "num_bytes": 4096, "dtype": "float32", "parameters": [_place(name, 4096)]},
        {"number": 1, "num_bytes": 1024, "dtype": "float32", "parameters": [_place("a", 1000), _place("b", 24, 1000)]},
    ]
    straggler = {"rank": 1, "phase": "data", "delay_s": 0.012}
    findings = {
        "step_s": 0.1,
        "exposed_s": 0.0019,
        "communication_s": 0.006,
        "hidden_s": 0.0041,
        "worst_bucket": 1,
        "worst_share": 0.61,
        "worst_parameter": name,
        "straggler": straggler,
    }
    times = [_times(0, 0.001), _times(1, 0.013)]
    return {
        "ranks": [_rank(0, 100.0, 0.0), _rank(1, 5.0, 95.0)],
        "buckets": buckets,
        "groups": [{"carries": "buckets and control words", "backend": "gloo", "ranks": [0, 1]}],
        "times": times,
        "findings": findings,
        "verdict": f"4.1 ms of 6.0 ms communication hidden; the last bucket holds {name}",
    }


def _place(name: str, size: int, offset: int = 0) -> dict[str, Any]:
    return {"name": name, "num_bytes": size, "offset_bytes": offset}


def _times(rank: int, data_s: float) -> dict[str, Any]:
    return {"rank": rank, "data_s": data_s, "forward_s": 0.02, "backward_s": 0.03, "optimizer_s": 0.002}


def _rank(rank: int, clock_s: float, offset_s: float) -> dict[str, Any]:
    spans = [
        {"phase": phase, "start_s": start, "end_s": end}
        for phase, start, end in [
            ("data", 0, 0.01),
            ("forward", 0.01, 0.03),
            ("backward", 0.03, 0.06),
            ("finish", 0.06, 0.07),
        ]
    ]
    buckets = [
        {"number": 0, "ready_s": 0.04, "launched_s": 0.041, "done_s": 0.05, "wait_s": 0.0},
        {"number": 1, "ready_s": None, "launched_s": 0.061, "done_s": 0.069, "wait_s": 0.008},
    ]
    record = {"number": 3, "began_s": clock_s, "duration_s": 0.07, "is_exact": True, "spans": spans, "buckets": buckets}
    second = {**copy.deepcopy(record), "number": 4, "began_s": clock_s + 0.07}
    return {"rank": rank, "host": "here", "offset_s": offset_s, "passes": [record, second]}
