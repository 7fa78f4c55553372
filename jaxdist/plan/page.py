"""A plan as one HTML file with its plots; it loads nothing and runs no script."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from jaxdist.core.parallel.pipeline.simulation import RECOMPUTE, draw
from jaxdist.core.types import ConfigError
from jaxdist.plan import charts
from jaxdist.plan.advice import Advice
from jaxdist.plan.estimate.memory import GIB
from jaxdist.plan.estimate.search import Choice, why_not
from jaxdist.plan.numbers import in_days, in_gib, in_usd
from jaxdist.plan.planner import Plan
from jaxdist.plan.scaling import Size, sweep
from jaxdist.plan.text import text_of

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #ffffff; --faint: #8884; --soft: #667; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --paper: #16181c; --soft: #9aa; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 960px; margin: 2.5rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .9rem .25rem 0; text-align: right; border-bottom: 1px solid var(--faint); }
th:first-child, td:first-child, td:last-child { text-align: left; }
figure { margin: 1.5rem 0 0; } figcaption { font-weight: 600; margin-bottom: .3rem; }
svg { width: 100%; height: auto; } svg text { font-size: 12px; fill: var(--soft); }
svg .grid { stroke: var(--faint); } svg .limit { stroke: #d00; stroke-dasharray: 4 3; }
.legend { color: var(--soft); margin: .2rem 0 0; } .key { margin-right: 1.2em; }
.swatch { display: inline-block; width: .8em; height: .8em; border-radius: 2px;
          margin-right: .4em; }
.verdict { font-size: 1.1rem; font-weight: 600; } .scroll { overflow-x: auto; }
pre { font-size: 12px; overflow-x: auto; }
"""


def write_page(path: Path, plans: Sequence[Plan], advice: Sequence[Sequence[Advice]]) -> None:
    """Write the page.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        path.write_text(page_of(plans, advice), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            [f"--html {path} cannot be written ({error.strerror}). Name a file in a directory."]
        ) from error


def page_of(plans: Sequence[Plan], advice: Sequence[Sequence[Advice]]) -> str:
    """The page: each plan with its plots and its text."""
    title = html.escape(f"Plan of {plans[0].base.name}")
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{title}</h1>",
    ]
    for plan, lines in zip(plans, advice, strict=True):
        parts += _plan(plan, lines)
    parts.append("</body></html>")
    return "\n".join(parts) + "\n"


def _plan(plan: Plan, advice: Sequence[Advice]) -> list[str]:
    time = plan.choice.time
    verdict = "fits" if plan.fits else "does not fit"
    parts = [
        f"<h2>{plan.cluster.num_gpus} × {html.escape(plan.cluster.gpu.name)}</h2>",
        f'<p class="verdict">{verdict}: {in_gib(plan.total_bytes)} of '
        f"{in_gib(plan.choice.usable_bytes)}; {time.tokens_per_s:,.0f} per second, "
        f"{in_days(plan.on_demand.days)}, {in_usd(plan.on_demand.money)}</p>",
        charts.stacked_bars(
            "memory of one GPU, by mesh",
            [(_label(choice), _in_gib(choice)) for choice in _shown(plan)],
            limit=plan.choice.usable_bytes / GIB,
            limit_name="usable",
            unit="GiB",
        ),
        charts.stacked_bars(
            "one step, by mesh",
            [(_label(choice), choice.time.parts) for choice in _shown(plan)],
            limit=time.seconds,
            limit_name="chosen",
            unit="s",
        ),
        *_schedule(plan),
        *_costs(plan),
        "<h2>Advice</h2><ul>",
        *(f"<li><b>{html.escape(a.topic)}</b>: {html.escape(a.text)}</li>" for a in advice),
        "</ul>",
        _table(plan),
        f"<h2>As text</h2><pre>{html.escape(text_of(plan, advice, top=6))}</pre>",
    ]
    return parts


def _shown(plan: Plan) -> list[Choice]:
    """The chosen mesh, and the best others."""
    others = [c for c in plan.found.choices if c.job.spec != plan.choice.job.spec]
    return [plan.choice, *others[:5]]


def _label(choice: Choice) -> str:
    return f"{choice.job.spec}"


def _in_gib(choice: Choice) -> dict[str, float]:
    return {name: size / GIB for name, size in choice.memory.parts.items()}


def _schedule(plan: Plan) -> list[str]:
    schedule = plan.choice.job.schedule
    if schedule is None:
        return []
    title = f"pipeline {schedule.name}: stages over time"
    drawn = charts.timeline(title, schedule, RECOMPUTE)
    if len(schedule.ticks) > 60:  # as text only where it can be read
        return [drawn]
    return [drawn, f"<pre>{html.escape(draw(schedule, RECOMPUTE))}</pre>"]


def _costs(plan: Plan) -> list[str]:
    """Days and money over the number of GPUs of this kind."""
    now = plan.cluster.num_gpus
    counts = sorted({max(1, now // 4), max(1, now // 2), now, now * 2, now * 4})
    sizes = sweep(plan.base, plan.cluster.gpu, counts, plan.on_demand.tokens, plan.choice.job.model)
    if len(sizes) < 2:
        return []
    line = lambda of: [(float(size.cluster.num_gpus), of(size)) for size in sizes]
    money, days = (lambda size: size.money), (lambda size: size.days)
    return [
        charts.points(
            "cost against number of GPUs",
            {"on demand": line(money)},
            x_label="GPUs",
            y_label="USD",
        ),
        charts.points(
            "time against number of GPUs", {"on demand": line(days)}, x_label="GPUs", y_label="days"
        ),
        _sizes(sizes),
    ]


def _sizes(sizes: Sequence[Size]) -> str:
    rows = "".join(
        f"<tr><td>{s.cluster.num_gpus}</td><td>{s.tokens_per_s:,.0f}</td>"
        f"<td>{in_days(s.days)}</td><td>{in_usd(s.money)}</td>"
        f"<td>{html.escape(str(s.choice.job.spec))}</td></tr>"
        for s in sizes
    )
    head = "<tr><th>GPUs</th><th>per second</th><th>time</th><th>cost</th><th>mesh</th></tr>"
    return f'<div class="scroll"><table>{head}{rows}</table></div>'


def _table(plan: Plan) -> str:
    best = plan.found.choices[0] if plan.found.choices else plan.choice
    rows = "".join(
        f"<tr><td>{html.escape(str(c.job.spec))}</td><td>{c.memory.total_bytes / GIB:.1f}</td>"
        f"<td>{c.time.seconds:.3g}</td><td>{c.time.mfu:.1%}</td>"
        f"<td>{html.escape(why_not(c, best))}</td></tr>"
        for c in plan.found.choices
    )
    head = "<tr><th>mesh</th><th>GiB</th><th>s/step</th><th>MFU</th><th>why not</th></tr>"
    return f'<h2>All legal meshes</h2><div class="scroll"><table>{head}{rows}</table></div>'
