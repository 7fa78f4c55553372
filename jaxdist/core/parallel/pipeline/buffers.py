"""Buffers of a stage: lifetimes and slots of values, and the schedule as arrays."""

from __future__ import annotations

import bisect
import dataclasses
import heapq
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jaxdist.core.parallel.pipeline.schedule import KINDS, Schedule

Work: TypeAlias = tuple[int, int]
"""(microbatch, virtual) of a value in a buffer of one stage."""
Interval: TypeAlias = tuple[int, int]
"""First and last tick, inclusive."""


@dataclasses.dataclass(frozen=True)
class Lifetimes:
    """Intervals of ticks in which each buffered value is alive, per stage.

    Attributes:
        activations: input of a virtual stage, alive until its forward; the first has none.
        cotangents: gradient of its output, alive until its backward; the last one has none.
        residuals: values that the forward saves for the backward.
        outputs: output of the last virtual stage, alive until its backward.
    """

    activations: list[dict[Work, Interval]]
    cotangents: list[dict[Work, Interval]]
    residuals: list[dict[Work, Interval]]
    outputs: list[dict[Work, Interval]]

    @classmethod
    def of(cls, schedule: Schedule) -> Lifetimes:
        """Return the lifetimes of the values of a checked schedule."""
        when = schedule.when()
        empty = lambda: [dict[Work, Interval]() for _ in range(schedule.num_stages)]
        lives = cls(empty(), empty(), empty(), empty())
        for (kind, stage, microbatch, virtual), tick in when.items():
            work = (microbatch, virtual)
            if kind == "forward":
                before = schedule.neighbor(stage, virtual, -1)
                if before is not None:
                    arrival = when["forward", before[0], microbatch, before[1]] + 1
                    lives.activations[stage][work] = (arrival, tick)
                continue
            forward = when["forward", stage, microbatch, virtual]
            lives.residuals[stage][work] = (forward, tick)
            after = schedule.neighbor(stage, virtual, +1)
            if after is None:
                lives.outputs[stage][work] = (forward, tick)
            else:
                arrival = when["backward", after[0], microbatch, after[1]] + 1
                lives.cotangents[stage][work] = (arrival, tick)
        return lives


def assign_slots(intervals: Mapping[Work, Interval]) -> dict[Work, int]:
    """Return a slot for each interval, using the fewest; a slot is free after its last tick."""
    slots: dict[Work, int] = {}
    busy: list[tuple[int, int]] = []  # heap of (last tick, slot)
    free: list[int] = []  # heap
    for work, (first, last) in sorted(intervals.items(), key=lambda item: (item[1], item[0])):
        while busy and busy[0][0] < first:
            heapq.heappush(free, heapq.heappop(busy)[1])
        slots[work] = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (last, slots[work]))
    return slots


def peak(intervals: Iterable[Interval]) -> int:
    """Return the largest number of intervals alive at the same time."""
    spans = list(intervals)
    firsts, lasts = sorted(a for a, _ in spans), sorted(b for _, b in spans)
    # The peak is at the start of some interval: intervals started so far minus intervals ended.
    alive = (begun - bisect.bisect_left(lasts, first) for begun, first in enumerate(firsts, 1))
    return max(alive, default=0)


class Instruction(NamedTuple):
    """The action of one stage in one tick, scalars; or arrays over all stages and ticks.

    Attributes:
        is_active: True if the stage has an action in this tick.
        virtual: index among the virtual stages of this stage.
        activation, cotangent, residual, output: buffer slots that the action uses, see `Lifetimes`;
            the spare slot (after the last one) if it uses none, but in `residual` a free slot.
        activation_arrival, cotangent_arrival: slots, maybe spare, for what arrives after the tick.
    """

    is_active: Any
    microbatch: Any
    virtual: Any
    activation: Any
    cotangent: Any
    residual: Any
    output: Any
    activation_arrival: Any
    cotangent_arrival: Any


def to_arrays(schedule: Schedule) -> tuple[Instruction, list[int]]:
    """Return instructions [num_ticks, num_stages], and slots per buffer without the spare one."""
    lives = Lifetimes.of(schedule)
    families = (lives.activations, lives.cotangents, lives.residuals, lives.outputs)
    slots = [[assign_slots(stage) for stage in family] for family in families]
    counts = [1 + max((n for stage in x for n in stage.values()), default=-1) for x in slots]
    shape = (len(schedule.ticks), schedule.num_stages)
    microbatch, virtual = (np.zeros(shape, np.int32) for _ in range(2))
    is_active = np.zeros(shape, bool)
    used = [np.full(shape, count, np.int32) for count in counts]
    arrivals = [np.full(shape, count, np.int32) for count in counts[:2]]
    for s, stage in enumerate(lives.residuals):
        is_busy = np.zeros((shape[0], counts[2] + 1), bool)
        for work, (first, last) in stage.items():
            is_busy[first : last + 1, slots[2][s][work]] = True
        used[2][:, s] = is_busy.argmin(1)  # the lowest free slot, for idle ticks
    for t, tick in enumerate(schedule.ticks):
        for s, action in enumerate(tick):
            if action is None:
                continue
            work = (action.microbatch, action.virtual)
            is_active[t, s] = True
            microbatch[t, s], virtual[t, s] = work
            for family, column in enumerate(used):
                column[t, s] = slots[family][s].get(work, counts[family])
            way = KINDS.index(action.kind)
            target = schedule.neighbor(s, action.virtual, (1, -1)[way])
            if target:
                arrivals[way][t, target[0]] = slots[way][target[0]][action.microbatch, target[1]]
    counts[2] = max(counts[2], 1 + int(used[2].max(initial=-1)))
    return Instruction(is_active, microbatch, virtual, *used, *arrivals), counts
