"""One HTML file with the tables and curves of runs; it loads nothing and runs no script."""

from __future__ import annotations

import html
from collections.abc import Sequence

from jaxdist.tools.report.charts import COLOURS, Line, chart
from jaxdist.tools.report.runs import Run
from jaxdist.tools.report.table import difference_rows, outcome_rows

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --faint: #8884; --soft: #667; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --paper: #16181c; --soft: #9aa; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 960px; margin: 2.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .9rem .25rem 0; text-align: right; border-bottom: 1px solid var(--faint); }
th:first-child { text-align: left; font-weight: normal; color: var(--soft); }
figure { margin: 1.5rem 0; } figcaption { font-weight: 600; margin-bottom: .3rem; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: var(--soft); }
svg .grid { stroke: var(--faint); } svg .bad { fill: #d00; font-size: 15px; }
svg .mark { stroke: var(--soft); stroke-dasharray: 2 4; }
.swatch { display: inline-block; width: .8em; height: .8em; border-radius: 2px;
          margin-right: .4em; }
.note { color: var(--soft); }
"""


def html_page(runs: Sequence[Run], *, x: str = "step") -> str:
    """The page for `runs`.

    Args:
        runs: in the order of their colours.
        x: "step" or "tokens", what the curves run over.
    """
    names = ", ".join(run.name for run in runs)
    changed = difference_rows(runs)
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{html.escape(names)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{html.escape(names)}</h1>",
        _table(runs, outcome_rows(runs)),
        *_curves(runs, x),
    ]
    if changed:
        parts += ["<h2>What differs in the configs</h2>", _table(runs, changed)]
    parts.append("</body></html>")
    return "\n".join(parts) + "\n"


def _table(runs: Sequence[Run], rows: Sequence[tuple[str, list[str]]]) -> str:
    head = "".join(
        f'<th><span class="swatch" style="background:{_colour(i)}"></span>'
        f"{html.escape(run.name)}</th>"
        for i, run in enumerate(runs)
    )
    body = []
    for label, cells in rows:
        shown = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        body.append(f"<tr><th>{html.escape(label)}</th>{shown}</tr>")
    return "\n".join(
        ['<div class="scroll"><table>', f"<tr><th></th>{head}</tr>", *body, "</table></div>"]
    )


def _curves(runs: Sequence[Run], x: str) -> list[str]:
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
        ("time spent waiting for data (% of the step)", "data_wait", 100.0),
    ):
        lines = [
            Line(run.name, _colour(i), _points(run, key, x, scale), dots=key == "eval")
            for i, run in enumerate(runs)
        ]
        figures.append(chart(title, lines, x_label=x_label, marks=marks))
    drawn = [figure for figure in figures if figure]
    if not drawn:
        return ['<p class="note">No step has been recorded yet.</p>']
    note = (
        "Lines are medians of neighbouring steps over a band from the least to the greatest value; "
        "a red cross marks a value that is not finite, a dashed line a restart."
    )
    return ["<h2>Curves</h2>", f'<p class="note">{note}</p>', *drawn]


def _points(run: Run, key: str, x: str, scale: float) -> list[tuple[float, float]]:
    if key == "eval":
        return [(_position(run, r["step"], x), scale * r["loss"]) for r in run.evals if "loss" in r]
    points = []
    for record in run.train:
        value = _share(record) if key == "data_wait" else record.get(key)
        if isinstance(value, int | float):
            at = record["step"] if x == "step" else record.get(run.unit, 0.0)
            points.append((float(at), scale * value))
    return points


def _share(record: dict[str, float]) -> float | None:
    if not record.get("step_time_s") or "data_wait_s" not in record:
        return None
    return record["data_wait_s"] / record["step_time_s"]


def _position(run: Run, step: int, x: str) -> float:
    """Where a step lies on the axis; in tokens, where the nearest recorded step before it lies."""
    if x == "step":
        return float(step)
    before = [record.get(run.unit, 0.0) for record in run.train if record["step"] <= step]
    return float(before[-1]) if before else 0.0


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]
