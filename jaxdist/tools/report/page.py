"""One HTML file with the tables and curves of runs; it loads nothing and runs no script."""

from __future__ import annotations

from collections.abc import Sequence

from jaxdist.runtime.formatting import html
from jaxdist.runtime.formatting.charts import Line, chart, colour_of
from jaxdist.runtime.formatting.numbers import GIB
from jaxdist.tools.report.runs import ReportedRun
from jaxdist.tools.report.table import difference_rows, outcome_rows

_LOGARITHMIC = ("loss", "eval", "grad_norm", "learning_rate")
"""Curves that `log_y` draws on a logarithmic axis; the others are shares and amounts."""


def html_page(runs: Sequence[ReportedRun], *, x: str = "step", log_y: bool = False) -> str:
    """The page for `runs` in the order of their colours; curves run over "step" or "tokens".

    `log_y` draws losses, gradient norm and learning rate on logarithmic axes.
    """
    names = ", ".join(run.name for run in runs)
    changed = difference_rows(runs)
    body = [_table(runs, outcome_rows(runs)), *_curves(runs, x, log_y)]
    if changed:
        body += ["<h2>What differs in the configs</h2>", _table(runs, changed)]
    return html.page(names, body)


def _table(runs: Sequence[ReportedRun], rows: Sequence[tuple[str, list[str]]]) -> str:
    head = ["", *(run.name for run in runs)]
    colours = [colour_of(i) for i in range(len(runs))]
    return html.table(head, [(label, *cells) for label, cells in rows], colours)


def _curves(runs: Sequence[ReportedRun], x: str, log_y: bool) -> list[str]:
    unit = runs[0].unit
    x_label = "step" if x == "step" else unit
    marks = [
        (_position(run, step, x), f"{run.name}: started again after step {step}")
        for run in runs
        for step in run.restarts
    ]
    figures = []
    for title, key, scale in (
        ("training loss", "loss", 1.0),
        ("evaluation loss", "eval", 1.0),
        (f"{unit} per second", f"{unit}_per_s", 1.0),
        ("MFU (%)", "mfu", 100.0),
        ("gradient norm", "grad_norm", 1.0),
        ("learning rate", "learning_rate", 1.0),
        ("time spent waiting for data (% of the step)", "data_wait_s", 100.0),
        ("device memory in use (GiB)", "memory_bytes", 1 / GIB),
        ("GPU power, mean (W)", "gpu_power_w", 1.0),
        ("GPU temperature, hottest (°C)", "gpu_temperature_c", 1.0),
    ):
        lines = [
            Line(run.name, colour_of(i), _points(run, key, x, scale), dots=key == "eval")
            for i, run in enumerate(runs)
        ]
        log = log_y and key in _LOGARITHMIC
        figures.append(chart(title, lines, x_label=x_label, marks=marks, log_y=log))
    drawn = [figure for figure in figures if figure]
    if not drawn:
        return ['<p class="note">No step has been recorded yet.</p>']
    note = (
        "Lines are medians of neighbouring steps over a band from the least to the greatest value; "
        "a red cross marks a value that is not finite, a dashed line a restart."
    )
    return ["<h2>Curves</h2>", f'<p class="note">{note}</p>', *drawn]


def _points(run: ReportedRun, key: str, x: str, scale: float) -> list[tuple[float, float]]:
    if key == "eval":
        return [(_position(run, r["step"], x), scale * r["loss"]) for r in run.evals if "loss" in r]
    points = []
    for record in run.train:
        value = record.get(key)
        if key == "data_wait_s":  # as a share of the step
            step_s = record.get("step_time_s")
            value = value / step_s if step_s and value is not None else None
        if isinstance(value, int | float):
            at = record["step"] if x == "step" else record.get(run.unit, 0.0)
            points.append((float(at), scale * value))
    return points


def _position(run: ReportedRun, step: int, x: str) -> float:
    """Where a step lies on the axis; in tokens, where the nearest recorded step before it lies."""
    if x == "step":
        return float(step)
    before = [record.get(run.unit, 0.0) for record in run.train if record["step"] <= step]
    return float(before[-1]) if before else 0.0
