"""What the doctor finds, and how it is said: a level, a topic, what was seen, and what to do about it.

Plain data; knows nothing of what is examined.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """How bad a finding is."""

    OK = "ok"
    """As it should be."""
    NOTE = "note"
    """It works, but slower or with less comfort than it could."""
    PROBLEM = "problem"
    """Something will not work."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    level: Level
    topic: str
    text: str
    remedy: str = ""


def ok(topic: str, text: str) -> Finding:
    """Return a finding of something that is as it should be."""
    return Finding(Level.OK, topic, text)


def note(topic: str, text: str, remedy: str) -> Finding:
    """Return a finding of something that could be better."""
    return Finding(Level.NOTE, topic, text, remedy)


def problem(topic: str, text: str, remedy: str) -> Finding:
    """Return a finding of something that will not work."""
    return Finding(Level.PROBLEM, topic, text, remedy)


def is_healthy(findings: Sequence[Finding]) -> bool:
    """Whether everything will work."""
    return all(finding.level is not Level.PROBLEM for finding in findings)


def merged(by_rank: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Return the findings of all ranks, each once, with the ranks named where not all of them found it."""
    ranks: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(by_rank):
        for finding in findings:
            ranks.setdefault(finding, []).append(rank)
    return [
        finding if len(who) == len(by_rank) else _of_some(finding, who)
        for finding, who in sorted(ranks.items(), key=lambda item: _TOPICS.get(item[0].topic, len(_TOPICS)))
    ]


def _of_some(finding: Finding, ranks: list[int]) -> Finding:
    who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return Finding(finding.level, finding.topic, f"{who}: {finding.text}", finding.remedy)


def told(findings: Sequence[Finding]) -> list[str]:
    """Return findings as lines of text."""
    lines = []
    for finding in findings:
        first, *more = finding.text.splitlines() or [""]
        lines.append(f"{finding.level.value:<8} {finding.topic:<12} {first}")
        lines += [f"{'':<21} {line}" for line in more]
        if finding.remedy:
            lines.append(f"{'':<21} -> {finding.remedy}")
    return lines


# The order in which topics are told: from the ground up.
_TOPICS = {
    topic: place
    for place, topic in enumerate(
        ("versions", "backends", "devices", "threads", "files", "memory", "interfaces", "name", "ranks", "ports")
    )
}
