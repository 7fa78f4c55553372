"""What is asked of a pipeline schedule again and again, worked out once for each schedule."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Mapping

from jaxdist.core.parallel.pipeline.config import PipelineConfig
from jaxdist.core.parallel.pipeline.loop_plan import plan_loops
from jaxdist.core.parallel.pipeline.schedule import Kind, Schedule
from jaxdist.core.parallel.pipeline.simulation import RECOMPUTE, Report, simulate


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Stages:
    """A schedule and what follows from it.

    Attributes:
        report: what it costs, a backward counted with its recomputation.
        longest: ticks by the kind of their longest action.
        num_loops: loops of the compiled program.
        mixes: whether in some tick some stages go forward and others backward.
    """

    schedule: Schedule
    report: Report
    longest: Mapping[Kind, int]
    num_loops: int
    mixes: bool


@functools.lru_cache(maxsize=1024)
def stages_of(
    config: PipelineConfig, num_stages: int, rows: int, num_microbatches: int, rows_per_example: int
) -> Stages:
    """Return the schedule that training would run; arguments as of `make_schedule`."""
    schedule = config.make_schedule(
        num_stages=num_stages,
        rows=rows,
        num_microbatches=num_microbatches,
        rows_per_example=rows_per_example,
    )
    kinds = [{action.kind for action in tick if action} for tick in schedule.ticks]
    longest = Counter(max(found, key=_LENGTH.__getitem__) for found in kinds if found)
    return Stages(
        schedule=schedule,
        report=simulate(schedule, RECOMPUTE),
        longest=longest,
        num_loops=len(plan_loops(schedule)),
        mixes=any({"forward", "backward"} <= found for found in kinds),
    )


_LENGTH: Mapping[Kind, int] = {"weight": 0, "forward": 1, "backward": 2}
"""Kinds by how long they last: a backward repeats its forward."""
