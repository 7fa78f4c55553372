"""The report for people: one line per finding, its fix below it, the verdict last."""

from __future__ import annotations

from collections.abc import Sequence

from jaxdist.runtime.formatting.tables import few, wrap
from jaxdist.tools.doctor.findings import SEVERITIES, Reported, worst

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
