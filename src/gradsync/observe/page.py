"""The report page: one or several runs on one self-contained page that works offline.

Python gathers plain numbers and texts from run folders and puts them as JSON into ``page.html``, whose
script draws them. Nothing is fetched, and nothing in a run (a sample, a path) can become markup.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from gradsync.observe.metrics import read_metrics, read_objects

MAX_POINTS = 2000
_MAX_SAMPLES = 40
_CURVES = ("loss", "val_loss", "lr", "grad_norm", "tokens_per_s", "mfu", "accuracy", "accuracy_normalised")
_PLACE = "/*DATA*/"
TIMELINE_FILE = "timeline.json"
"""The recording of a traced run in its folder; see ``trace``."""
_PARTS = {"ranks", "buckets", "groups", "times", "verdict"}


@dataclass(frozen=True)
class RunReport:
    """What the page shows of one run."""

    name: str
    steps: int
    curves: dict[str, list[tuple[int, float]]]
    samples: list[tuple[int, str]]
    config: dict[str, Any]
    starts: list[dict[str, Any]]
    skipped: list[int]
    timeline: dict[str, Any] | None = None
    late: list[tuple[int, int, str, float]] = field(default_factory=list)
    """When a rank held the others up: step, rank, phase, seconds a step."""


def read_run(folder: Path, name: str, config: dict[str, Any]) -> RunReport:
    """Gather a run from its folder; ``config`` are its options. What is damaged in its records is left out."""
    records = list(read_metrics(folder / "metrics.jsonl"))
    return RunReport(
        name=name,
        steps=records[-1]["step"] if records else 0,
        curves={curve: thin_out(_points(records, curve)) for curve in _CURVES},
        samples=_samples(folder / "samples"),
        config=config,
        starts=list(read_objects(folder / "starts.jsonl")),
        skipped=[record["step"] for record in records if record.get("skipped")],
        timeline=_timeline(folder / TIMELINE_FILE),
        late=[
            (record["step"], late["rank"], late["phase"], late["delay_s"])
            for record in records
            if isinstance(late := record.get("late"), dict) and late.keys() >= {"rank", "phase", "delay_s"}
        ],
    )


def render(runs: Sequence[RunReport]) -> str:
    """Return the page as HTML."""
    return fill("page.html", {_PLACE: as_script_data([asdict(run) for run in runs])})


def render_recording(recording: Mapping[str, Any], name: str) -> str:
    """Return a page about a recording alone (see ``trace``)."""
    title = escape(f"{name}: a few steps of {len(recording['ranks'])} rank(s)")
    return fill("timeline.html", {"/*TITLE*/": title, _PLACE: as_script_data(recording)})


def as_script_data(data: Any) -> str:
    """Return data as JSON that can stand inside a script element, where only these could end it or begin a comment."""
    text = json.dumps(plain(data), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def plain(data: Any) -> Any:
    """Return what JSON can spell of data: no number for one that is not finite, text for what it doesn't know."""
    if isinstance(data, Mapping):
        return {str(key): plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [plain(each) for each in data]
    if isinstance(data, float) and not math.isfinite(data):
        return None
    return data if isinstance(data, str | int | float | None) else str(data)


def fill(template: str, places: dict[str, str]) -> str:
    """Return a page of this package with the shared drawings, and with each place in it replaced."""
    shared = {
        "/*BASE CSS*/": "base.css",
        "/*TIMELINE CSS*/": "timeline.css",
        "/*TIMELINE JS*/": "timeline.js",
    }
    values = {**{place: _resource(name) for place, name in shared.items()}, **places}
    page = _resource(template)
    assert all(place in page for place in places)
    # in one go: what is put in is not searched for places again
    return re.sub("|".join(map(re.escape, values)), lambda found: values[found[0]], page)


def _resource(name: str) -> str:
    return resources.files("gradsync.observe").joinpath(name).read_text(encoding="utf-8")


def thin_out(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return at most ``MAX_POINTS`` of the points: of each stretch the lowest and the highest, so no peak is lost."""
    if len(points) <= MAX_POINTS:
        return points
    stretch = -(-2 * len(points) // MAX_POINTS)
    kept: list[tuple[int, float]] = []
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        extremes = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        kept += sorted(extremes)
    return kept


def _points(records: Sequence[dict[str, Any]], curve: str) -> list[tuple[int, float]]:
    return [(record["step"], record[curve]) for record in records if isinstance(record.get(curve), int | float)]


def _samples(folder: Path) -> list[tuple[int, str]]:
    paths = sorted(path for path in folder.glob("step-*.txt") if path.stem.removeprefix("step-").isdecimal())
    if len(paths) > _MAX_SAMPLES:
        paths = [paths[i * (len(paths) - 1) // (_MAX_SAMPLES - 1)] for i in range(_MAX_SAMPLES)]
    return [
        (int(path.stem.removeprefix("step-")), path.read_text(encoding="utf-8", errors="replace")) for path in paths
    ]


def _timeline(path: Path) -> dict[str, Any] | None:
    """Return the recording in a file; None if there is none, or something else, which must not spoil the page."""
    try:
        recording = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    is_whole = isinstance(recording, dict) and recording.keys() >= _PARTS and bool(recording["ranks"])
    return recording if is_whole else None
