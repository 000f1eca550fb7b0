"""The tables that ``gradsync bench`` prints, and the results that they show."""

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gradsync.bench.collectives import CollectiveTiming
    from gradsync.bench.rounds import Timing

_BASELINE = "torch/gloo"


@dataclass
class Result:
    """The contestants' timings on one workload."""

    workload: str
    nproc: int
    timings: "list[Timing]"
    peak_bytes: dict[str, int]

    def as_json(self) -> dict[str, Any]:
        """Return the raw samples."""
        return {
            "workload": self.workload,
            "nproc": self.nproc,
            "step_s": {t.contestant.name: t.step_s for t in self.timings},
            "exposed_s": {t.contestant.name: t.exposed_s for t in self.timings},
            "peak_bytes": self.peak_bytes,
        }


def print_table(result: Result) -> None:
    """Print the medians of one workload, and their ratios to torch's on gloo."""
    from rich.console import Console
    from rich.table import Table

    by_name = {t.contestant.name: t for t in result.timings}
    bare, baseline = by_name["bare"], by_name.get(_BASELINE)
    table = Table(title=f"{result.workload}: {result.nproc} processes, medians of {len(bare.step_s)} rounds")
    table.add_column("", no_wrap=True)
    columns = ["step", "sync cost", "exposed", f"step / {_BASELINE}", f"sync / {_BASELINE}"]
    for column in columns + (["peak memory"] if result.peak_bytes else []):
        table.add_column(column, justify="right")
    for timing in result.timings:
        row = [timing.contestant.name, milliseconds(timing.median_s), milliseconds(timing.median_s - bare.median_s)]
        row.append("" if timing.exposed_s is None else milliseconds(timing.exposed_s))
        row += [_ratio(timing, baseline), _sync_ratio(timing, baseline, bare)]
        if result.peak_bytes:
            row.append(f"{result.peak_bytes[timing.contestant.name] / 2**20:,.0f} MiB")
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    if baseline is not None:
        print(f"step / {_BASELINE} is the median of the rounds' ratios, and not the ratio of the two medians")


def _ratio(timing: "Timing", baseline: "Timing | None") -> str:
    """Median of the ratios round by round: what drifts in the machine's speed cancels out."""
    if baseline is None:
        return ""
    return f"{statistics.median(a / b for a, b in zip(timing.step_s, baseline.step_s, strict=True)):.3f}"


def _sync_ratio(timing: "Timing", baseline: "Timing | None", bare: "Timing") -> str:
    if baseline is None or baseline.median_s <= bare.median_s:
        return ""
    return f"{(timing.median_s - bare.median_s) / (baseline.median_s - bare.median_s):.3f}"


def milliseconds(seconds: float) -> str:
    """Return seconds as text."""
    return f"{seconds * 1e3:.3f} ms"


def print_collectives(timings: "Sequence[CollectiveTiming]", nproc: int) -> None:
    """Print the medians of single collectives, the backends side by side."""
    from rich.console import Console
    from rich.table import Table

    backends = list(dict.fromkeys(t.backend for t in timings))
    table = Table(title=f"collectives: {nproc} processes, medians")
    for column in ("operation", "size", *backends, *(f"{backends[0]} / {b}" for b in backends[1:])):
        table.add_column(column, justify="left" if column == "operation" else "right")
    rows: dict[tuple[str, int], dict[str, float]] = {}
    for timing in timings:
        rows.setdefault((timing.operation, timing.num_bytes), {})[timing.backend] = timing.median_s
    for (operation, num_bytes), medians in rows.items():
        factors = [f"{medians[backends[0]] / medians[b]:.1f}x" for b in backends[1:]]
        table.add_row(operation, _size(num_bytes), *(milliseconds(medians[b]) for b in backends), *factors)
    Console(width=None if sys.stdout.isatty() else 110).print(table)


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 2**20 else f"{num_bytes >> 10} KiB"
