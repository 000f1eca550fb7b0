"""What launchers put into the environment, as recorded, and the ranks that follow from it."""

import pytest

from gradsync.comm.launchers import Placement, adopt, expand_hosts, placement
from gradsync.errors import ConfigError

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu[007-009],login1",
    "SLURM_JOB_NODELIST": "gpu[007-009],login1",
}
HYDRA = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
TORCHRUN = {
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_a_process_started_alone_has_no_place() -> None:
    assert placement({"HOME": "/somewhere", "RANK": "0"}) is None


def test_torchrun() -> None:
    assert placement(TORCHRUN) == Placement("torchrun", 2, 4, 0, 2, "10.0.0.1", 29500)


def test_variables_without_a_local_rank_are_one_process_a_host_unless_all_meet_here() -> None:
    common = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_PORT": "23456"}
    assert placement(common | {"MASTER_ADDR": "job-master-0"}) == Placement(
        "torchrun", 2, 4, 0, 1, "job-master-0", 23456
    )
    assert placement(common | {"MASTER_ADDR": "127.0.0.1"}) == Placement("torchrun", 2, 4, 2, 4, "127.0.0.1", 23456)


def test_torchrun_inside_of_a_slurm_step_or_of_mpiexec_wins() -> None:
    assert placement(SLURM | HYDRA | TORCHRUN) == placement(TORCHRUN)


def test_a_task_of_srun() -> None:
    found = placement(SLURM)
    assert found is not None
    assert (found.launcher, found.rank, found.world_size, found.local_rank, found.local_world_size) == (
        "srun",
        5,
        7,
        1,
        2,
    )
    assert found.master_address == "gpu007"
    others = [placement(SLURM | {"SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank // 2)}) for rank in range(7)]
    assert {other.master_port for other in others if other} == {found.master_port}
    assert [other.local_world_size for other in others if other] == [2, 2, 2, 2, 2, 2, 1]


def test_ports_of_steps_and_jobs_differ_and_may_be_given() -> None:
    def port(**variables: str) -> int | None:
        found = placement(SLURM | variables)
        assert found is not None
        return found.master_port

    ports = {port(SLURM_JOB_ID=str(job), SLURM_STEP_ID=str(step)) for job in range(20) for step in range(3)}
    assert len(ports) == 60
    assert all(number is not None and 20_000 <= number < 32_000 for number in ports)
    assert port(SLURM_STEP_RESV_PORTS="12345-12346") == 12345
    assert port(MASTER_PORT="29500") == 29500
    found = placement(SLURM | {"MASTER_ADDR": "elsewhere"})
    assert found is not None and found.master_address == "elsewhere"


def test_the_script_of_sbatch_and_a_shell_of_srun_are_no_ranks() -> None:
    script = {name: value for name, value in SLURM.items() if "STEP" not in name} | {"SLURM_PROCID": "0"}
    assert placement(script) is None
    assert placement(SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None


@pytest.mark.parametrize("environment", [HYDRA, OPEN_MPI])
def test_mpiexec(environment: dict[str, str]) -> None:
    found = placement(environment)
    assert found == Placement("mpiexec", 3, 4, 1, 2)
    assert found.environment() == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
    }
    with_address = placement(environment | {"MASTER_ADDR": "one", "MASTER_PORT": "29500"})
    assert with_address == Placement("mpiexec", 3, 4, 1, 2, "one", 29500)


def test_an_adopted_place_is_where_torch_looks_and_keeps_its_launcher() -> None:
    environment = dict(HYDRA)
    first = adopt(environment)
    assert environment["RANK"] == "3" and environment["LOCAL_WORLD_SIZE"] == "2"
    assert adopt(environment) == first and first is not None and first.launcher == "mpiexec"
    assert adopt({"HOME": "/somewhere"}) is None
    changed = adopt(environment | TORCHRUN)
    assert changed is not None and changed.launcher == "torchrun"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", []),
        ("one", ["one"]),
        ("one,two", ["one", "two"]),
        ("gpu[1-3]", ["gpu1", "gpu2", "gpu3"]),
        ("gpu[08-11]", ["gpu08", "gpu09", "gpu10", "gpu11"]),
        ("gpu[1,3-4,07],login", ["gpu1", "gpu3", "gpu4", "gpu07", "login"]),
        ("a[1-2]b[3-4].net,c", ["a1b3.net", "a1b4.net", "a2b3.net", "a2b4.net", "c"]),
    ],
)
def test_host_lists(text: str, names: list[str]) -> None:
    assert expand_hosts(text) == names


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (TORCHRUN | {"RANK": "4"}, "rank 4 of 4; ranks count from 0 to 3"),
        (TORCHRUN | {"WORLD_SIZE": "many"}, "WORLD_SIZE is 'many'; expected a whole number"),
        (SLURM | {"SLURM_STEP_NODELIST": "gpu[1-"}, "bracket that is not closed"),
        (SLURM | {"SLURM_STEP_NODELIST": "gpu[a-b]"}, "'a-b'; expected a number or a range"),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "two"}, "tasks per node are 'two'"),
    ],
)
def test_nonsense_is_refused(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        placement(environment)
