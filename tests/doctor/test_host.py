"""What is said of a host, for surroundings that are made up."""

import socket

import pytest

from gradsync.doctor import host
from gradsync.doctor.findings import Finding
from gradsync.doctor.host import Setting, examine_host


def found(monkeypatch: pytest.MonkeyPatch, world: int, local: int, **variables: str) -> dict[str, Finding]:
    return {finding.topic: finding for finding in examine_host(Setting(variables, world, local))}


def test_this_machine_can_do_it(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = found(monkeypatch, 2, 2)
    assert {"versions", "backends", "devices", "threads", "files", "interfaces"} <= set(findings)
    assert not any(finding.level.value == "problem" for finding in findings.values())
    assert "gloo" in findings["backends"].text


def test_threads_in_each_others_way_and_idle_cores_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_num_cores", lambda: 8)
    crowded = found(monkeypatch, 4, 4, OMP_NUM_THREADS="8")["threads"]
    assert crowded.level.value == "note" and crowded.remedy == "set OMP_NUM_THREADS=2"
    assert found(monkeypatch, 2, 2, OMP_NUM_THREADS="4")["threads"].level.value == "ok"
    monkeypatch.setattr(host.torch.cuda, "is_available", lambda: False)
    assert "cores stay idle" in found(monkeypatch, 2, 2, OMP_NUM_THREADS="1")["threads"].text


def test_too_few_files_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    monkeypatch.setattr(resource, "getrlimit", lambda which: (300, 4096))
    finding = found(monkeypatch, 64, 8)["files"]
    assert finding.level.value == "problem" and "ulimit -n 1536" in finding.remedy


def test_an_interface_that_is_not_there_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    finding = found(monkeypatch, 2, 1, GLOO_SOCKET_IFNAME="ether99")["interfaces"]
    assert finding.level.value == "problem" and "'ether99'" in finding.text


def test_loopback_is_a_problem_between_hosts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert found(monkeypatch, 2, 1, GLOO_SOCKET_IFNAME="lo")["interfaces"].level.value == "problem"
    assert found(monkeypatch, 2, 2, GLOO_SOCKET_IFNAME="lo")["interfaces"].level.value == "ok"


def test_launchers_that_meet_at_loopback_are_on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    assert "name" in found(monkeypatch, 2, 1, MASTER_ADDR="10.0.0.1")
    assert "name" not in found(monkeypatch, 2, 1, MASTER_ADDR="127.0.0.1")


def test_a_name_that_resolves_to_loopback_is_a_problem_between_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "own_address", lambda environment: "10.0.0.1")
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "127.0.1.1")
    finding = found(monkeypatch, 2, 1)["name"]
    assert finding.level.value == "problem" and "GLOO_SOCKET_IFNAME" in finding.remedy
