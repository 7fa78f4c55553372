"""What a check says, and what the sayings of many processes come to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Severity = Literal["ok", "note", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("ok", "note", "warning", "error")
"""From harmless to what ends a run."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that a check saw.

    Attributes:
        severity: ok = looked at and fine; note = good to know; warning = the run is slower or less
            safe than it could be; error = the run will fail or compute wrong numbers.
        check: what was looked at, in a word or two.
        text: what was seen.
        fix: what to do; every warning and error has one.
        numbers: what was measured, for `--json`.
    """

    severity: Severity
    check: str
    text: str
    fix: str = ""
    numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.severity in ("warning", "error") and not self.fix:
            raise ValueError(f"{self.check}: a finding without a fix helps nobody")


def ok(check: str, text: str, **numbers: Any) -> Finding:
    """Looked at, and fine."""
    return Finding("ok", check, text, numbers=numbers)


def note(check: str, text: str, fix: str = "", **numbers: Any) -> Finding:
    """Good to know."""
    return Finding("note", check, text, fix, numbers)


def warning(check: str, text: str, fix: str, **numbers: Any) -> Finding:
    """The run is slower or less safe than it could be."""
    return Finding("warning", check, text, fix, numbers)


def error(check: str, text: str, fix: str, **numbers: Any) -> Finding:
    """The run will fail or compute wrong numbers."""
    return Finding("error", check, text, fix, numbers)


@dataclasses.dataclass(frozen=True)
class Said:
    """A finding and the processes that made it.

    Attributes:
        finding: what they all saw alike.
        processes: their indices.
        hosts: where they run, each name once.
    """

    finding: Finding
    processes: tuple[int, ...]
    hosts: tuple[str, ...]


def merge(everyone: Sequence[tuple[str, Sequence[Finding]]]) -> list[Said]:
    """What all processes say, equal findings as one, in the order of the checks.

    Args:
        everyone: (host, findings) by process id.
    """
    groups: dict[tuple[str, str, str, str], tuple[Finding, list[int], list[str]]] = {}
    order: dict[str, int] = {}
    for process, (host, findings) in enumerate(everyone):
        for finding in findings:
            order.setdefault(finding.check, len(order))
            key = (finding.severity, finding.check, finding.text, finding.fix)
            _, processes, hosts = groups.setdefault(key, (finding, [], []))
            processes.append(process)
            if host not in hosts:
                hosts.append(host)
    said = [Said(f, tuple(processes), tuple(hosts)) for f, processes, hosts in groups.values()]
    return sorted(said, key=lambda s: (order[s.finding.check], s.processes))


def worst(said: Sequence[Said]) -> Severity:
    """The gravest severity; "ok" when nothing was said."""
    ranks = [SEVERITIES.index(s.finding.severity) for s in said]
    return SEVERITIES[max(ranks, default=0)]


def exit_code(said: Sequence[Said], *, strict: bool) -> int:
    """1 when something is wrong: an error, or with `strict` a warning; else 0."""
    return int(worst(said) == "error" or (strict and worst(said) == "warning"))


def record_of(said: Sequence[Said], *, strict: bool) -> dict[str, Any]:
    """The report as what JSON can hold."""
    return {
        "worst": worst(said),
        "exit_code": exit_code(said, strict=strict),
        "findings": [
            {
                **dataclasses.asdict(s.finding),
                "processes": list(s.processes),
                "hosts": list(s.hosts),
            }
            for s in said
        ],
    }
