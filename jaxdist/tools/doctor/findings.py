"""Results of one check, and how results of all processes are merged."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

Severity = Literal["ok", "note", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("ok", "note", "warning", "error")
"""From harmless to fatal for a run."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One result of a check.

    Attributes:
        severity: ok = checked and fine; note = good to know; warning = the run is slower or less
            safe than it could be; error = the run will fail or compute wrong numbers.
        check: what was checked, in a word or two.
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
            raise ValueError(f"{self.check}: a warning or error needs a fix")


def ok(check: str, text: str, **numbers: Any) -> Finding:
    """Checked and fine."""
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
class Reported:
    """A finding, the ids of the processes that made it, and their hosts, each name once."""

    finding: Finding
    processes: tuple[int, ...]
    hosts: tuple[str, ...]


def merge(everyone: Sequence[tuple[str, Sequence[Finding]]]) -> list[Reported]:
    """All processes' (host, findings) in the order of the checks; equal findings become one."""
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
    reported = [
        Reported(f, tuple(processes), tuple(hosts)) for f, processes, hosts in groups.values()
    ]
    return sorted(reported, key=lambda s: (order[s.finding.check], s.processes))


def worst(reported: Sequence[Reported]) -> Severity:
    """The highest severity; "ok" without findings."""
    ranks = [SEVERITIES.index(s.finding.severity) for s in reported]
    return SEVERITIES[max(ranks, default=0)]


def exit_code(reported: Sequence[Reported], *, strict: bool) -> int:
    """1 when something is wrong: an error, or with `strict` a warning; else 0."""
    return int(worst(reported) == "error" or (strict and worst(reported) == "warning"))


def record_of(reported: Sequence[Reported], *, strict: bool) -> dict[str, Any]:
    """The report as values that JSON can hold."""
    return {
        "worst": worst(reported),
        "exit_code": exit_code(reported, strict=strict),
        "findings": [
            {
                **dataclasses.asdict(s.finding),
                "processes": list(s.processes),
                "hosts": list(s.hosts),
            }
            for s in reported
        ],
    }
