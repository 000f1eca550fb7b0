"""The interfaces of this very machine, and what is said of those that it doesn't have."""

import os
import socket
import subprocess
import sys

import pytest

from gradsync.comm.interfaces import check_choices, chosen_interface, interfaces, own_address
from gradsync.errors import ConfigError

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads what Linux tells of interfaces")


def test_the_loopback_device_is_there_with_its_address() -> None:
    found = {each.name: each for each in interfaces()}
    assert "127.0.0.1" in found["lo"].addresses
    assert found["lo"].is_loopback and found["lo"].is_up


def test_an_interface_is_chosen_by_name() -> None:
    assert chosen_interface({}) is None
    chosen = chosen_interface({"GLOO_SOCKET_IFNAME": "lo"})
    assert chosen is not None and chosen.name == "lo"
    assert own_address({"GLOO_SOCKET_IFNAME": "lo"}) == "127.0.0.1"


def test_without_a_choice_the_address_is_one_of_this_host() -> None:
    assert own_address({}) in {address for each in interfaces() for address in each.addresses}


@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_a_wrong_name_is_refused_with_the_host_and_what_it_has(variable: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_choices({variable: "ether99"})
    for part in (variable, "'ether99'", socket.gethostname(), "lo (127.0.0.1)"):
        assert part in str(refused.value)


def test_nccl_takes_beginnings_of_names_and_exclusions() -> None:
    check_choices({"NCCL_SOCKET_IFNAME": "l"})
    check_choices({"NCCL_SOCKET_IFNAME": "^docker0"})


def test_a_process_group_is_not_even_tried_with_a_wrong_name() -> None:
    code = "import gradsync; gradsync.init_process_group('gloo')"
    variables = {"GLOO_SOCKET_IFNAME": "ether99", "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    environment = os.environ | variables | {"MASTER_PORT": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 1
    assert "has no interface 'ether99'" in result.stderr
