"""How findings of several ranks are put together and said."""

from gradsync.doctor.findings import is_healthy, merged, note, ok, problem, told


def test_what_all_ranks_have_found_is_said_once() -> None:
    same = ok("versions", "torch 2.13.0")
    found = merged([[same, ok("threads", "one")], [same, ok("threads", "two")], [same, ok("threads", "two")]])
    assert [finding.text for finding in found] == ["torch 2.13.0", "rank 0: one", "ranks 1, 2: two"]


def test_problems_alone_are_unhealthy_and_remedies_follow() -> None:
    findings = [ok("files", "20000"), note("memory", "64 MiB", "more of it")]
    assert is_healthy(findings)
    findings.append(problem("ways", "none\nat all", "open the firewall"))
    assert not is_healthy(findings)
    lines = told(findings)
    assert [line.split()[0] for line in lines] == ["ok", "note", "->", "problem", "at", "->"]
    assert lines[-1].strip() == "-> open the firewall"
