"""Results of one check, the merged results of all processes, and the report."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxdist.runtime.formatting.tables import few, wrap

Severity = Literal["ok", "note", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("ok", "note", "warning", "error")
"""In increasing order."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One result of a check.

    Attributes:
        severity: ok = no problem; note = information; warning = the run is slower or less safe than
            possible; error = the run will fail or compute wrong numbers.
        check: name of the check.
        fix: required for warnings and errors.
        numbers: measurements, for `--json`.
    """

    severity: Severity
    check: str
    text: str
    fix: str = ""
    numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def _finding(severity: Severity, check: str, text: str, fix: str = "", **numbers: Any) -> Finding:
    return Finding(severity, check, text, fix, numbers)


ok, note, warning, error = (functools.partial(_finding, severity) for severity in SEVERITIES)


@dataclasses.dataclass(frozen=True)
class Reported:
    """A finding, the ids of the processes that reported it, and their distinct hosts."""

    finding: Finding
    processes: tuple[int, ...]
    hosts: tuple[str, ...]


def merge(everyone: Sequence[tuple[str, Sequence[Finding]]]) -> list[Reported]:
    """Return the findings of all processes, (host, findings) each, equal ones merged, by check."""
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
    """Return the highest severity; "ok" without findings."""
    ranks = [SEVERITIES.index(s.finding.severity) for s in reported]
    return SEVERITIES[max(ranks, default=0)]


def exit_code(reported: Sequence[Reported], *, strict: bool) -> int:
    """Return 1 if there is an error, or with `strict` a warning; else 0."""
    return int(worst(reported) == "error" or (strict and worst(reported) == "warning"))


def record_of(reported: Sequence[Reported], *, strict: bool) -> dict[str, Any]:
    """Return the report for JSON: worst severity, exit code, and findings with processes, hosts."""
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


_MARKS = {"ok": "ok", "note": "note", "warning": "WARN", "error": "FAIL"}
_CHECK_WIDTH = 18


def text_of(reported: Sequence[Reported], *, num_processes: int) -> str:
    """Return the report as text: a line per finding with its fix, then the verdict.

    An "ok" that differs between processes (disk speed) is printed for the first process only.
    """
    lines: list[str] = []
    passed: set[str] = set()
    for one in reported:
        finding = one.finding
        if finding.severity == "ok":
            if finding.check in passed:
                continue
            passed.add(finding.check)
        text = finding.text + _where(one, num_processes)
        lines += wrap(text, head=f"{_MARKS[finding.severity]:<5} {finding.check:<{_CHECK_WIDTH}} ")
        if finding.fix:
            lines += wrap(finding.fix, head=" " * (7 + _CHECK_WIDTH) + "fix: ")
    return "\n".join([*lines, "", verdict(reported)])


def verdict(reported: Sequence[Reported]) -> str:
    """Return the last line of the report: numbers of errors and warnings, and advice."""
    counts = {s: sum(one.finding.severity == s for one in reported) for s in SEVERITIES}
    totals = [
        f"{counts[s]} {s}{'' if counts[s] == 1 else 's'}" for s in ("error", "warning") if counts[s]
    ]
    advice = {
        "error": "do not start a long run before you fix the errors",
        "warning": "a run works, but read the warnings first",
        "note": "ready for a run",
        "ok": "ready for a run",
    }[worst(reported)]
    return f"{', '.join(totals)}: {advice}" if totals else advice


def _where(one: Reported, num_processes: int) -> str:
    is_global = one.finding.check.startswith(_JOB_CHECKS)
    if num_processes == 1 or len(one.processes) == num_processes or is_global:
        return ""
    names = few(list(map(str, one.processes)), 4)
    return f" [process {names} on {few(one.hosts, 3)}]"


_JOB_CHECKS = (
    *("job", "same software", "network", "clocks", "shared directory", "mesh", "settings"),
    *("devices", "operations", "all-reduce"),
)
"""Prefixes of the checks of all processes together, which process 0 reports."""
