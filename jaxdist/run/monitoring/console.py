"""Text of the console: the header, the lines of steps and evaluations, the closing block."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

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

Row: TypeAlias = tuple[str, str]
"""Label and text of a block. The text may have several lines; a row without text is omitted."""

_LABEL_WIDTH = 11
_COMMON = ("loss", "learning_rate", "grad_norm")
_BOOKKEEPING = ("weight", "applied", "tokens", "loss_finite_steps")
_WIDTH_OF_ONE, _WIDTH_OF_MANY = 80, 120
"""Maximum width of a step line in columns: for one device, and for several devices."""
_BUSY = 0.8
_LONG_S = 60.0
"""Shorter runs get no explanation, because they always spend most of their time on startup."""


def plain(styled: str) -> str:
    """Return the text without colors."""
    return re.sub(r"\033\[\d+m", "", styled)


def _bold(text: str) -> str:
    return f"\033[1m{text}\033[0m"


def _dim(text: str) -> str:
    return f"\033[2m{text}\033[0m"


def _wrapped(text: str) -> str:
    return "\n".join(wrap(text, 84)) if text else ""


def step_line(
    record: Mapping[str, Any],
    *,
    total_steps: int,
    unit: str,
    num_devices: int,
    eta_s: float | None,
    metrics: Sequence[str],
) -> str:
    """Return one aligned line for a step, from its record with median rates.

    If the line exceeds 80 columns (120 with several devices), numbers are dropped by priority, the
    step time first, but three stay.
    """
    short = UNITS.get(unit, unit)
    wide = num_devices > 1
    columns: list[tuple[int, str, str, str]] = []  # priority, label, value, unit

    def add(priority: int, label: str, name: str, form: Callable[[float], str], unit: str) -> None:
        if isinstance(record.get(name), int | float):
            columns.append((priority, label, form(record[name]), unit))

    add(9, "loss", "loss", lambda x: _bold(f"{x:7.4f}"), "")
    if record.get("weight") == 0:
        columns.append((9, "", "no labels", ""))
    add(3, "lr", "learning_rate", lambda x: f"{x:.2e}", "")
    add(6, "grad", "grad_norm", lambda x: f"{x:<4.3g}", "")
    for name in metrics:
        if name not in _COMMON + _BOOKKEEPING:
            add(4 if name == "accuracy" else 2, name, name, lambda x: f"{x:.4g}", "")
    add(8, "", f"{unit}_per_s", lambda x: f"{in_si(x):>5}", f" {short}/s")
    if wide:
        add(7, "", f"{unit}_per_s_per_device", lambda x: f"{in_si(x):>5}", "/s/device")
    add(5, "MFU", "mfu", percent, "")
    add(1, "", "step_time_s", lambda x: f"{duration(x):>6}", "")
    add(4, "mem", "memory_bytes", in_bytes, "")
    if eta_s is not None:
        columns.append((9, "ETA", duration(eta_s), ""))
    step = _progress("step", record, total_steps)
    parts = lambda: [step, *((_dim(f"{a} ") if a else "") + b + _dim(c) for _, a, b, c in columns)]
    limit = _WIDTH_OF_MANY if wide else _WIDTH_OF_ONE
    while len(plain("  ".join(parts()))) > limit and len(columns) > 3:
        columns.remove(min(columns))
    return "  ".join(parts())


def eval_line(record: Mapping[str, Any], *, total_steps: int) -> str:
    """Return one line with the metrics of an evaluation.

    With named sets, only loss, accuracy and bits per byte of each, and all metrics of tasks.
    """
    parts = [_progress("eval", record, total_steps)]
    is_task = {name: name.startswith("task/") for name in record}
    sets = any("/" in name and not task for name, task in is_task.items())
    for name, value in record.items():
        if name in ("kind", "time", "step") or not isinstance(value, int | float):
            continue
        of_set = name.endswith(("/loss", "/accuracy", "/bits_per_byte"))
        if sets and not (of_set or is_task[name]):
            continue
        is_loss = name.rpartition("/")[2] == "loss"
        text = _bold(f"{value:8.4f}") if is_loss else f"{value:.6g}"
        parts.append(_dim(f"{name} ") + text)
    return "  ".join(parts)


def _progress(label: str, record: Mapping[str, Any], total_steps: int) -> str:
    width = len(str(total_steps))
    return _dim(f"{label} ") + _bold(f"{record['step']:>{width}}/{total_steps}")


def event_line(event: str, fields: Mapping[str, Any]) -> str:
    """Return `name key=value ...` for an event without a message."""
    text = lambda value: f"{value:.4g}" if isinstance(value, float) else str(value)
    pairs = [f"{name}={text(value)}" for name, value in fields.items()]
    return " ".join([event.replace("_", " "), *pairs])


def block(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a block, with the labels in one column."""
    lines = []
    for label, text in rows:
        for i, line in enumerate(text.splitlines()):
            lines.append(_dim(f"{'' if i else label:<{_LABEL_WIDTH}}") + f" {line}".rstrip())
    return lines


def header_rows(facts: Mapping[str, Any]) -> list[Row]:
    """Return the rows of the header, from the fields of the `run` event."""
    batch = (
        f"{facts['global_batch_size']:,} = {facts['per_device_batch']} rows {TIMES} "
        f"{facts['num_replicas']} replicas {TIMES} {facts['accumulation']} accumulation"
    )
    if facts["tokens_per_row"] > 1:
        units = facts["global_batch_size"] * facts["tokens_per_row"]
        batch += f"; {units:,} {facts['unit']} a step"
    return [
        ("devices", f"{facts['num_devices']} {TIMES} {facts['device_kind']}"),
        ("mesh", f"{facts['mesh']}\n{_wrapped(facts['mesh_reason'])}"),
        ("model", f"{facts['model']}, {in_si(facts['num_parameters'])} parameters"),
        ("batch", batch),
        ("data", _wrapped(facts["data"])),
        ("precision", facts["precision"]),
        ("kernels", "\n".join(map(_wrapped, facts["notes"]))),
        ("MFU", _describe_mfu(facts)),
    ]


