"""``gradsync prove``: a table that says, for every way of training, how far it is from one plain process."""

import os
import pickle
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gradsync.cli.main import EXIT_FAILED
from gradsync.cli.options import check_model, new_parser
from gradsync.comm.launchers import adopt
from gradsync.errors import ConfigError, GradsyncError
from gradsync.observe.terminal import say

if TYPE_CHECKING:
    from gradsync.train.prove import Difference, Finding
    from gradsync.train.prove_cases import Case, Subject

_DESCRIPTION = (
    "Run the same model, data and steps in every way that there is (DDP, accumulation, ZeRO, FSDP, tensor and pipeline "
    "parallel, their products, each backend) and compare losses, gradient norms and parameters with one plain process. "
    "Under torchrun, srun or mpiexec all ranks and hosts run every row together."
)
_MOST_PROCESSES = 4
_BACKENDS = ("gloo", "shm", "nccl")


def main(arguments: Sequence[str]) -> int:
    """Run ``gradsync prove`` and return its exit code: 1 if any row has failed."""
    parser = new_parser("prove", _DESCRIPTION)
    parser.option(
        "--model",
        str | None,
        None,
        "MODULE:FUNCTION that returns (module, batch) or (module, batch, loss), the loss a mean over the batch's rows; "
        "without it a small GPT-2. Tensor and pipeline parallel need a known layout and are left out",
    )
    parser.option(
        "--nproc",
        int,
        _MOST_PROCESSES,
        "most processes; rows that need more are left out; under a launcher all that it has started take part",
    )
    parser.option("--steps", int, 10, "optimizer steps of every row")
    parser.option(
        "--device", Literal["auto", "cpu", "cuda"], "auto", "where to compute; auto takes GPUs if there are enough"
    )
    parser.option("--backend", str | None, None, "this backend alone (by default each that this machine has)")
    options = parser.parse_args(list(arguments))
    if options.nproc < 1 or options.steps < 1:
        raise ConfigError("--nproc and --steps must be at least 1")
    if options.model is not None:
        check_model(options.model)
    place = adopt(os.environ)
    device_type = _device_type(options.device, options.nproc if place is None else place.local_world_size)
    subject = _checked_subject(options, None if place is None else place.world_size)
    if place is not None:
        return _prove_jointly(options, subject, device_type, place.world_size)
    rows, left_out = _rows(options, device_type)
    findings = _prove(rows, options, device_type)
    _print(findings, options)
    for row in left_out:
        print(f"left out: {row.name} (needs {row.world} processes; --nproc is {options.nproc})")
    return _conclude(findings)


def _conclude(findings: "list[Finding]") -> int:
    failed = [finding for finding in findings if not finding.has_passed]
    for finding in failed:
        say(f"FAILED {finding.case.name}: {_reason(finding)}")
    print(f"{len(findings) - len(failed)} of {len(findings)} rows passed", flush=True)
    return EXIT_FAILED if failed else 0


def _prove_jointly(options: Any, subject: "Subject", device_type: str, world: int) -> int:
    """Run the rows with the ranks that a launcher has started, this process being one of them."""
    from torch.distributed import get_backend

    from gradsync.comm.process import destroy_process_group, init_process_group, rank_info
    from gradsync.train.prove import device_of, run_jointly
    from gradsync.train.prove_cases import joint_cases

    device = device_of(device_type)
    init_process_group(options.backend or "auto", device_type=device_type)
    rows = [row for row in joint_cases(world, get_backend()) if options.model is None or not row.needs_layout]
    findings = run_jointly(rows, subject, options.steps, device)
    is_first = rank_info().rank == 0
    destroy_process_group()
    if is_first:
        _print(findings, options)
        return _conclude(findings)
    return 0 if all(finding.has_passed for finding in findings) else EXIT_FAILED


def _checked_subject(options: Any, world: int | None) -> "Subject":
    """Return what is to be proved, for the ranks of a launcher or for our own; refuses what no rank could work with."""
    from gradsync.train.prove_cases import SEQUENCES, GPTSubject, UserSubject, sequences_for

    if options.backend is not None:
        from gradsync.comm.backends import choose_backend

        choose_backend(options.backend)
        if world is None and options.backend not in _BACKENDS:
            raise ConfigError(f"--backend {options.backend} is unknown; there are {', '.join(_BACKENDS)}")
    sequences = SEQUENCES if world is None else sequences_for(world)
    if options.model is None:
        return GPTSubject(sequences)
    return UserSubject(options.model, sequences)


