"""Who started this process, and which rank that makes it: torchrun, Slurm's srun, or MPI's mpiexec.

Each launcher tells its processes their place in environment variables of its own; here they are read into one
``Placement``, spelled as torch.distributed wants it. Functions of a mapping: nothing here reads the real environment
by itself, opens a connection, or imports torch.

[Note: Slurm's batch script] The script that ``sbatch`` runs carries most of Slurm's variables as well, although
it is no task of any step. Only ``srun`` sets SLURM_STEP_NUM_TASKS, so that is what is looked for. A step of one task
is mostly somebody's shell (``srun --pty bash``): what is started there may start ranks of its own.
"""

import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from gradsync.comm.interfaces import leads_to_itself
from gradsync.errors import ConfigError

_DYNAMIC_PORTS = range(20_000, 32_000)  # below those that Linux hands out to clients by itself


@dataclass(frozen=True)
class Placement:
    """A process's place among all, and where they meet; no address means that one has still to be agreed on."""

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_address: str | None = None
    master_port: int | None = None

    def environment(self) -> dict[str, str]:
        """The variables that torch.distributed reads."""
        variables = {
            "RANK": self.rank,
            "WORLD_SIZE": self.world_size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_WORLD_SIZE": self.local_world_size,
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": self.master_port,
        }
        return {name: str(value) for name, value in variables.items() if value is not None}


def placement(environment: Mapping[str, str]) -> Placement | None:
    """Return what the launcher of this process has told it; None for a process that was started alone.

    Raises:
        ConfigError: a launcher's variables are there, but make no sense.
    """
    for read in (_torchrun, _slurm, _open_mpi, _hydra):
        found = read(environment)
        if found is not None:
            return _checked(found)
    return None


_adopted: Placement | None = None


def adopt(environment: MutableMapping[str, str]) -> Placement | None:
    """Return the ``placement``, and put it where torch looks for it; asked again, the answer is the same."""
    global _adopted
    if _adopted is not None and _adopted.environment().items() <= environment.items():
        return _adopted
    found = placement(environment)
    if found is not None:
        environment.update(found.environment())
    _adopted = found
    return found


def _torchrun(environment: Mapping[str, str]) -> Placement | None:
    """torchrun, or anything else that speaks torch's own language (a Kubernetes operator, a script).

    Operators leave out the local rank: they start one process a pod, unless all meet on this very host.
    """
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    rank, world = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    address, port = _master(environment)
    is_one_host = address is None or leads_to_itself(address)
    local = _number(environment, "LOCAL_RANK", rank if is_one_host else 0)
    num_local = _number(environment, "LOCAL_WORLD_SIZE", world if is_one_host else 1)
    return Placement("torchrun", rank, world, local, num_local, address, port)


def _slurm(environment: Mapping[str, str]) -> Placement | None:
    """A task of a step that ``srun`` has started, see [Note: Slurm's batch script]."""
    if "SLURM_PROCID" not in environment or "SLURM_STEP_NUM_TASKS" not in environment:
        return None
    if _number(environment, "SLURM_STEP_NUM_TASKS") == 1:
        return None
    counts = _per_node(environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", "1")))
    node = _number(environment, "SLURM_NODEID", 0)
    address, port = _master(environment)
    if address is None:
        hosts = expand_hosts(environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", "")))
        address = hosts[0] if hosts else None
    return Placement(
        launcher="srun",
        rank=_number(environment, "SLURM_PROCID"),
        world_size=_number(environment, "SLURM_STEP_NUM_TASKS"),
        local_rank=_number(environment, "SLURM_LOCALID", 0),
        local_world_size=counts[node] if node < len(counts) else 1,
        master_address=address,
        master_port=port or _slurm_port(environment),
    )


def _slurm_port(environment: Mapping[str, str]) -> int:
    """A port that all tasks compute alike: one that Slurm has reserved, else one by the numbers of job and step."""
    reserved = environment.get("SLURM_STEP_RESV_PORTS")
    if reserved:
        return int(re.split(r"[-,]", reserved)[0])
    job = _number(environment, "SLURM_JOB_ID", 0)
    step = _number(environment, "SLURM_STEP_ID", 0)
    return _DYNAMIC_PORTS[(job * 97 + step) % len(_DYNAMIC_PORTS)]


def _open_mpi(environment: Mapping[str, str]) -> Placement | None:
    if "OMPI_COMM_WORLD_RANK" not in environment:
        return None
    return Placement(
        "mpiexec",
        _number(environment, "OMPI_COMM_WORLD_RANK"),
        _number(environment, "OMPI_COMM_WORLD_SIZE"),
        _number(environment, "OMPI_COMM_WORLD_LOCAL_RANK"),
        _number(environment, "OMPI_COMM_WORLD_LOCAL_SIZE"),
        *_master(environment),
    )


def _hydra(environment: Mapping[str, str]) -> Placement | None:
    """The process manager of MPICH, Intel MPI and MVAPICH."""
    if "PMI_RANK" not in environment or "PMI_SIZE" not in environment:
        return None
    rank, world = _number(environment, "PMI_RANK"), _number(environment, "PMI_SIZE")
    local, num_local = _number(environment, "MPI_LOCALRANKID", rank), _number(environment, "MPI_LOCALNRANKS", world)
    return Placement("mpiexec", rank, world, local, num_local, *_master(environment))


def expand_hosts(text: str) -> list[str]:
    """Return the names in a host list as Slurm writes it: ``"gpu[01-03,7],login"``.

    Raises:
        ConfigError: it cannot be read.
    """
    return [name for part in _split_outside_brackets(text) for name in _expand_one(part)]


def _expand_one(text: str) -> list[str]:
    """The names of one pattern, the numbers of the first bracket varying slowest."""
    before, bracket, rest = text.partition("[")
    if not bracket:
        return [text]
    inside, closing, after = rest.partition("]")
    if not closing:
        raise ConfigError(f"the host list part {text!r} has a bracket that is not closed")
    return [f"{before}{number}{tail}" for number in _numbers(inside, text) for tail in _expand_one(after)]


def _numbers(text: str, whole: str) -> list[str]:
    numbers = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            raise ConfigError(
                f"the host list part {whole!r} holds {part!r}; expected a number or a range such as 01-07"
            )
        first, last = match[1], match[2] or match[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _split_outside_brackets(text: str) -> list[str]:
    return [part for part in re.split(r",(?![^\[]*\])", text) if part]


def _per_node(text: str) -> list[int]:
    """The numbers of Slurm's ``"2(x3),1"``: 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ConfigError(f"Slurm's tasks per node are {text!r}; expected numbers such as 2(x3),1")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _master(environment: Mapping[str, str]) -> tuple[str | None, int | None]:
    port = _number(environment, "MASTER_PORT", 0) or None
    return environment.get("MASTER_ADDR"), port


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise ConfigError(f"the environment variable {name} is {text!r}; expected a whole number") from None


def _checked(found: Placement) -> Placement:
    if not 0 <= found.rank < found.world_size:
        raise ConfigError(
            f"{found.launcher} says that this is rank {found.rank} of {found.world_size}; ranks count from 0 to "
            f"{found.world_size - 1}: are variables of another launcher in the environment?"
        )
    return found
