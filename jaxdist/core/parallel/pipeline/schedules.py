"""The pipeline schedules, each a function that returns the action of every stage in every tick.

To add a schedule, write `(num_stages, num_microbatches, num_virtual_stages) -> Schedule` and add it
to `SCHEDULES` and its name to `ScheduleName`.

    1f1b   for training: ticks of forwards and of backwards alternate; interleaved if a stage has
           several virtual stages
    gpipe  all forwards, then all backwards, which keeps all activations; drawn for comparison

The textbook 1F1B mixes forwards and backwards in one tick. All stages advance tick by tick, so its
forwards would wait for backwards of other stages: for 4 stages and 16 microbatches its bubble is
39.6 % instead of 15.8 %. Schedules with split backwards (Qi et al. 2024, "Zero Bubble Pipeline
Parallelism") have larger bubbles than interleaving at equal memory.

References: Huang et al. 2019, "GPipe"; Narayanan et al. 2021, "Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM", section 2.2 (PipeDream-Flush and interleaving).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, TypeAlias

from jaxdist.core.parallel.pipeline.schedule import (
    Action,
    Schedule,
    ScheduleError,
    check,
)

ScheduleName: TypeAlias = Literal["1f1b", "gpipe"]


def forward_only(num_stages: int, num_microbatches: int, num_virtual_stages: int = 1) -> Schedule:
    """Return a schedule of forwards only, for evaluation."""
    cells = [
        (tick, stage, Action("forward", microbatch, virtual))
        for (stage, virtual, microbatch), tick in _forward_ticks(
            num_stages, num_microbatches, num_virtual_stages
        ).items()
    ]
    return _from_cells("forward_only", num_stages, num_microbatches, num_virtual_stages, cells)


def gpipe(num_stages: int, num_microbatches: int, num_virtual_stages: int = 1) -> Schedule:
    """Return the schedule of all forwards, then all backwards, reversed; it stashes everything."""
    cells = []
    forwards = _forward_ticks(num_stages, num_microbatches, num_virtual_stages)
    last = max(forwards.values())
    for (stage, virtual, microbatch), tick in forwards.items():
        cells.append((tick, stage, Action("forward", microbatch, virtual)))
        cells.append((2 * last + 1 - tick, stage, Action("backward", microbatch, virtual)))
    return _from_cells("gpipe", num_stages, num_microbatches, num_virtual_stages, cells)


def one_forward_one_backward(
    num_stages: int, num_microbatches: int, num_virtual_stages: int = 1
) -> Schedule:
    """Return the 1F1B schedule: alternating ticks of forwards and backwards; interleaved if v > 1.

    With p stages, m microbatches and v virtual stages per stage, the bubble is (p-1)/(v·m+p-1) if p
    divides m or v = 1. For v = 1, stage s stashes min(2(p-s)-1, m) microbatches. For v > 1,
    microbatches advance in groups of p, and an incomplete last group leaves idle ticks.
    """
    p, v = num_stages, num_virtual_stages
    cells = []
    for (stage, virtual, microbatch), tick in _forward_ticks(p, num_microbatches, v).items():
        cells.append((2 * tick, stage, Action("forward", microbatch, virtual)))
        group, position = divmod(microbatch, p)
        # The last virtual stage runs forward and backward in the same pair of ticks.
        turn = v * p - 1 + group * v * p + position
        backward = turn + (p - 1 - stage) + (v - 1 - virtual) * p
        cells.append((2 * backward + 1, stage, Action("backward", microbatch, virtual)))
    # From the first backward to the last forward, ticks alternate; some may be idle.
    forwards = [time for time, _, action in cells if action.kind == "forward"]
    backwards = [time for time, _, action in cells if action.kind == "backward"]
    alternating = range(min(backwards), max(forwards) + 1)
    return _from_cells("1f1b", p, num_microbatches, v, cells, alternating)


SCHEDULES: Mapping[ScheduleName, Callable[[int, int, int], Schedule]] = {
    "1f1b": one_forward_one_backward,
    "gpipe": gpipe,
}


def make_schedule(
    name: ScheduleName, num_stages: int, num_microbatches: int, num_virtual_stages: int = 1
) -> Schedule:
    """Return the checked schedule of this name; raise `ScheduleError` for invalid sizes."""
    sizes = dict(
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        num_virtual_stages=num_virtual_stages,
    )
    small = [f"{key}={size} is below 1. Use 1 or more." for key, size in sizes.items() if size < 1]
    if small:
        raise ScheduleError("\n".join(small))
    schedule = SCHEDULES[name](num_stages, num_microbatches, num_virtual_stages)
    check(schedule)
    return schedule


_Cell: TypeAlias = tuple[int, int, Action]
"""(time, stage, action); times may have gaps."""


def _forward_ticks(p: int, m: int, v: int) -> dict[tuple[int, int, int], int]:
    """Return (stage, virtual, microbatch) -> tick of its forward; groups of p pass v times."""
    ticks = {}
    for microbatch in range(m):
        group, position = divmod(microbatch, p)
        for virtual in range(v):
            for stage in range(p):
                ticks[stage, virtual, microbatch] = stage + group * v * p + virtual * p + position
    return ticks


def _from_cells(
    name: str, p: int, m: int, v: int, cells: Iterable[_Cell], times: Iterable[int] = ()
) -> Schedule:
    """Return the schedule with one tick for each time of a cell, and idle ticks at `times`."""
    ticks: dict[int, list[Action | None]] = {time: [None] * p for time in times}
    for time, stage, action in cells:
        ticks.setdefault(time, [None] * p)[stage] = action
    return Schedule(
        name=name,
        num_stages=p,
        num_microbatches=m,
        num_virtual_stages=v,
        ticks=tuple(tuple(ticks[time]) for time in sorted(ticks)),
    )
