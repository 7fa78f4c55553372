"""An audit as text: what moves, on which axis, how often, how many bytes, and what asks for it."""

from __future__ import annotations

from collections.abc import Iterable

from jaxdist.plan.audit.step import Audit
from jaxdist.plan.audit.transfers import Transfer
from jaxdist.runtime.formatting.numbers import in_bytes
from jaxdist.runtime.formatting.tables import columns, wrap


def text_of(audit: Audit) -> str:
    """The table of transfers, then the violations, then the verdict."""
    lines = columns(_rows(audit.transfers), left=4) if audit.transfers else []
    if any(transfer.at_most for transfer in audit.transfers):
        lines += ["", "≤: some stand in branches that a pipeline stage takes only in some ticks."]
    for violation in audit.violations:
        lines += ["", *wrap(str(violation), head="  ✗ ")]
    return "\n".join([*lines, "", audit.line()]).lstrip("\n")


def _rows(transfers: Iterable[Transfer]) -> list[tuple[str, ...]]:
    head = ("what asks for it", "collective", "over", "dtype", "times a step", "bytes a step")
    rows: list[tuple[str, ...]] = [head]
    for one in transfers:
        most = "≤ " if one.at_most else ""
        rows.append(
            (
                one.purpose,
                one.kind,
                "+".join(one.axes),
                one.dtype,
                f"{most}{one.times}",
                most + in_bytes(one.num_bytes),
            )
        )
    return rows
