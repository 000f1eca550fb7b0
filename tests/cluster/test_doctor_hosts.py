"""``gradsync doctor`` over several hosts made of network namespaces: healthy, and with each thing that goes wrong."""

import subprocess
from collections.abc import Iterator

import pytest
from hosts import Host, hosts, outputs

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]
PATIENCE_S = 180.0


@pytest.fixture
def three_hosts() -> Iterator[list[Host]]:
    with hosts(3) as made:
        yield made


def doctor(made: list[Host], num_started: int = 3, timeout_s: int = 10) -> tuple[list[int], list[str]]:
    common = {"WORLD_SIZE": "3", "MASTER_ADDR": made[0].name, "MASTER_PORT": "29513"}
    common |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    processes: list[subprocess.Popen[str]] = [
        host.start("-m", "gradsync", "doctor", "--timeout", str(timeout_s), **common, RANK=str(rank))
        for rank, host in enumerate(made[:num_started])
    ]
    stories = outputs(processes, PATIENCE_S)
    return [process.returncode for process in processes], stories


def test_healthy_hosts_and_a_slow_link(three_hosts: list[Host]) -> None:
    three_hosts[2].slow_down("50mbit")
    codes, stories = doctor(three_hosts, timeout_s=60)  # a busy machine takes its time to start three of them
    assert codes == [0, 0, 0], "\n".join(stories)
    assert "the ranks reach each other (3 pair(s) tried)" in stories[0]
    assert "gloo works over 3 rank(s)" in stories[0]
    assert "slow between ranks 0-2, 1-2" in stories[0]
    assert "node0 - node2" in stories[0]


def test_a_blocked_way_is_named_with_both_ends(three_hosts: list[Host]) -> None:
    # Isolated ports of a bridge reach the others, but not each other: as between two racks with a firewall.
    for host in three_hosts[1:]:
        subprocess.run(["bridge", "-n", host.switch, "link", "set", "dev", host.name, "isolated", "on"], check=True)
    codes, stories = doctor(three_hosts)
    assert codes == [1, 1, 1], "\n".join(stories)
    assert "rank 1 (node1, 10.213.9.2) does not reach rank 2 (node2, 10.213.9.3)" in stories[0]


def test_a_rank_that_does_not_come(three_hosts: list[Host]) -> None:
    codes, stories = doctor(three_hosts, num_started=2, timeout_s=10)
    assert codes == [1, 1], "\n".join(stories)
    assert "rank 0 of 3 did not meet the others at node0:29513: nothing was heard of rank 2" in stories[0]
    assert "rank 1 of 3 did not meet the others at node0:29513" in stories[1]
