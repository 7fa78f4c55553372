"""The page of `--html`: the tables and curves of runs in one HTML file that loads nothing."""

from __future__ import annotations

import functools
import html
import io
import math
from collections.abc import Sequence
from typing import Any

from jaxdist.runtime.formatting.numbers import GIB
from jaxdist.settings import ConfigError
from jaxdist.tools.report.runs import ReportedRun, set_losses
from jaxdist.tools.report.table import difference_rows, outcome_rows

_CURVES = (
    ("training loss", "loss", 1.0),
    ("evaluation loss", "eval", 1.0),
    ("{unit} per second", "{unit}_per_s", 1.0),
    ("MFU (%)", "mfu", 100.0),
    ("gradient norm", "grad_norm", 1.0),
    ("learning rate", "learning_rate", 1.0),
    ("time spent waiting for data (% of the step)", "data_wait_s", 100.0),
    ("device memory in use (GiB)", "memory_bytes", 1 / GIB),
    ("GPU power, mean (W)", "gpu_power_w", 1.0),
    ("GPU temperature, hottest (°C)", "gpu_temperature_c", 1.0),
)
"""Title, key of the records and factor of each chart; `{unit}` is "tokens" or "images"."""

_LOGARITHMIC = ("loss", "eval", "grad_norm", "learning_rate")
"""Curves that `log_y` draws on a logarithmic axis, besides the losses of named sets."""

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 960px; margin: 2.5rem auto; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
div { overflow-x: auto; } svg { width: 100%; height: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .9rem .25rem 0; text-align: right; border-bottom: 1px solid #8884;
         white-space: nowrap; }
th:first-child { text-align: left; font-weight: normal; }
"""


def html_page(runs: Sequence[ReportedRun], *, x: str = "step", log_y: bool = False) -> str:
    """Return an HTML page that compares `runs`; `x` is the x axis, "step" or "tokens".

    `log_y` draws losses, gradient norm and learning rate on logarithmic axes.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise ConfigError(
            "--html draws curves with matplotlib, which is not installed. Run "
            "`pip install -c constraints.txt -e '.[report]'`, or leave --html out."
        ) from None
    palette = mpl.colormaps["tab10" if len(runs) <= 10 else "turbo"].resampled(max(10, len(runs)))
    colors = [mpl.colors.to_hex(palette(i)) for i in range(len(runs))]
    changed = difference_rows(runs)
    body = [_table(runs, colors, outcome_rows(runs)), "<h2>Curves</h2>"]
    if figure := draw_curves(runs, colors, x=x, log_y=log_y):
        note = "A red cross marks a value that is not finite; a dotted line marks a restart."
        text = io.StringIO()
        with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jaxdist"}):
            no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            figure.savefig(text, format="svg", metadata=no_metadata)
        svg = text.getvalue()
        body += [f"<p>{note}</p>", svg[svg.index("<svg") :]]
    else:
        body.append("<p>No step has been recorded yet.</p>")
    if changed:
        body += ["<h2>Settings that differ</h2>", _table(runs, colors, changed)]
    title = html.escape(", ".join(run.name for run in runs))
    head = f'<meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
    return "\n".join(["<!doctype html>", head, f"<h1>{title}</h1>", *body, ""])


def html_summary(run: ReportedRun) -> str:
    """Return the results of a run as an HTML table, for notebooks."""
    return _table([run], ["inherit"], outcome_rows([run]))


def _table(
    runs: Sequence[ReportedRun], colors: Sequence[str], rows: Sequence[tuple[str, list[str]]]
) -> str:
    names = "".join(
        f'<th><span style="color:{color}">■</span> {html.escape(run.name)}</th>'
        for run, color in zip(runs, colors, strict=True)
    )
    lines = [
        f"<tr><th>{html.escape(label)}</th>"
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for label, cells in rows
    ]
    return "\n".join(["<div><table>", f"<tr><th></th>{names}</tr>", *lines, "</table></div>"])


def draw_curves(
    runs: Sequence[ReportedRun], colors: Sequence[str], *, x: str = "step", log_y: bool = False
) -> Any:
    """Return a matplotlib figure with one chart per quantity; None without a finite value.

    A notebook shows it as an image, also if pyplot is not imported.
    """
    from matplotlib.figure import Figure

    unit = runs[0].unit
    charts = []
    sets = dict.fromkeys(name for run in runs for name in set_losses(run.evals))
    named = [(f"evaluation loss, {name}", f"{name}/loss", 1.0) for name in sets]
    for title, key, scale in [*_CURVES[:2], *named, *_CURVES[2:]]:
        lines = [_points(run, key.format(unit=unit), x, scale) for run in runs]
        if any(math.isfinite(y) for line in lines for _, y in line):
            charts.append((title.format(unit=unit), key, lines))
    if not charts:
        return None
    figure = Figure(figsize=(9, 3.4 * len(charts)), layout="constrained")
    for row, (title, key, lines) in enumerate(charts, start=1):
        axes = figure.add_subplot(len(charts), 1, row)
        axes.set(title=title, xlabel="step" if x == "step" else unit)
        axes.grid(alpha=0.3)
        is_eval = key == "eval" or key.endswith("/loss")
        if log_y and (is_eval or key in _LOGARITHMIC):
            axes.set_yscale("log")
        for run, color, line in zip(runs, colors, lines, strict=True):
            _draw(axes, run, color, line, x, "o--" if is_eval else "-")
    image: Any = figure
    image._repr_png_ = functools.partial(_png_of, figure)
    return image


def _png_of(figure: Any) -> bytes:
    image = io.BytesIO()
    figure.savefig(image, format="png")
    return image.getvalue()


def _draw(
    axes: Any, run: ReportedRun, color: str, line: list[tuple[float, float]], x: str, style: str
) -> None:
    """Draw one curve, a red cross for each value that is not finite, and lines for restarts."""
    axes.plot([at for at, _ in line], [y for _, y in line], style, color=color, lw=1.2, ms=4)
    bad = [at for at, y in line if not math.isfinite(y)]
    axes.plot(bad, [0.95] * len(bad), "x", color="red", transform=axes.get_xaxis_transform())
    for step in run.restarts:
        axes.axvline(_position(run, step, x), color=color, ls=":", lw=1)


def _points(run: ReportedRun, key: str, x: str, scale: float) -> list[tuple[float, float]]:
    if key == "eval" or key.endswith("/loss"):
        key = "loss" if key == "eval" else key
        return [(_position(run, r["step"], x), scale * r[key]) for r in run.evals if key in r]
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
    """Return a step's position on the x axis: the step, or the tokens or images until then."""
    if x == "step":
        return float(step)
    before = [record.get(run.unit, 0.0) for record in run.train if record["step"] <= step]
    return float(before[-1]) if before else 0.0
