"""``gradsync bench``: the same training step under different engines, side by side, in one run."""

import json
import os
import platform
import statistics
from collections.abc import Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradsync.cli.bench_tables import Result, milliseconds, print_collectives, print_table
from gradsync.cli.local_ranks import run_ranks
from gradsync.cli.options import Parser, check_can_be_written, check_model, new_parser
from gradsync.comm.launchers import adopt
from gradsync.errors import ConfigError

if TYPE_CHECKING:
    from gradsync.bench.rounds import Contestant, Timing

_DESCRIPTION = (
    "Time one training step without synchronisation, with torch's DistributedDataParallel and with gradsync's, in "
    "alternating rounds of one run. 'gradsync bench collectives' times single collectives, "
    "'gradsync bench recording' the cost of recording."
)
_WORKLOADS = ("toy", "many", "mlp", "gpt-small", "gpt2")
_LARGE = ("gpt-small", "gpt2")
_ISOLATED_STEPS = 3


def main(arguments: Sequence[str]) -> int:
    """Run ``gradsync bench`` and return its exit code."""
    if _speaks():
        return _main(arguments)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        return _main(arguments)


def _main(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] == "collectives":
        return _main_collectives(arguments[1:])
    if arguments and arguments[0] == "recording":
        return _main_recording(arguments[1:])
    parser = new_parser("bench", _DESCRIPTION)
    parser.option("--workload", str, ",".join(_WORKLOADS[:3]), f"which, by commas: {', '.join(_WORKLOADS)}, or 'all'")
    parser.option(
        "--model",
        str | None,
        None,
        "MODULE:FUNCTION that returns (module, batch) or (module, batch, loss); loss(module, batch)",
    )
    _add_common(parser)
    parser.option(
        "--only", str | None, None, "contestants by their names in the table, by commas: bare,torch/gloo,gradsync/shm"
    )
    parser.option("--threads-variant", bool, False, "also the older way: one process with a thread a replica")
    parser.option(
        "--memory", bool, False, "also measure the peak memory of every contestant, in processes of their own"
    )
    parser.option(
        "--isolate",
        bool,
        False,
        "time every contestant in processes of its own, started anew in each round, so that large models do not "
        "compete for memory; always done for gpt-small and gpt2",
    )
    given = _given(parser, arguments)
    if given.model is not None:
        check_model(given.model)
    if given.isolate and adopt(os.environ) is not None:
        raise ConfigError("--isolate starts processes anew in each round; under a launcher these are the launcher's")
    results = []
    for workload in _chosen_workloads(given):
        results.append(_bench_one(workload, given))
        print_table(results[-1])
    _write_json(given.json, {"workloads": [r.as_json() for r in results]})
    return 0


def _given(parser: Parser, arguments: Sequence[str]) -> Any:
    given = parser.parse_args(list(arguments))
    if given.nproc < 1 or given.rounds < 1:
        raise ConfigError("--nproc and --rounds must be at least 1")
    if _speaks():
        check_can_be_written("--json", given.json)
    return given


def _speaks() -> bool:
    """Whether this process answers to the user: alone, or as the first of the ranks of a launcher."""
    place = adopt(os.environ)
    return place is None or place.rank == 0


def _measure(entry: Any, given: Any, job: Any) -> dict[int, Any]:
    """Run on processes of this machine, or as one of the ranks that a launcher has started."""
    place = adopt(os.environ)
    if place is None:
        return run_ranks(entry, given.nproc, job)
    given.nproc = place.world_size
    return {0: entry(job)}


def _add_common(parser: Any) -> None:
    parser.option("--nproc", int, 2, "processes; under torchrun, srun or mpiexec those that it has started")
    parser.option("--backend", str | None, None, "backends, by commas (default: those this machine has)")
    parser.option("--rounds", int, 15, "rounds; the table shows medians")
    parser.option("--json", str | None, None, "file for the raw samples")


def _chosen_workloads(given: Any) -> list[str]:
    if given.model is not None:
        return [given.model]
    chosen = list(_WORKLOADS) if given.workload == "all" else given.workload.split(",")
    unknown = [name for name in chosen if name not in _WORKLOADS]
    if unknown:
        raise ConfigError(f"--workload {unknown[0]!r} is unknown; there are {', '.join(_WORKLOADS)}, and 'all'")
    return chosen


def _bench_one(workload: str, given: Any) -> Result:
    contestants = _chosen(_contestants(_backends(given.backend), given.threads_variant), given.only)
    isolates = given.isolate or workload in _LARGE
    if isolates and adopt(os.environ) is None:
        return _bench_isolated(workload, contestants, given)
    timings = _time(contestants, workload, given.rounds, given)[0]
    peaks = {}
    if given.memory:
        for contestant in contestants:
            peaks[contestant.name] = _peak(_time((contestant,), workload, 1, given, measures_memory=True))
    return Result(workload, given.nproc, timings, peaks)


def _bench_isolated(workload: str, contestants: "tuple[Contestant, ...]", given: Any) -> Result:
    """Alternate as ever, but between processes: a sample is the median of a few steps of a fresh one."""
    from gradsync.bench.rounds import Timing

    timings = [Timing(contestant) for contestant in contestants]
    exposed: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    peaks: dict[str, int] = {}
    for number in range(given.rounds):
        for timing in timings:
            name, is_last = timing.contestant.name, number == given.rounds - 1
            alone = _time((timing.contestant,), workload, _ISOLATED_STEPS, given, given.memory and is_last)
            timing.step_s.append(alone[0][0].median_s)
            if alone[0][0].exposed_s is not None:
                exposed[name].append(alone[0][0].exposed_s)
            if given.memory and is_last:
                peaks[name] = _peak(alone)
    for timing in timings:
        if exposed[timing.contestant.name]:
            timing.exposed_s = statistics.median(exposed[timing.contestant.name])
    return Result(workload, given.nproc, timings, peaks)