def _describe_mfu(facts: Mapping[str, Any]) -> str:
    peak, convention = facts["peak_flops"], facts["mfu_convention"]
    if peak is None:
        kind = facts["device_kind"]
        return f"unavailable: the peak of {kind!r} is unknown (set --monitoring.peak-tflops)"
    if convention is None:
        return "unavailable: the model has no FLOPs per token"
    counted = {"causal": "causal, half of S² attention", "full": "full, all of S² attention"}
    return f"{counted.get(convention, convention)}; peak {peak / 1e12:,.1f} TFLOP/s a device"


def closing_rows(summary: Mapping[str, Any], next_commands: Sequence[str]) -> list[Row]:
    """Return (label, text) rows of the block printed at the end of a run; texts may be ""."""
    ended = (
        f"{summary['exit_reason']} at step {summary['step']}/{summary['total_steps']} "
        f"after {duration(summary['wall_s'])}"
    )
    slow = [
        f"process {one['process']} on {one['host']} delayed the others ({one['cause']}) "
        f"in {one['intervals']} comparisons"
        for one in summary.get("stragglers", [])[:3]
    ]
    memory = summary.get("memory_peak_bytes")
    problems = [
        f"{summary[key]} {label}"
        for key, label in (
            ("skipped_steps", "skipped steps"),
            ("recompilations", "recompilations of the step"),
            ("warnings", "warnings"),
        )
        if summary.get(key)
    ]
    spent = [f"{summary['device_hours']:.3g} device-hours"]
    if "cost" in summary:
        spent.append(f"cost {money(summary['cost'])}")
    if summary.get("compile_s"):
        spent.append(f"compilation {duration(summary['compile_s'])}")
    if summary.get("data_wait_share") is not None:
        spent.append(f"waiting for data {percent(summary['data_wait_share'])} of the time")
    return [
        ("ended", ended),
        ("error", _wrapped(str(summary.get("error", "")))),
        ("loss", ", ".join(_losses(summary))),
        ("speed", ", ".join(_speed(summary))),
        ("spent", ", ".join(spent)),
        ("idle", "\n".join(idle_lines(summary))),
        *(("slow", line) for line in slow),
        ("memory", f"{in_bytes(memory)} peak on process 0's fullest device" if memory else ""),
        ("problems", ", ".join(problems) + " (events in metrics.jsonl)" if problems else ""),
        *(("profile", _describe_trace(trace)) for trace in summary.get("profiles", [])),
        ("checkpoint", str(summary.get("checkpoint", ""))),
        ("run", str(summary["run_dir"])),
        ("next", "\n".join(next_commands)),
    ]


def _losses(summary: Mapping[str, Any]) -> list[str]:
    losses = []
    if summary.get("loss") is not None:
        losses.append(f"{summary['loss']:.4f} train")
    newest, best = summary.get("eval", {}), summary.get("best_eval")
    if "loss" in newest:
        losses.append(f"{newest['loss']:.4f} eval at step {newest['step']}")
    losses += [f"{x:.4f} {k.removesuffix('/loss')}" for k, x in newest.items() if "/loss" in k]
    if best and best["step"] != newest["step"]:
        losses.append(f"best {best['loss']:.4f} at step {best['step']}")
    return losses


def _speed(summary: Mapping[str, Any]) -> list[str]:
    unit = summary["unit"]
    if f"{unit}_per_s" not in summary:
        return []
    speed = [f"{count(summary[f'{unit}_per_s'])} {UNITS.get(unit, unit)}/s"]
    if summary["num_devices"] > 1:
        speed.append(f"{count(summary[f'{unit}_per_s_per_device'])} per device")
    if "mfu" in summary:
        speed.append(f"MFU {percent(summary['mfu'])} ({summary['mfu_convention']})")
    return speed


def _describe_trace(trace: Mapping[str, Any]) -> str:
    viewer = f"https://ui.perfetto.dev with {trace['file']}, or " if "file" in trace else ""
    return (
        f"steps {trace['first']} to {trace['last']} in {trace['path']}\n"
        f"open it: {viewer}pip install xprof && xprof --logdir {trace['path']}"
    )


def idle_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return lines that explain if devices had work, or steps took, under 80 % of the time."""
    lines = []
    busy = summary.get("busy_share", 1.0)
    if busy < _BUSY:
        data, host = summary.get("dry_data_share", 0.0), summary.get("dry_host_share", 0.0)
        causes = [f"{percent(data)} waiting for data"]
        causes.insert(data > host, f"{percent(host)} work on the host between dispatches")
        advice = (
            "tokenize the corpus once, or use a faster disk"
            if data > host
            else "log less often, or give the host more cores"
        )
        lines.append(
            f"devices ran out of work in {percent(1 - busy)} of the step time: "
            f"{', '.join(causes)} ({advice})"
        )
    steps_s, wall_s = summary.get("steps_s", 0.0), summary.get("wall_s", 0.0)
    if steps_s and steps_s < _BUSY * wall_s and wall_s > _LONG_S:
        compile_s = summary.get("compile_s", 0.0)
        rest = max(0.0, wall_s - steps_s - compile_s)
        lines.append(
            f"steps took {percent(steps_s / wall_s)} of the time; compilation "
            f"{percent(compile_s / wall_s)}; start, evaluation and saves {percent(rest / wall_s)}"
        )
    return [part for line in lines for part in wrap(line, 84)]
