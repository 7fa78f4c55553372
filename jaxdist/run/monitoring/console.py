"""What a person reads: the header, the step line, the closing block. Pure text, no printing.

`Style` colours for terminals; every line is made twice, plain for log files and styled for a tty.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdist.runtime.formatting.numbers import (
    TIMES,
    UNITS,
    count,
    duration,
    in_bytes,
    in_si,
    money,
    percent,
)
from jaxdist.runtime.formatting.tables import wrap

LABEL_WIDTH = 11
"""Width of the label column of header and closing block."""


def _lines(text: str) -> list[str]:
    """A long sentence as the lines of a block."""
    return wrap(text, 84)


@dataclasses.dataclass(frozen=True)
class Style:
    """ANSI colours, or nothing at all when `enabled` is False."""

    enabled: bool = False

    def bold(self, text: str) -> str:
        """Numbers that matter most."""
        return f"\033[1m{text}\033[0m" if self.enabled else text

    def dim(self, text: str) -> str:
        """Labels and units."""
        return f"\033[2m{text}\033[0m" if self.enabled else text

    def warn(self, text: str) -> str:
        """What needs attention."""
        return f"\033[33m{text}\033[0m" if self.enabled else text


_SHOWN = ("loss", "learning_rate", "grad_norm")
_BOOKKEEPING = ("weight", "applied", "tokens", "loss_finite_steps")


def step_line(
    record: Mapping[str, Any],
    *,
    total_steps: int,
    unit: str = "tokens",
    convention: str | None = None,
    eta_s: float | None = None,
    metrics: Sequence[str] = (),
    style: Style | None = None,
) -> str:
    """One aligned line for one step.

    Args:
        record: step, loss, ... as in metrics.jsonl; what is absent is left out.
        total_steps: where the run ends.
        unit: what is counted, `Model.unit`.
        convention: of the MFU.
        eta_s: seconds to go.
        metrics: names in `record` that the model added, shown after the known ones.
        style: colours.
    """
    style = style or Style()
    width = len(str(total_steps))
    parts = [style.dim("step ") + style.bold(f"{record['step']:>{width}}/{total_steps}")]

    def add(label: str, value: str, suffix: str = "", *, strong: bool = False) -> None:
        shown = style.bold(value) if strong else value
        parts.append((style.dim(f"{label} ") if label else "") + shown + style.dim(suffix))

    if "loss" in record:
        add("loss", f"{record['loss']:8.4f}", strong=True)
    if "learning_rate" in record:
        add("lr", f"{record['learning_rate']:8.2e}")
    if "grad_norm" in record:
        add("grad", f"{record['grad_norm']:7.3g}")
    for name in metrics:
        if name not in _SHOWN + _BOOKKEEPING and isinstance(record.get(name), int | float):
            add(name, f"{record[name]:.4g}")
    short = UNITS.get(unit, unit)
    if record.get(f"{unit}_per_s") is not None:
        add("", f"{count(record[f'{unit}_per_s']):>9}", f" {short}/s")
        add("", f"{count(record[f'{unit}_per_s_per_device']):>8}", f" {short}/s/device")
    if "mfu" in record:
        add("MFU", f"{100 * record['mfu']:4.1f}", f" % {convention}")
    if record.get("step_time_s") is not None:
        add("", f"{1000 * record['step_time_s']:7.1f}", " ms")
    if "memory_bytes" in record:
        add("mem", f"{in_bytes(record['memory_bytes']):>9}")
    if eta_s is not None:
        add("ETA", f"{duration(eta_s):>6}")
    return "  ".join(parts)


def eval_line(record: Mapping[str, Any], *, total_steps: int, style: Style | None = None) -> str:
    """One line for one evaluation."""
    style = style or Style()
    width = len(str(total_steps))
    parts = [style.dim("eval ") + style.bold(f"{record['step']:>{width}}/{total_steps}")]
    for name, value in record.items():
        if name in ("kind", "time", "step") or not isinstance(value, int | float):
            continue
        shown = f"{value:8.4f}" if name == "loss" else f"{value:.6g}"
        parts.append(style.dim(f"{name} ") + (style.bold(shown) if name == "loss" else shown))
    return "  ".join(parts)


def block(
    rows: Sequence[tuple[str, str | Sequence[str]]], style: Style | None = None
) -> str:  # fmt: skip
    """Rows of label and text (or several lines of it), labels in one column."""
    style = style or Style()
    lines = []
    for label, text in rows:
        values = [text] if isinstance(text, str) else list(text)
        for i, value in enumerate(values):
            shown = style.dim(f"{label if i == 0 else '':<{LABEL_WIDTH}}")
            lines.append(f"{shown} {value}".rstrip())
    return "\n".join(lines)


def header_rows(facts: Mapping[str, Any]) -> list[tuple[str, str | Sequence[str]]]:
    """The rows of the header, from the facts of the `run` event."""
    batch = (
        f"{facts['global_batch_size']:,} = {facts['per_device_batch']} per device {TIMES} "
        f"{facts['num_replicas']} replicas {TIMES} {facts['accumulation']} accumulation"
    )
    if facts["tokens_per_row"] > 1:
        units = facts["global_batch_size"] * facts["tokens_per_row"]
        batch += f"; {units:,} {facts['unit']} a step"
    rows: list[tuple[str, str | Sequence[str]]] = [
        ("devices", f"{facts['num_devices']} {TIMES} {facts['device_kind']}"),
        ("mesh", [facts["mesh"], *(_lines(facts["mesh_reason"]) if facts["mesh_reason"] else [])]),
        ("model", f"{facts['model']}, {in_si(facts['num_parameters'])} parameters"),
        ("batch", batch),
        ("precision", facts["precision"]),
    ]
    if facts["notes"]:
        rows.append(("kernels", [line for note in facts["notes"] for line in _lines(note)]))
    rows.append(("MFU", _describe_mfu(facts)))
    return rows


def _describe_mfu(facts: Mapping[str, Any]) -> str:
    peak, convention = facts["peak_flops"], facts["mfu_convention"]
    if peak is None:
        kind = facts["device_kind"]
        return f"not shown: the peak of {kind!r} is not known (set --monitoring.peak_tflops)"
    if convention is None:
        return "not shown: the model states no FLOPs per token"
    counted = {"causal": "causal, half of S² attention", "full": "full, all of S² attention"}
    return f"{counted.get(convention, convention)}; peak {peak / 1e12:,.1f} TFLOP/s a device"


def event_line(event: str, fields: Mapping[str, Any]) -> str:
    """`name key=value ...` for an event that brings no sentence of its own."""
    shown = []
    for name, value in fields.items():
        if isinstance(value, float):
            value = f"{value:.4g}"
        shown.append(f"{name}={value}")
    return " ".join([event.replace("_", " "), *shown])


def idle_lines(summary: Mapping[str, Any]) -> list[str]:
    """Why devices were surely busy for less than 80 % of the steps; [] when they were."""
    lines = []
    busy = summary.get("busy_share")
    if busy is not None and busy < _BUSY:
        causes = [
            (summary.get("dry_data_share", 0.0), "waiting for data"),
            (summary.get("dry_host_share", 0.0), "work on the host between dispatches"),
        ]
        shown = ", ".join(f"{percent(share)} {words}" for share, words in sorted(causes)[::-1])
        advice = {
            "waiting for data": "tokenise the corpus once, or use a faster disk",
            "work on the host between dispatches": "log less often, or give the host more cores",
        }[max(causes)[1]]
        lines += _lines(
            f"devices ran out of work in {percent(1 - busy)} of the time of steps: {shown} "
            f"({advice})"
        )
    steps_s, wall_s = summary.get("steps_s", 0.0), summary.get("wall_s", 0.0)
    if steps_s and steps_s < _BUSY * wall_s and wall_s > _LONG_S:
        compile_s = summary.get("compile_s", 0.0)
        rest = max(0.0, wall_s - steps_s - compile_s)
        lines += _lines(
            f"steps took {percent(steps_s / wall_s)} of the time; compilation "
            f"{percent(compile_s / wall_s)}; start, evaluation and saves {percent(rest / wall_s)}"
        )
    return lines


_BUSY = 0.8
_LONG_S = 60.0
"""A run of seconds always spends most of them on starting."""


def closing_rows(
    summary: Mapping[str, Any], next_commands: Sequence[str]
) -> list[tuple[str, str | list[str]]]:
    """The rows of the closing block, from the summary."""
    rows: list[tuple[str, str | list[str]]] = [
        (
            "ended",
            f"{summary['exit_reason']} at step {summary['step']}/{summary['total_steps']} "
            f"after {duration(summary['wall_s'])}",
        )
    ]
    if summary.get("error"):
        rows.append(("error", _lines(str(summary["error"]))))
    losses = []
    if "loss" in summary:
        losses.append(f"{summary['loss']:.4f} train")
    if "eval" in summary and "loss" in summary["eval"]:
        losses.append(f"{summary['eval']['loss']:.4f} eval at step {summary['eval']['step']}")
    if "best_eval" in summary and summary["best_eval"]["step"] != summary["eval"]["step"]:
        losses.append(
            f"best {summary['best_eval']['loss']:.4f} at step {summary['best_eval']['step']}"
        )
    if losses:
        rows.append(("loss", ", ".join(losses)))
    unit = summary["unit"]
    short = UNITS.get(unit, unit)
    if f"{unit}_per_s" in summary:
        speed = [f"{count(summary[f'{unit}_per_s'])} {short}/s"]
        if summary["num_devices"] > 1:
            speed.append(f"{count(summary[f'{unit}_per_s_per_device'])} per device")
        if "mfu" in summary:
            speed.append(f"MFU {percent(summary['mfu'])} ({summary['mfu_convention']})")
        rows.append(("speed", ", ".join(speed)))
    spent = [f"{summary['device_hours']:.3g} device-hours"]
    if "cost" in summary:
        spent.append(f"cost {money(summary['cost'])}")
    if summary.get("compile_s"):
        spent.append(f"compilation {duration(summary['compile_s'])}")
    if summary.get("data_wait_share") is not None:
        spent.append(f"waiting for data {percent(summary['data_wait_share'])} of the time")
    rows.append(("spent", ", ".join(spent)))
    if explained := idle_lines(summary):
        rows.append(("idle", explained))
    for slow in summary.get("stragglers", [])[:3]:
        rows.append(
            (
                "slow",
                f"process {slow['process']} on {slow['host']} held the others up ({slow['cause']}) "
                f"in {slow['intervals']} comparisons",
            )
        )
    if "memory_peak_bytes" in summary:
        rows.append(("memory", f"{in_bytes(summary['memory_peak_bytes'])} at most, fullest device"))
    troubles = [
        f"{summary[key]} {label}"
        for key, label in (
            ("skipped_steps", "skipped steps"),
            ("recompilations", "further compilations of the step"),
            ("warnings", "warnings"),
        )
        if summary.get(key)
    ]
    if troubles:
        rows.append(("trouble", ", ".join(troubles) + " (events in metrics.jsonl)"))
    for trace in summary.get("profiles", []):
        opened = f"https://ui.perfetto.dev with {trace['file']}, or " if "file" in trace else ""
        lines = [
            f"steps {trace['first']} to {trace['last']} in {trace['path']}",
            f"open it: {opened}pip install xprof && xprof --logdir {trace['path']}",
        ]
        rows.append(("profile", lines))
    if summary.get("checkpoint"):
        rows.append(("checkpoint", str(summary["checkpoint"])))
    rows.append(("run", str(summary["run_dir"])))
    if next_commands:
        rows.append(("next", list(next_commands)))
    return rows
