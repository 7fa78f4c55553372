"""Results of one check, how results of all processes are merged, and the report for people."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxdist.runtime.formatting.tables import few, wrap

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


def _finding(severity: Severity, check: str, text: str, fix: str = "", **numbers: Any) -> Finding:
    return Finding(severity, check, text, fix, numbers)


ok, note, warning, error = (functools.partial(_finding, severity) for severity in SEVERITIES)


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


# --- the report for people ------------------------------------------------------------------------

_MARKS = {"ok": "ok", "note": "note", "warning": "WARN", "error": "FAIL"}
_CHECK_WIDTH = 18


def text_of(reported: Sequence[Reported], *, num_processes: int) -> str:
    """The text that process 0 prints.

    A check that is fine but differs between processes (disk speed) is shown for the first one only.
    """
    lines: list[str] = []
    shown_checks: set[str] = set()
    for one in reported:
        finding = one.finding
        if finding.severity == "ok":
            if finding.check in shown_checks:
                continue
            shown_checks.add(finding.check)
        text = finding.text + _where(one, num_processes)
        lines += wrap(text, head=f"{_MARKS[finding.severity]:<5} {finding.check:<{_CHECK_WIDTH}} ")
        if finding.fix:
            lines += wrap(finding.fix, head=" " * (7 + _CHECK_WIDTH) + "fix: ")
    return "\n".join([*lines, "", verdict(reported)])


def verdict(reported: Sequence[Reported]) -> str:
    """The last line."""
    counts = {s: sum(one.finding.severity == s for one in reported) for s in SEVERITIES}
    shown = [
        f"{counts[s]} {s}{'' if counts[s] == 1 else 's'}" for s in ("error", "warning") if counts[s]
    ]
    advice = {
        "error": "do not start a long run before the errors are fixed",
        "warning": "a run works, but see the warnings first",
        "note": "ready for a run",
        "ok": "ready for a run",
    }[worst(reported)]
    return f"{', '.join(shown)}: {advice}" if shown else advice


def _where(one: Reported, num_processes: int) -> str:
    """Which processes a finding is about; empty if it is about all."""
    of_a_job = one.finding.check.startswith(_OF_A_JOB)
    if num_processes == 1 or len(one.processes) == num_processes or of_a_job:
        return ""
    names = few(list(map(str, one.processes)), 4)
    return f" [process {names} on {few(one.hosts, 3)}]"


_OF_A_JOB = (
    *("job", "same software", "network", "clocks", "shared directory", "mesh", "settings"),
    *("devices", "all-reduce"),
)
"""How checks of the whole job begin; process 0 reports them."""
