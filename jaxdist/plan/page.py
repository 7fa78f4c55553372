"""A plan as one HTML file with its plots; it loads nothing and runs no script."""

from __future__ import annotations

from collections.abc import Sequence

from jaxdist.core.parallel.pipeline.schedule import Schedule
from jaxdist.core.parallel.pipeline.simulation import RECOMPUTE, draw
from jaxdist.plan.advice import Advice
from jaxdist.plan.estimate.cost import DAY_S
from jaxdist.plan.estimate.search import Choice, why_not
from jaxdist.plan.options import PlanConfig
from jaxdist.plan.planner import Plan
from jaxdist.plan.scaling import size_of
from jaxdist.plan.text import text_of
from jaxdist.runtime.formatting import charts, html
from jaxdist.runtime.formatting.numbers import GIB, count, duration, in_bytes, money, percent


def page_of(plans: Sequence[Plan], advice: Sequence[Sequence[Advice]], config: PlanConfig) -> str:
    """The page: each plan with its plots and its text."""
    parts = [part for pair in zip(plans, advice, strict=True) for part in _plan(*pair, config)]
    return html.page(f"Plan of {plans[0].base.name}", parts)


def _plan(plan: Plan, advice: Sequence[Advice], config: PlanConfig) -> list[str]:
    time = plan.choice.time
    verdict = "fits" if plan.fits else "does not fit"
    low, high = time.likely_seconds
    return [
        f"<h2>{plan.cluster.num_gpus} × {html.escape(plan.cluster.gpu.name)}</h2>",
        f'<p class="verdict">{verdict}: {in_bytes(plan.total_bytes)} of '
        f"{in_bytes(plan.choice.usable_bytes)}; {count(time.tokens_per_s)} per second, "
        f"{duration(DAY_S * plan.on_demand.days)}, {money(plan.on_demand.money, 'USD')}; a step "
        f"likely takes {low:.3g} to {high:.3g} s</p>",
        charts.stacked_bars(
            "memory of one GPU, by mesh",
            [
                (str(c.job.spec), {k: v / GIB for k, v in c.memory.parts.items()})
                for c in _shown(plan)
            ],
            limit=plan.choice.usable_bytes / GIB,
            limit_name="usable",
            unit="GiB",
        ),
        charts.stacked_bars(
            "one step, by mesh",
            [(str(choice.job.spec), choice.time.parts) for choice in _shown(plan)],
            limit=time.seconds,
            limit_name="chosen",
            unit="s",
        ),
        *_schedule(plan),
        *_costs(plan, config),
        "<h2>Advice</h2><ul>",
        *(f"<li><b>{html.escape(a.topic)}</b>: {html.escape(a.text)}</li>" for a in advice),
        "</ul>",
        _table(plan),
        f"<h2>As text</h2><pre>{html.escape(text_of(plan, advice, top=6))}</pre>",
    ]


def _shown(plan: Plan) -> list[Choice]:
    """The chosen mesh, and the best others."""
    others = [c for c in plan.found.choices if c.job.spec != plan.choice.job.spec]
    return [plan.choice, *others[:5]]


def _schedule(plan: Plan) -> list[str]:
    schedule = plan.choice.job.schedule
    if schedule is None:
        return []
    drawn = charts.timeline(f"pipeline {schedule.name}: stages over time", _spans(schedule))
    if len(schedule.ticks) > 60:  # as text only where it can be read
        return [drawn]
    return [drawn, f"<pre>{html.escape(draw(schedule, RECOMPUTE))}</pre>"]


def _spans(schedule: Schedule) -> list[tuple[str, list[charts.TimeSpan]]]:
    """A row for each stage; a tick lasts as long as its longest action."""
    rows: list[list[charts.TimeSpan]] = [[] for _ in range(schedule.num_stages)]
    start = 0.0
    for tick in schedule.ticks:
        lasts = [
            RECOMPUTE.of(action.kind, schedule.splits_backward) if action else 0.0
            for action in tick
        ]
        for row, action, length in zip(rows, tick, lasts, strict=True):
            if action:
                work = f"{action.kind} of microbatch {action.microbatch}"
                tip = f"{work}, virtual stage {action.virtual}"
                row.append(charts.TimeSpan(start, length, action.kind, tip))
        start += max(lasts)
    return [(f"stage {stage}", row) for stage, row in enumerate(rows)]


def _costs(plan: Plan, config: PlanConfig) -> list[str]:
    """Days and money over the number of GPUs of this kind."""
    now = plan.cluster.num_gpus
    counts = sorted({max(1, now // 4), max(1, now // 2), now, now * 2, now * 4})
    clusters = [plan.cluster.resized(number) for number in counts]
    found = [size_of(config, cluster, plan.choice.job.model) for cluster in clusters]
    sizes = [size for size in found if size is not None]
    if len(sizes) < 2:
        return []
    over = lambda of: [(float(size.cluster.num_gpus), of(size)) for size in sizes]
    curves = (
        ("cost against number of GPUs (USD)", over(lambda size: size.cost.money)),
        ("time against number of GPUs (days)", over(lambda size: size.cost.days)),
    )
    drawn = [
        charts.chart(
            title,
            [charts.Line("on demand", charts.COLOURS[0], points, dots=True)],
            x_label="GPUs",
            log_x=True,
            log_y=True,
        )
        for title, points in curves
    ]
    rows = [
        (
            str(size.cluster.num_gpus),
            count(size.choice.time.tokens_per_s),
            duration(DAY_S * size.cost.days),
            money(size.cost.money, "USD"),
            str(size.choice.job.spec),
        )
        for size in sizes
    ]
    return [*drawn, html.table(["GPUs", "per second", "time", "cost", "mesh"], rows)]


def _table(plan: Plan) -> str:
    best = plan.found.choices[0] if plan.found.choices else plan.choice
    rows = [
        (
            str(choice.job.spec),
            in_bytes(choice.memory.total_bytes),
            f"{choice.time.seconds:.3g}",
            percent(choice.time.mfu),
            why_not(choice, best),
        )
        for choice in plan.found.choices
    ]
    head = ["mesh", "memory", "s/step", "MFU", "why not"]
    return f"<h2>All legal meshes</h2>{html.table(head, rows)}"
