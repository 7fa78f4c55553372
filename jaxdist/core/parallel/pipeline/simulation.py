"""Simulate a schedule: count time, bubble, messages and buffers; draw it."""

from __future__ import annotations

import dataclasses
from collections import Counter

from jaxdist.core.parallel.pipeline.buffers import Lifetimes, peak, to_arrays
from jaxdist.core.parallel.pipeline.loop_plan import plan_loops
from jaxdist.core.parallel.pipeline.schedule import Action, Schedule, check
from jaxdist.runtime.formatting.numbers import percent


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """Times of a forward and a backward of the deepest virtual stage; others scale by `depths`."""

    forward: float = 1.0
    backward: float = 2.0
    depths: tuple[int, ...] = ()

    def of(self, action: Action, stage: int, schedule: Schedule) -> float:
        """Return the time of an action of a stage."""
        index = schedule.virtual_stage(stage, action.virtual)
        share = self.depths[index] / max(self.depths) if self.depths else 1.0
        return share * float(getattr(self, action.kind))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Cost of a schedule.

    Slots are those of the stage that needs most, permutes those of the loops of `plan_loops`.

    Attributes:
        duration: sum over ticks of the longest action, in the unit of `Costs`.
        bubble: mean idle share of the stages, 0..1.
        peak_stash: per stage, most (microbatch, virtual stage) whose residuals are kept together.
        messages: activations and gradients sent between neighbors, over all stages.
    """

    num_ticks: int
    duration: float
    bubble: float
    peak_stash: tuple[int, ...]
    activation_slots: int
    cotangent_slots: int
    residual_slots: int
    messages: int
    forward_permutes: int
    backward_permutes: int


def simulate(schedule: Schedule, costs: Costs | None = None) -> Report:
    """Check a schedule and return its cost; by default a backward costs two forwards."""
    check(schedule)
    costs = costs or Costs()
    spent = [
        [costs.of(a, stage, schedule) if a else 0.0 for stage, a in enumerate(tick)]
        for tick in schedule.ticks
    ]
    duration = sum(max(tick) for tick in spent)
    work = sum(map(sum, spent)) / schedule.num_stages
    lives = Lifetimes.of(schedule)
    messages = schedule.num_microbatches * (schedule.total_virtual_stages - 1)
    loops = plan_loops(schedule)
    exchanges = [kind for loop in loops for kind in loop.kinds * len(loop.rounds)]
    _, slots = to_arrays(schedule)
    return Report(
        num_ticks=len(schedule.ticks),
        duration=duration,
        bubble=1.0 - work / duration,
        peak_stash=tuple(peak(stage.values()) for stage in lives.residuals),
        activation_slots=slots[0],
        cotangent_slots=slots[1],
        residual_slots=slots[2],
        messages=messages * (2 if "backward" in schedule.kinds else 1),
        forward_permutes=exchanges.count("forward"),
        backward_permutes=exchanges.count("backward"),
    )


def branch_shares(schedule: Schedule) -> dict[str, float]:
    """Return for each optional part of an action the share of ticks in which a stage runs it.

    Keys are `jax.named_scope`s without "pipeline_": `head` on the last stage, `embed` and
    `embed_gradient` on the first. Ticks are those of its kind of action.
    """
    ticks = Counter(kind for loop in plan_loops(schedule) for kind in loop.kinds * len(loop.rounds))
    m = schedule.num_microbatches
    shares = {"embed": m / ticks["forward"]}
    if backwards := ticks["backward"]:
        at_end = m / backwards
        shares |= {"head": at_end, "embed_gradient": at_end}
    return shares


def draw(schedule: Schedule, costs: Costs | None = None) -> str:
    """Draw the schedule: `F2a` = forward of microbatch 2 on virtual stage a, `·` = idle."""
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
    unit = f"F={costs.forward:g} B={costs.backward:g}"
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
