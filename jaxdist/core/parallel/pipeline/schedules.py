"""The pipeline schedules, each a function that returns the action of every stage in every tick.

`schedule.py` defines and checks schedules, `simulation.py` measures them. To add a schedule, write
`(num_stages, num_microbatches, num_virtual_stages) -> Schedule` and add it to `SCHEDULES` and its
name to `ScheduleName`.

    gpipe          all forwards, then all backwards; stashes every microbatch
    1f1b           the textbook schedule (PipeDream-Flush): smallest stash, p - s microbatches
    1f1b_lockstep  default: 1F1B in which all stages run the same kind of action in a tick;
                   interleaved if a stage has several virtual stages
    zero_bubble    1f1b_lockstep whose weight gradients fill idle ticks

The textbook schedule is not the default because it mixes forwards and backwards in one tick. All
stages advance tick by tick, so its forwards wait for backwards of other stages. Separate ticks need
a larger stash, 2(p - s) - 1 inputs, but save time. For Llama 2 13B on pp=4,dp=4,tp=4 with 16
microbatches the bubble is 15.8 % instead of 39.6 %, and XLA:GPU allocates 9.8 GiB instead of
11.8 GiB (scripts/bench/results/pipeline_gpu_compile.md).

References:
    Huang et al. 2019, "GPipe: Efficient Training of Giant Neural Networks".
    Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters Using
    Megatron-LM", section 2.2 (PipeDream-Flush and interleaving).
    Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2 (ZB-H1).
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Literal, TypeAlias

from jaxdist.core.parallel.pipeline.schedule import (
    Action,
    Schedule,
    ScheduleError,
    Tick,
    check,
)

ScheduleName: TypeAlias = Literal["gpipe", "1f1b", "1f1b_lockstep", "zero_bubble"]


def forward_only(num_stages: int, num_microbatches: int, num_virtual_stages: int = 1) -> Schedule:
    """Schedule forwards only, for evaluation."""
    cells = [
        (tick, stage, Action("forward", microbatch, virtual))
        for (stage, virtual, microbatch), tick in _forward_ticks(
            num_stages, num_microbatches, num_virtual_stages
        ).items()
    ]
    return _from_cells("forward_only", num_stages, num_microbatches, num_virtual_stages, cells)


def gpipe(num_stages: int, num_microbatches: int, num_virtual_stages: int = 1) -> Schedule:
    """Schedule all forwards, then all backwards in reverse order; stashes every microbatch."""
    cells = []
    forwards = _forward_ticks(num_stages, num_microbatches, num_virtual_stages)
    last = max(forwards.values())
    for (stage, virtual, microbatch), tick in forwards.items():
        cells.append((tick, stage, Action("forward", microbatch, virtual)))
        cells.append((2 * last + 1 - tick, stage, Action("backward", microbatch, virtual)))
    return _from_cells("gpipe", num_stages, num_microbatches, num_virtual_stages, cells)


def one_forward_one_backward_lockstep(
    num_stages: int, num_microbatches: int, num_virtual_stages: int = 1
) -> Schedule:
    """Schedule 1F1B with alternating ticks of forwards and of backwards; interleaved if v > 1.

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
    return _from_cells("1f1b_lockstep", p, num_microbatches, v, cells)


def one_forward_one_backward(
    num_stages: int, num_microbatches: int, num_virtual_stages: int = 1
) -> Schedule:
    """Schedule the textbook 1F1B, PipeDream-Flush: stage s stashes min(p-s, m) microbatches.

    A tick mixes forwards of some stages with longer backwards of others. Use this schedule if the
    stash of `1f1b_lockstep` does not fit in memory.
    """
    if num_virtual_stages != 1:
        raise ScheduleError(
            f"schedule 1f1b with num_virtual_stages={num_virtual_stages}: it is not interleaved. "
            "Use num_virtual_stages=1, or schedule 1f1b_lockstep, zero_bubble or gpipe."
        )
    orders = [_stage_order(num_stages, num_microbatches, stage) for stage in range(num_stages)]
    done: set[tuple[int, Action]] = set()
    ticks: list[Tick] = []
    while any(orders):
        tick: list[Action | None] = [None] * num_stages
        for stage, order in enumerate(orders):
            if not order:
                continue
            kind, microbatch, _ = order[0]
            source = stage - 1 if kind == "forward" else stage + 1
            ready = not 0 <= source < num_stages or (source, order[0]) in done
            if kind == "backward":
                ready = ready and (stage, Action("forward", microbatch)) in done
            if ready:
                tick[stage] = order.popleft()
        done.update((stage, action) for stage, action in enumerate(tick) if action is not None)
        ticks.append(tuple(tick))
    return Schedule(
        name="1f1b",
        num_stages=num_stages,
        num_microbatches=num_microbatches,
        ticks=tuple(ticks),
    )


