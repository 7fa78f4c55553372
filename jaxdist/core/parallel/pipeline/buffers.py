"""Buffers of a stage: lifetimes and slots of values, and the schedule as arrays."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from jaxdist.core.parallel.pipeline.schedule import KINDS, Schedule

Work: TypeAlias = tuple[int, int]
"""(microbatch, virtual) of a value in a buffer of one stage."""
Interval: TypeAlias = tuple[int, int]
"""First and last tick, inclusive."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lifetimes:
    """Intervals of ticks in which each buffered value is alive, per stage.

    Attributes:
        activations: input of a virtual stage, alive until its backward.
        cotangents: gradient of its output, alive until its backward; the last one has none.
        pending: inputs of the weight gradient, alive from the backward to the weight action.
    """

    activations: list[dict[Work, Interval]]
    cotangents: list[dict[Work, Interval]]
    pending: list[dict[Work, Interval]]

    @classmethod
    def of(cls, schedule: Schedule) -> Lifetimes:
        """Return the lifetimes of the values of a checked schedule."""
        when = schedule.when()
        stages = range(schedule.num_stages)
        lives = cls(
            activations=[{} for _ in stages],
            cotangents=[{} for _ in stages],
            pending=[{} for _ in stages],
        )
        for (kind, stage, microbatch, virtual), tick in when.items():
            work = (microbatch, virtual)
            # Evaluation has no backward: an input is alive until its forward.
            backward = when.get(("backward", stage, microbatch, virtual), tick)
            if kind == "forward":
                before = schedule.neighbor(stage, virtual, -1)
                arrival = (
                    tick
                    if before is None
                    else when["forward", before[0], microbatch, before[1]] + 1
                )
                lives.activations[stage][work] = (arrival, backward)
            elif kind == "backward":
                after = schedule.neighbor(stage, virtual, +1)
                if after is not None:
                    arrival = when["backward", after[0], microbatch, after[1]] + 1
                    lives.cotangents[stage][work] = (arrival, tick)
            else:
                lives.pending[stage][work] = (backward, tick)
        return lives


def assign_slots(intervals: Mapping[Work, Interval]) -> dict[Work, int]:
    """Assign intervals to the fewest slots; a slot read last in tick t is free when t ends."""
    slots: dict[Work, int] = {}
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    for work, (first, last) in sorted(intervals.items(), key=lambda item: (item[1], item[0])):
        free += [slot for end, slot in busy if end < first]
        busy = [(end, slot) for end, slot in busy if end >= first]
        slot = min(free) if free else len(busy)
        if free:
            free.remove(slot)
        busy.append((last, slot))
        slots[work] = slot
    return slots


def peak(intervals: Iterable[Interval]) -> int:
    """Return the largest number of intervals alive at once."""
    spans = list(intervals)
    firsts, lasts = sorted(a for a, _ in spans), sorted(b for _, b in spans)
    # The peak is at the start of some interval: intervals started so far minus intervals ended.
    alive = (begun - bisect.bisect_left(lasts, first) for begun, first in enumerate(firsts, 1))
    return max(alive, default=0)


def num_slots(stages: list[dict[Work, Interval]]) -> int:
    """Return the number of slots of the stage that needs most."""
    return max(max(assign_slots(stage).values(), default=-1) + 1 for stage in stages)


class Instruction(NamedTuple):
    """The action of one stage in one tick, int32 scalars; or arrays over all stages and ticks.

    Attributes:
        branch: 0 idle, 1 forward, 2 backward, 3 weight.
        virtual: index among the virtual stages of this stage.
        activation, cotangent, pending: buffer slots that the action uses, see `Lifetimes`.
        activation_arrival: slot for the activation received at the end of the tick; the spare
            slot (after the last one) if the stage receives none.
        cotangent_arrival: slot for the received gradient, in the same way.
    """

    branch: Any
    microbatch: Any
    virtual: Any
    activation: Any
    cotangent: Any
    pending: Any
    activation_arrival: Any
    cotangent_arrival: Any


def to_arrays(schedule: Schedule) -> tuple[Instruction, list[int]]:
    """Return instructions [num_ticks + 1, num_stages] and the number of slots of each buffer.

    The spare slot is not counted. In the last row all stages are idle; a round of a loop uses this
    row if it has no action.
    """
    lives = Lifetimes.of(schedule)
    families = (lives.activations, lives.cotangents, lives.pending)
    slots = [[assign_slots(stage) for stage in family] for family in families]
    counts = [num_slots(family) for family in families]
    shape = (len(schedule.ticks) + 1, schedule.num_stages)
    branch, microbatch, virtual, activation, cotangent, pending = (
        np.zeros(shape, np.int32) for _ in range(6)
    )
    arrivals = [np.full(shape, counts[0], np.int32), np.full(shape, counts[1], np.int32)]
    for t, tick in enumerate(schedule.ticks):
        for s, action in enumerate(tick):
            if action is None:
                continue
            work = (action.microbatch, action.virtual)
            branch[t, s] = 1 + KINDS.index(action.kind)
            microbatch[t, s], virtual[t, s] = work
            activation[t, s] = slots[0][s][work]
            # The last virtual stage receives no gradient; it uses the spare slot.
            cotangent[t, s] = slots[1][s].get(work, counts[1])
            pending[t, s] = slots[2][s].get(work, 0)
            step = {"forward": 1, "backward": -1}.get(action.kind)
            target = schedule.neighbor(s, action.virtual, step) if step else None
            if step and target:
                way = 0 if step == 1 else 1
                arrivals[way][t, target[0]] = slots[way][target[0]][action.microbatch, target[1]]
    fields = (branch, microbatch, virtual, activation, cotangent, pending, *arrivals)
    return Instruction(*fields), counts