def _device_type(wanted: str, nproc: int) -> str:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted == "cuda" and count < nproc:
        raise ConfigError(f"--device cuda: {nproc} processes need as many GPUs, and there are {count}; lower --nproc")
    if wanted == "auto":
        return "cuda" if count >= nproc else "cpu"
    return wanted


def _rows(options: Any, device_type: str) -> "tuple[list[Case], list[Case]]":
    """Return the rows to run, and those that need more processes."""
    from gradsync.train.prove_cases import cases

    first, *others = [options.backend] if options.backend else _backends(device_type)
    rows = [row for row in cases(first, others) if options.model is None or not row.needs_layout]
    return [r for r in rows if r.world <= options.nproc], [r for r in rows if r.world > options.nproc]


def _backends(device_type: str) -> list[str]:
    """Return the backends of this machine, the one that a run would take first."""
    from gradsync.comm import shm
    from gradsync.comm.backends import choose_backend

    if device_type == "cuda":
        return ["nccl"]
    there = ["gloo"] if shm.is_available() is not None else ["gloo", "shm"]
    first = choose_backend(device_type=device_type, on_one_host=True).name
    return sorted(there, key=lambda name: name != first)


def _prove(rows: "list[Case]", options: Any, device_type: str) -> "list[Finding]":
    """Run all rows; after one that fails the others go on in new processes."""
    from gradsync.train.prove import Finding

    findings: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix="gradsync-") as name:
        folder = Path(name)
        while len(findings) < len(rows):
            left = rows[len(findings) :]
            error = _launch(left, options, device_type, folder)
            done = _finished(left, folder)
            findings += done
            if error is not None and len(done) < len(left):
                findings.append(Finding(left[len(done)], error=error))
    return findings


def _launch(rows: "list[Case]", options: Any, device_type: str, folder: Path) -> str | None:
    """Start the processes; returns what has ended them early."""
    from gradsync.cli.local_ranks import run_ranks
    from gradsync.train.prove import ProofJob, reference_file, run_cases

    job = ProofJob(rows, options.model, options.steps, device_type, folder)
    print(f"running {len(rows)} row(s) of {options.steps} steps ...", file=sys.stderr, flush=True)
    try:
        run_ranks(run_cases, max(row.world for row in rows), job)
    except GradsyncError as error:
        if not reference_file(folder).exists():
            raise  # not a row's fault: the model does not run in one plain process either
        return str(error)
    return None


def _finished(rows: "list[Case]", folder: Path) -> "list[Finding]":
    from gradsync.train.prove import result_file

    findings = []
    for row in rows:
        path = result_file(folder, row)
        if not path.exists():
            break
        findings.append(pickle.loads(path.read_bytes()))
    return findings


def _print(findings: "list[Finding]", options: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    name = options.model or "a small GPT-2"
    what = f"{name}, {options.steps} step{'s' if options.steps > 1 else ''} over {findings[0].case.backend}"
    table = Table(title=f"{what}: largest difference from one process (ulp: units in the last place)")
    table.add_column("", no_wrap=True)
    for column in ("ranks", "loss", "ulp", "norm", "ulp", "parameters", "ulp"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for finding in findings:
        cells = [finding.case.name, str(finding.case.world)]
        for difference in (finding.loss, finding.norm, finding.parameters):
            cells += _cells(difference) if finding.error is None else ["", ""]
        table.add_row(*cells, "pass" if finding.has_passed else "FAIL")
    # A table that is cut would lose numbers; a terminal that is too narrow folds its lines.
    needed = Console(width=1000).measure(table).maximum
    Console(width=max(needed, Console().width if sys.stdout.isatty() else 0)).print(table, crop=False)


def _cells(difference: "Difference") -> list[str]:
    return [f"{difference.absolute:.1e}" if difference.absolute else "0", f"{difference.ulps:.3g}"]


def _reason(finding: "Finding") -> str:
    if finding.error is not None:
        return finding.error
    if finding.first_parameter is not None:
        return f"the first parameter beyond tolerance is {finding.first_parameter}"
    return "the losses or gradient norms are beyond tolerance"
