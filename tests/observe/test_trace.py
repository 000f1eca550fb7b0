"""The Chrome trace of a recording: one lane a rank, on one clock."""

import json

from recordings import make_recording

from gradsync.observe.trace import render_trace


def events(recording, phase=None):
    return [e for e in json.loads(render_trace(recording))["traceEvents"] if phase is None or e["ph"] == phase]


def test_every_rank_has_a_lane_with_its_name():
    names = {e["pid"]: e["args"]["name"] for e in events(make_recording(), "M") if e["name"] == "process_name"}
    assert names == {0: "rank 0 (here)", 1: "rank 1 (here)"}


def test_phases_of_all_ranks_are_on_rank_0s_clock():
    backward = [e for e in events(make_recording(), "X") if e["name"] == "backward"]
    # both ranks began at the same moment, which their clocks call 100 s and 5 s
    assert [(e["pid"], e["ts"], e["dur"], e["args"]["pass"]) for e in backward] == [
        (0, 30_000.0, 30_000.0, 3),
        (0, 100_000.0, 30_000.0, 4),
        (1, 30_000.0, 30_000.0, 3),
        (1, 100_000.0, 30_000.0, 4),
    ]


def test_buckets_begin_and_end_under_one_id_each_and_say_what_they_hold():
    recording = make_recording()
    begins, ends = events(recording, "b"), events(recording, "e")
    assert len({e["id"] for e in begins}) == len(begins) == 8
    assert [e["id"] for e in begins] == [e["id"] for e in ends]
    assert all(begin["ts"] <= end["ts"] for begin, end in zip(begins, ends, strict=True))
    assert begins[1]["args"] == {"waited_ms": 8.0, "bytes": 1024, "parameters": ["a", "b"]}
    assert [e["name"] for e in events(recording, "i")] == ["bucket 0 ready"] * 4


def test_a_bucket_that_was_not_seen_is_left_out():
    recording = make_recording()
    recording["ranks"][0]["passes"][0]["buckets"][0]["done_s"] = None
    assert len(events(recording, "b")) == 7


def test_a_recording_without_passes_is_a_trace_without_events():
    recording = make_recording()
    for rank in recording["ranks"]:
        rank["passes"] = []
    assert {e["ph"] for e in events(recording)} == {"M"}


def test_parts_of_a_step_and_buckets_of_a_ranks_own_have_their_places():
    recording = make_recording()
    first = recording["ranks"][0]
    first["passes"][0]["parts"] = [{"name": "forward 0", "start_s": 0.01, "end_s": 0.02}]
    first["buckets"] = [{**bucket, "num_bytes": 7} for bucket in recording["buckets"]]
    (part,) = [e for e in events(recording, "X") if e["name"] == "forward 0"]
    assert (part["pid"], part["ts"], part["dur"]) == (0, 10_000.0, 10_000.0)
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events(recording, "M") if e["name"] == "thread_name"}
    assert lanes[0, part["tid"]] == "stages compute"
    assert (1, part["tid"]) not in lanes
    assert {(e["pid"], e["args"]["bytes"]) for e in events(recording, "b")} == {(0, 7), (1, 4096), (1, 1024)}
