"""Simulate a schedule: count time, bubble, messages and buffers; draw it."""

from __future__ import annotations

import dataclasses

from jaxdist.core.parallel.pipeline.buffers import Lifetimes, num_slots, peak
from jaxdist.core.parallel.pipeline.loop_plan import plan_loops
from jaxdist.core.parallel.pipeline.schedule import Action, Kind, Schedule, check
from jaxdist.runtime.formatting.numbers import percent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """Time of each action of one virtual stage, in units of a forward; without recomputation."""

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0

    def of(self, kind: Kind, splits_backward: bool) -> float:
        """Return the time of one action; an unsplit backward computes both gradients."""
        if kind == "forward":
            return self.forward
        if kind == "weight":
            return self.weight_gradient
        return self.input_gradient + (0.0 if splits_backward else self.weight_gradient)


RECOMPUTE = Costs(input_gradient=2.0)
"""Costs if the backward first recomputes the forward of its virtual stage."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Simulated cost of a schedule.

    Slots are those of the stage that needs most, including received values. Permutes are counted
    for the loops of `plan_loops`.

    Attributes:
        duration: sum over ticks of the longest action, in forwards of one virtual stage.
        bubble: mean idle share of the stages, 0..1.
        peak_stash: per stage, the most microbatch activations alive between forward and backward.
        messages: activations and gradients sent between neighbors, over all stages.
    """

    num_ticks: int
    duration: float
    bubble: float
    peak_stash: tuple[int, ...]
    activation_slots: int
    cotangent_slots: int
    pending_slots: int
    messages: int
    forward_permutes: int
    backward_permutes: int


def simulate(schedule: Schedule, costs: Costs | None = None) -> Report:
    """Check a schedule and return its cost; by default a backward costs two forwards."""
    check(schedule)
    costs = costs or Costs()
    split = schedule.splits_backward
    spent = [[costs.of(a.kind, split) if a else 0.0 for a in tick] for tick in schedule.ticks]
    duration = sum(max(tick) for tick in spent)
    work = sum(map(sum, spent)) / schedule.num_stages
    lives = Lifetimes.of(schedule)
    stages = range(schedule.num_stages)
    when = schedule.when()
    held = [
        [
            (tick, when.get(("backward", stage, mb, virtual), tick))
            for (kind, stage, mb, virtual), tick in when.items()
            if kind == "forward" and stage == s
        ]
        for s in stages
    ]
    messages = schedule.num_microbatches * (schedule.total_virtual_stages - 1)
    exchanges = [
        kind
        for loop in plan_loops(schedule)
        for kinds in loop.kinds * len(loop.rounds)
        for kind in kinds
    ]
    return Report(
        num_ticks=len(schedule.ticks),
        duration=duration,
        bubble=1.0 - work / duration,
        peak_stash=tuple(peak(held[s]) for s in stages),
        activation_slots=num_slots(lives.activations),
        cotangent_slots=num_slots(lives.cotangents),
        pending_slots=num_slots(lives.pending),
        messages=messages * (2 if "backward" in schedule.kinds else 1),
        forward_permutes=exchanges.count("forward"),
        backward_permutes=exchanges.count("backward"),
    )


def draw(schedule: Schedule, costs: Costs | None = None) -> str:
    """Draw the schedule as text: one row per stage, one column per tick, its cost below.

    `F2` is the forward of microbatch 2, `B` backward, `W` weight gradient, `·` idle. With several
    virtual stages per stage, a letter is appended (`F2a` is the first virtual stage).
    """
    costs = costs or Costs()
    report = simulate(schedule, costs)
    many = schedule.num_virtual_stages > 1

    def cell(action: Action | None) -> str:
        if action is None:
            return "·"
        letter = chr(ord("a") + action.virtual) if action.virtual < 26 else f".{action.virtual}"
        return f"{action.kind[0].upper()}{action.microbatch}{letter if many else ''}"

    width = max(len(cell(a)) for tick in schedule.ticks for a in tick)
    label = len(f"stage {schedule.num_stages - 1}")
    rows = [
        f"stage {s}".ljust(label) + " " + " ".join(cell(t[s]).ljust(width) for t in schedule.ticks)
        for s in range(schedule.num_stages)
    ]
    split = schedule.splits_backward
    unit = f"F={costs.forward:g} B={costs.of('backward', split):g}"
    unit += f" W={costs.weight_gradient:g}" if split else ""
    title = (
        f"{schedule.name}: {schedule.num_stages} stages, {schedule.num_microbatches} microbatches"
    )
    title += f", {schedule.num_virtual_stages} virtual stages each" if many else ""
    facts = (
        f"{report.num_ticks} ticks, bubble {percent(report.bubble)} at {unit}, "
        f"stash per stage {' '.join(map(str, report.peak_stash))}, "
        f"{report.forward_permutes}+{report.backward_permutes} permutes"
    )
    return "\n".join([title, *(row.rstrip() for row in rows), facts])
