"""Several hosts made of network namespaces: they meet and train; what goes wrong with one is said by the others."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Host, hosts, outputs
from rank_program import STEP_LIMIT, batch, make_model

from listening import addresses
from whole_batch import train_on_all_batches

PROGRAM = str(Path(__file__).with_name("rank_program.py"))
TIMEOUT_S = 12.0  # of which the ranks may start some seconds apart
PATIENCE_S = 180.0

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


@pytest.fixture
def three_hosts() -> Iterator[list[Host]]:
    with hosts(3) as made:
        yield made


def start(
    made: list[Host], num_steps: int, timeout_s: float, variables: dict[int, dict[str, str]] | None = None
) -> "list[subprocess.Popen[str]]":
    """Start one rank a host; the first host is the one where they meet."""
    common = {"WORLD_SIZE": str(len(made)), "MASTER_ADDR": made[0].name, "MASTER_PORT": "29512", "LOCAL_RANK": "0"}
    common["LOCAL_WORLD_SIZE"] = "1"
    return [
        host.start(PROGRAM, str(num_steps), str(timeout_s), **common, RANK=str(rank), **(variables or {}).get(rank, {}))
        for rank, host in enumerate(made)
    ]


def trained_alone(world: int, num_steps: int) -> float:
    model = make_model()
    train_on_all_batches(model, batch, world, num_steps)
    return sum(float(parameter.detach().double().sum()) for parameter in model.parameters())


@pytest.mark.parametrize("num_hosts", [2, 3])
def test_hosts_meet_by_name_and_a_slow_link_changes_nothing(num_hosts: int) -> None:
    with hosts(num_hosts) as made:
        made[1].slow_down("20mbit")
        processes = start(made, 20, 30.0)
        for rank, output in enumerate(outputs(processes, PATIENCE_S)):
            assert processes[rank].returncode == 0, output
            value = float(output.split("finished ")[1].split()[0])
            assert value == pytest.approx(trained_alone(num_hosts, 20), abs=1e-4)


@pytest.mark.parametrize("num_hosts", [2, 3])
def test_a_host_cut_off_in_the_middle_of_a_step_is_named(num_hosts: int) -> None:
    with hosts(num_hosts) as made:
        _cut_off_the_last(made)


def _cut_off_the_last(made: list[Host]) -> None:
    last = len(made) - 1
    processes = start(made, STEP_LIMIT, TIMEOUT_S)
    for process in processes:
        assert process.stdout is not None
        assert any("training" in line for line in process.stdout), "it has ended before"
    for host, process in zip(made, processes, strict=True):
        assert {address for address, _ in addresses([process.pid])} == {host.address}, "it listens elsewhere, too"
    made[last].cut()
    stories = outputs(processes, PATIENCE_S)
    assert [process.returncode for process in processes] == [1] * len(made), "\n".join(stories)
    for story in stories[:last]:
        assert f"rank {last} does not answer any more" in story, story
    name = f"rank {last} on host node{last}"
    assert name in stories[last] and "this host's network is cut off" in stories[last], stories[last]


def test_a_wrong_interface_is_refused_by_its_host_and_missed_by_the_others(three_hosts: list[Host]) -> None:
    processes = start(three_hosts, 4, TIMEOUT_S, {1: {"GLOO_SOCKET_IFNAME": "ether7"}})
    stories = outputs(processes, PATIENCE_S)
    assert [process.returncode for process in processes] == [1, 1, 1], "\n".join(stories)
    assert "GLOO_SOCKET_IFNAME is 'ether7', but host node1 has no interface 'ether7'" in stories[1]
    assert "net0 (10.213.9.2)" in stories[1]
    for rank in (0, 2):
        assert "rank 1 of 3 did not come" in stories[rank], stories[rank]
        assert "rank 2: 10.213.9.3 (node2" in stories[rank], stories[rank]
