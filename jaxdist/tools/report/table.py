"""Format the comparison as text: a column per run, a row per outcome or differing setting."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from jaxdist.runtime.formatting.numbers import (
    TIMES,
    UNITS,
    count,
    in_bytes,
    in_si,
    money,
    percent,
)
from jaxdist.runtime.formatting.tables import columns
from jaxdist.tools.report.runs import ReportedRun

NOTHING = "-"

_IGNORED = ("name", "run_dir")
"""Settings that identify a run and do not explain different results."""


def differences(runs: Sequence[ReportedRun]) -> dict[str, dict[str, Any]]:
    """Return setting -> run -> value (None if not set) for each setting that differs."""
    configured = [run for run in runs if run.config]
    keys = sorted({key for run in configured for key in run.config})
    differing = {}
    for key in keys:
        if key.rpartition(".")[2] in _IGNORED:
            continue
        values = [run.config.get(key) for run in configured]
        if any(value != values[0] for value in values):
            differing[key] = {run.name: run.config.get(key) for run in configured}
    return differing


def outcome_rows(runs: Sequence[ReportedRun]) -> list[tuple[str, list[str]]]:
    """Return (label, one cell per run) for each outcome that a run has; some rows star the best."""
    rows: list[tuple[str, list[str]]] = []

    def add(label: str, show: Callable[[ReportedRun], str], best: str = "", key: str = "") -> None:
        cells = [show(run) for run in runs]
        if best:
            cells = _starred(cells, [run.outcome.get(key) for run in runs], best)
        if any(cell != NOTHING for cell in cells):
            rows.append((label, cells))

    add("ended", lambda run: run.outcome["exit_reason"])
    add("steps", _steps)
    add("train loss", _number("train_loss", "{:.4f}"))
    add("eval loss", _number("eval_loss", "{:.4f}"), "min", "eval_loss")
    for name in dict.fromkeys(name for run in runs for name in run.outcome["eval_losses"]):
        add(f"eval loss, {name}", _set_loss(name))
    add("bits per byte", _number("eval_bits_per_byte", "{:.4f}"))
    add("best eval loss", _best_eval, "min", "best_eval_loss")
    add("trained on", lambda run: _units(run, "units", ""))
    add("speed", lambda run: _units(run, "units_per_s", "/s"), "max", "units_per_s")
    add("per device", lambda run: _units(run, "units_per_s_per_device", "/s"))
    add("step time", _number("step_time_s", "{:.1f} ms", 1000))
    add("MFU", _mfu, "max", "mfu")
    add("peak memory", lambda run: _cell(run.outcome["memory_peak_bytes"], in_bytes))
    add("devices", _devices)
    add("device-hours", _number("device_hours", "{:.3g}"))
    add("cost", lambda run: _cell(run.outcome["cost"], money))
    for key in ("starts", "skipped_steps", "recompilations", "warnings"):
        add(key.replace("_", " "), _number(key, "{}", 1))
    add("commit", lambda run: run.outcome.get("commit") or NOTHING)
    return rows


def difference_rows(runs: Sequence[ReportedRun]) -> list[tuple[str, list[str]]]:
    """Return (label, one cell per run) for each setting that differs."""
    return [
        (key, [_value(values.get(run.name)) for run in runs])
        for key, values in differences(runs).items()
    ]


def text_table(runs: Sequence[ReportedRun]) -> str:
    """Return outcomes and differing settings of runs as aligned text, a column per run."""
    head = ("", [run.name for run in runs])
    outcome, changed = outcome_rows(runs), difference_rows(runs)
    if len(runs) > 1:  # pad every cell for the star, so that numbers stay aligned
        (head,), outcome, changed = _padded([head]), _padded(outcome), _padded(changed)
    rows = columns([(label, *cells) for label, cells in [head, *outcome, *changed]])
    lines, below = rows[: 1 + len(outcome)], rows[1 + len(outcome) :]
    if changed:
        lines += ["", "config", *below]
    elif len(runs) > 1 and any(run.config for run in runs):
        lines += ["", "config      no difference"]
    if len(runs) > 1:
        lines += ["", "* the best of the row"]
    return "\n".join(lines)


def _padded(rows: Sequence[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
    return [(label, [c if c.endswith(" *") else f"{c}  " for c in cells]) for label, cells in rows]


def _starred(cells: list[str], values: list[Any], best: str) -> list[str]:
    finite = [v for v in values if isinstance(v, int | float) and math.isfinite(v)]
    if len(finite) < 2 or min(finite) == max(finite):
        return cells
    winner = min(finite) if best == "min" else max(finite)
    return [
        f"{cell} *" if value == winner else cell
        for cell, value in zip(cells, values, strict=True)
    ]  # fmt: skip


def _cell(value: Any, show: Callable[[Any], str]) -> str:
    return NOTHING if value is None else show(value)


def _number(key: str, pattern: str, scale: float = 1.0) -> Callable[[ReportedRun], str]:
    return lambda run: _cell(run.outcome[key], lambda value: pattern.format(scale * value))


def _steps(run: ReportedRun) -> str:
    step, total = run.outcome["step"], run.outcome["total_steps"]
    return NOTHING if step is None else f"{step}/{total}" if total else str(step)


def _set_loss(name: str) -> Callable[[ReportedRun], str]:
    return lambda run: _cell(run.outcome["eval_losses"].get(name), "{:.4f}".format)


def _best_eval(run: ReportedRun) -> str:
    loss, step = run.outcome["best_eval_loss"], run.outcome["best_eval_step"]
    return NOTHING if loss is None else f"{loss:.4f} at {step}"


def _units(run: ReportedRun, key: str, per: str) -> str:
    short = UNITS.get(run.unit, run.unit)
    show = count if per else in_si
    return _cell(run.outcome[key], lambda value: f"{show(value)} {short}{per}")


def _mfu(run: ReportedRun) -> str:
    convention = run.outcome["mfu_convention"] or ""
    return _cell(run.outcome["mfu"], lambda mfu: f"{percent(mfu)} {convention}".rstrip())


def _devices(run: ReportedRun) -> str:
    count, kind = run.outcome["num_devices"], run.outcome.get("device_kind")
    return NOTHING if count is None else f"{count} {TIMES} {kind}" if kind else str(count)


def _value(value: Any) -> str:
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)