def zero_bubble(num_stages: int, num_microbatches: int, num_virtual_stages: int = 1) -> Schedule:
    """Schedule `1f1b_lockstep` with weight gradients in otherwise idle ticks (ZB-H1).

    If all actions take equal time and m ≥ 2p, the bubble is (p-1)/(3v·m+p-1) at the same peak
    stash. Ticks of weight gradients are inserted only while idle ticks are too few for them.
    """
    base = one_forward_one_backward_lockstep(num_stages, num_microbatches, num_virtual_stages)
    stages = range(num_stages)
    todo = [num_microbatches * num_virtual_stages] * num_stages
    idle_ticks = [sum(tick[s] is None for tick in base.ticks) for s in stages]
    pending: list[deque[Action]] = [deque() for _ in stages]
    ticks: list[Tick] = []

    def weight(stage: int) -> Action | None:
        if not pending[stage]:
            return None
        todo[stage] -= 1
        return pending[stage].popleft()._replace(kind="weight")

    for tick in base.ticks:
        for s in stages:
            idle_ticks[s] -= tick[s] is None
        ticks.append(tuple(weight(s) if a is None else a for s, a in enumerate(tick)))
        for s, action in enumerate(tick):
            if action is not None and action.kind == "backward":
                pending[s].append(action)
        # Every stage keeps one weight gradient for its next idle tick.
        lacks_ticks = any(todo[s] > idle_ticks[s] for s in stages)
        if (
            all(a is None or a.kind == "backward" for a in tick)
            and lacks_ticks
            and min(map(len, pending)) > 1
        ):
            ticks.append(tuple(weight(s) for s in stages))
    while any(pending):
        ticks.append(tuple(weight(s) for s in stages))
    return dataclasses.replace(base, name="zero_bubble", ticks=tuple(ticks))


SCHEDULES: Mapping[ScheduleName, Callable[[int, int, int], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "1f1b_lockstep": one_forward_one_backward_lockstep,
    "zero_bubble": zero_bubble,
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
    """Return the tick of (stage, virtual, microbatch); groups of p microbatches pass v times."""
    ticks = {}
    for microbatch in range(m):
        group, position = divmod(microbatch, p)
        for virtual in range(v):
            for stage in range(p):
                ticks[stage, virtual, microbatch] = stage + group * v * p + virtual * p + position
    return ticks


def _stage_order(p: int, m: int, stage: int) -> deque[Action]:
    """Return one stage's actions in textbook order: p-1-s forwards, then both kinds alternate."""
    ahead = min(p - 1 - stage, m)
    order = [Action("forward", i) for i in range(ahead)]
    for i in range(m):
        if ahead + i < m:
            order.append(Action("forward", ahead + i))
        order.append(Action("backward", i))
    return deque(order)


def _from_cells(name: str, p: int, m: int, v: int, cells: Iterable[_Cell]) -> Schedule:
    """Order the cells by time; times without an action take no tick."""
    ticks: dict[int, list[Action | None]] = {}
    for time, stage, action in cells:
        ticks.setdefault(time, [None] * p)[stage] = action
    return Schedule(
        name=name,
        num_stages=p,
        num_microbatches=m,
        num_virtual_stages=v,
        ticks=tuple(tuple(ticks[time]) for time in sorted(ticks)),
    )