def _time(
    contestants: "tuple[Contestant, ...]", workload: str, num_rounds: int, given: Any, measures_memory: bool = False
) -> "dict[int, list[Timing]]":
    """Return the timings by rank, as far as they are known here."""
    from gradsync.bench.job import BenchJob, run_bench

    return _measure(run_bench, given, BenchJob(contestants, workload, num_rounds, given.model, measures_memory))


def _peak(timings: "dict[int, list[Timing]]") -> int:
    return max(of_rank[0].peak_bytes or 0 for of_rank in timings.values())


def _contestants(backends: Sequence[str], with_threads: bool) -> "tuple[Contestant, ...]":
    from gradsync.bench.rounds import Contestant
    from gradsync.bench.variants import Variant

    return (
        Contestant(Variant.BARE),
        *(Contestant(v, b) for b in backends for v in (Variant.TORCH, Variant.GRADSYNC, Variant.ZERO)),
        *([Contestant(Variant.THREADS)] if with_threads else []),
    )


def _chosen(contestants: "tuple[Contestant, ...]", only: str | None) -> "tuple[Contestant, ...]":
    if only is None:
        return contestants
    names = only.split(",")
    by_name = {contestant.name: contestant for contestant in contestants}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise ConfigError(f"--only {unknown[0]!r} is unknown; there are {', '.join(by_name)}")
    return tuple(by_name[name] for name in dict.fromkeys(["bare", *names]))


def _backends(given: str | None) -> list[str]:
    if given is not None:
        from gradsync.comm import mpi
        from gradsync.comm.backends import choose_backend

        names = [choose_backend(name).name for name in given.split(",")]
        place = adopt(os.environ)
        if mpi.NAME in names and (place is None or place.launcher != "mpiexec"):
            raise ConfigError(
                "--backend mpi needs ranks that mpiexec has started: mpiexec -n 2 gradsync bench --backend mpi"
            )
        return names
    import torch

    from gradsync.comm import shm

    if torch.cuda.is_available():
        return ["nccl"]
    return ["gloo"] if shm.is_available() else ["gloo", shm.NAME]


def _main_collectives(arguments: Sequence[str]) -> int:
    parser = new_parser("bench collectives", "Time single collectives over sizes from 1 KiB to 256 MiB.")
    _add_common(parser)
    parser.option("--max-mib", float, 256.0, "largest size in MiB")
    given = _given(parser, arguments)
    from gradsync.bench.collectives import MIB, OPERATIONS, SIZES
    from gradsync.bench.job import CollectivesJob, run_collectives

    sizes = tuple(size for size in SIZES if size <= given.max_mib * MIB)
    if not sizes:
        raise ConfigError(f"--max-mib {given.max_mib:g} is less than the smallest size, {min(SIZES) / MIB:g}")
    job = CollectivesJob(tuple(_backends(given.backend)), sizes, OPERATIONS, given.rounds)
    result = _measure(run_collectives, given, job)[0]
    print_collectives(result.timings, given.nproc)
    if any(t.backend.endswith("*") for t in result.timings):
        print("* tensors in memory of their own; without the star they lie in the memory that the ranks share")
    print(f"copying in memory, all ranks at once: {result.copy_bytes_per_s / 1e9:.1f} GB/s a rank")
    rows = [
        {"operation": t.operation, "backend": t.backend, "bytes": t.num_bytes, "call_s": t.call_s}
        for t in result.timings
    ]
    _write_json(given.json, {"collectives": rows, "copy_bytes_per_s": result.copy_bytes_per_s, "nproc": given.nproc})
    return 0


def _main_recording(arguments: Sequence[str]) -> int:
    parser = new_parser(
        "bench recording", "Time a step without a recorder, with the one that is always on, and exactly."
    )
    parser.option("--workload", str, "mlp", f"which: {', '.join(_WORKLOADS)}")
    _add_common(parser)
    given = _given(parser, arguments)
    if given.workload not in _WORKLOADS:
        raise ConfigError(f"--workload {given.workload!r} is unknown; there are {', '.join(_WORKLOADS)}")
    from gradsync.bench.job import RecordingJob, run_recording

    cost = _measure(run_recording, given, RecordingJob(given.workload, given.rounds))[0]
    for kind, samples in cost.step_s.items():
        ratio = statistics.median(a / b for a, b in zip(samples, cost.step_s["off"], strict=True))
        print(f"{kind:<10} {milliseconds(statistics.median(samples))} a step, {ratio:.4f} of that without a recorder")
    alone = f"{cost.calls_s * 1e6:.1f} us a step with {cost.num_buckets} buckets"
    print(f"the recorder's calls alone: {alone}, {cost.share:.3%}")
    _write_json(given.json, {"recording": cost.step_s, "calls_s": cost.calls_s, "nproc": given.nproc})
    return 0


def _write_json(path: str | None, content: dict[str, Any]) -> None:
    if path is None or not _speaks():
        return
    import torch

    machine = {"torch": torch.__version__, "python": platform.python_version(), "processor": platform.processor()}
    machine["cores"] = str(os.cpu_count())
    Path(path).write_text(json.dumps({"machine": machine, **content}, indent=1) + "\n", encoding="utf-8")
