"""The pipeline schedules drawn, with what each costs: `--show-schedule`."""

from __future__ import annotations

from jaxdist.core.parallel.pipeline.schedule import Schedule
from jaxdist.core.parallel.pipeline.schedules import SCHEDULES, make_schedule
from jaxdist.core.parallel.pipeline.simulation import RECOMPUTE, draw, simulate
from jaxdist.runtime.formatting.numbers import percent
from jaxdist.runtime.formatting.tables import columns


def drawings(num_stages: int, num_microbatches: int, num_virtual_stages: int) -> str:
    """Every schedule for these sizes, one below the other, and a table that compares them.

    Costs are those of the step: a backward first repeats its forward.
    """
    tables = [make_schedule(name, num_stages, num_microbatches) for name in SCHEDULES]
    if num_virtual_stages > 1:
        tables.append(
            make_schedule("1f1b_lockstep", num_stages, num_microbatches, num_virtual_stages)
        )
    drawn = [draw(table, RECOMPUTE) for table in tables]
    return "\n\n".join([*drawn, comparison(tables)])


def comparison(tables: list[Schedule]) -> str:
    """One line for each: waiting, stash, messages."""
    rows = [("schedule", "bubble", "time", "peak stash", "messages")]
    for table in tables:
        report = simulate(table, RECOMPUTE)
        many = table.num_virtual_stages
        name = table.name + (f" × {many} virtual stages" if many > 1 else "")
        # Counted in whole stages, schedules with and without virtual stages compare.
        stash = max(report.peak_stash) / many
        numbers = (percent(report.bubble), f"{report.duration / many:.1f}", f"{stash:.1f}")
        rows.append((name, *numbers, str(report.messages)))
    below = "time in forwards of a stage; stash in microbatches of a stage's input"
    return "\n".join([*columns(rows), below])
