"""``gradsync doctor``: looks at this machine, or at all of a run's hosts, and says what will not work and why."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gradsync.cli.main import EXIT_FAILED
from gradsync.cli.options import check_can_be_written, new_parser
from gradsync.comm.launchers import adopt
from gradsync.errors import ConfigError
from gradsync.observe.terminal import say

if TYPE_CHECKING:
    from gradsync.doctor.ranks import Diagnosis

_DESCRIPTION = (
    "Examine versions, backends, devices, limits, interfaces, the way between every two ranks, clocks, and whether "
    "process groups work. Alone it examines this machine with a few ranks of its own; under torchrun, srun or mpiexec "
    "all ranks and hosts. Exit code 1 if something will not work."
)


def main(arguments: Sequence[str]) -> int:
    """Run ``gradsync doctor`` and return its exit code."""
    parser = new_parser("doctor", _DESCRIPTION)
    parser.option("--nproc", int, 2, "ranks to start where no launcher has started any")
    parser.option("--timeout", float, 20.0, "seconds that ranks may take to come, and to reach each other")
    parser.option("--json", str | None, None, "file for all findings and measurements")
    given = parser.parse_args(list(arguments))
    if given.nproc < 1 or given.timeout <= 0:
        raise ConfigError("--nproc must be at least 1, and --timeout more than 0")
    place = adopt(os.environ)
    if place is None or place.rank == 0:
        check_can_be_written("--json", given.json)
    diagnosis = _of_this_machine(given) if place is None else _with_the_others(given)
    if place is None or place.rank == 0 or not diagnosis.ways:
        _tell(diagnosis, None if place is None or diagnosis.ways else place.rank)
    if given.json is not None and (place is None or place.rank == 0):
        _write_json(Path(given.json), diagnosis)
    from gradsync.doctor.findings import is_healthy

    return 0 if is_healthy(diagnosis.findings) else EXIT_FAILED


def _with_the_others(given: Any) -> "Diagnosis":
    from gradsync.doctor.ranks import Visit, examine_rank

    return examine_rank(Visit(given.timeout))


def _of_this_machine(given: Any) -> "Diagnosis":
    from gradsync.cli.local_ranks import run_ranks
    from gradsync.doctor.ranks import Visit, examine_rank

    diagnosis: Diagnosis = run_ranks(examine_rank, given.nproc, Visit(given.timeout))[0]
    return diagnosis


def _tell(diagnosis: "Diagnosis", rank: int | None) -> None:
    from gradsync.doctor.findings import told
    from gradsync.doctor.ranks import told_ways

    lines = told(diagnosis.findings)
    if any(not way.error for way in diagnosis.ways):
        lines += ["", *told_ways(diagnosis.cards, diagnosis.ways)]
    prefix = "" if rank is None else f"[rank {rank}] "  # several ranks may speak where they did not meet
    say("\n".join(prefix + line for line in lines))


def _write_json(path: Path, diagnosis: "Diagnosis") -> None:
    content = {
        "findings": [{**asdict(each), "level": each.level.value} for each in diagnosis.findings],
        "ranks": [{"rank": card.rank, "host": card.host, "address": card.address} for card in diagnosis.cards],
        "ways": [asdict(way) for way in diagnosis.ways],
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
