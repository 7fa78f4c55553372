"""What a pipeline schedule is: a table of actions, with its laws, costs, slots and drawing.

Pure Python: nothing here touches a device. `schedules.py` makes the tables and `pipeline.py` runs
them.

The model's layers are cut into `num_stages × chunks_per_stage` *pieces*; piece `k` lives on stage
`k % num_stages` as its chunk `k // num_stages`, so neighbours in the model are neighbours on a
ring. A schedule is a list of *ticks*; in a tick each stage does one action or nothing:

    forward   run a piece on a microbatch and send the result to the next piece
    backward  gradient of a piece's input, sent to the piece before; and of its weights, unless
    weight    the schedule takes the weights' gradient apart, as an action of its own

What is sent in a tick can be used from the next tick on. Every tick ends in an exchange between
neighbours, so stages advance together and a tick lasts as long as its longest action.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np

Kind: TypeAlias = Literal["forward", "backward", "weight"]

KINDS: tuple[Kind, ...] = get_args(Kind)


class Action(NamedTuple):
    """One piece of work: `kind` on a microbatch with one of the stage's chunks."""

    kind: Kind
    microbatch: int
    chunk: int = 0


Tick: TypeAlias = tuple[Action | None, ...]
"""What each stage does; None is idle."""


class ScheduleError(ValueError):
    """A table that would compute wrong numbers or never finish; the text lists what is wrong."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """A table of actions; `ticks[t][s]` is what stage `s` does in tick `t`."""

    name: str
    num_stages: int
    num_microbatches: int
    chunks_per_stage: int = 1
    ticks: tuple[Tick, ...]

    @property
    def num_pieces(self) -> int:
        """Pieces into which the layers are cut."""
        return self.num_stages * self.chunks_per_stage

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Kinds of action in the table; evaluation has forwards only."""
        return _ordered(set().union(*map(_kinds, self.ticks)))

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients are actions of their own."""
        return "weight" in self.kinds

    def piece(self, stage: int, chunk: int) -> int:
        """Which piece of the model a stage holds as `chunk`."""
        return chunk * self.num_stages + stage


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """Time of each action on one chunk, in units of one forward.

    The default is without recomputation; a backward that recomputes its forward takes one more.
    """

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0

    def of(self, kind: Kind, splits_backward: bool) -> float:
        """Time of one action; a whole backward is both gradients."""
        if kind == "forward":
            return self.forward
        if kind == "weight":
            return self.weight_gradient
        return self.input_gradient + (0.0 if splits_backward else self.weight_gradient)


RECOMPUTE = Costs(input_gradient=2.0)
"""Costs when the backward first repeats the forward of its piece."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """What a schedule costs, by simulation.

    Attributes:
        num_ticks: ticks of the table.
        duration: sum over ticks of the longest action, in forwards of one chunk.
        bubble: share of the duration in which a stage waits, 0..1, averaged over stages.
        peak_stash: per stage, most microbatch activations alive between forward and backward.
        peak_pending: per stage, most weight gradients put off.
        activation_slots: buffers needed for stage inputs, arrivals included, on the fullest stage.
        cotangent_slots: the same for gradients of stage outputs.
        pending_slots: the same for weight gradients put off.
        messages: activations and gradients sent to a neighbour, all stages together.
        forward_permutes: ring permutes of activations in the compiled program (see `phases`).
        backward_permutes: ring permutes of gradients in the compiled program.
    """

    num_ticks: int
    duration: float
    bubble: float
    peak_stash: tuple[int, ...]
    peak_pending: tuple[int, ...]
    activation_slots: int
    cotangent_slots: int
    pending_slots: int
    messages: int
    forward_permutes: int
    backward_permutes: int


# --- laws and costs -------------------------------------------------------------------------------


def check(schedule: Schedule) -> None:
    """Refuse a table that loses, repeats or reorders work.

    Raises:
        ScheduleError: with one line per violation (the first twenty).
    """
    problems = list(_problems(schedule))
    if problems:
        shown = problems[:20] + ["..."] * (len(problems) > 20)
        raise ScheduleError("\n".join([f"schedule {schedule.name}:", *shown]))


def simulate(schedule: Schedule, costs: Costs | None = None) -> Report:
    """Check a schedule, then count its time, messages and buffers.

    Args:
        schedule: the table.
        costs: time of each action; default F = 1, B = 2 (B = 1 and W = 1 when they are apart).

    Raises:
        ScheduleError: the table is wrong.
    """
    check(schedule)
    costs = costs or Costs()
    split = schedule.splits_backward
    spent = [[costs.of(a.kind, split) if a else 0.0 for a in tick] for tick in schedule.ticks]
    duration = sum(max(tick) for tick in spent)
    work = sum(map(sum, spent)) / schedule.num_stages
    lives = Lifetimes.of(schedule)
    stages = range(schedule.num_stages)
    when = _when(schedule)
    held = [
        [
            (tick, when.get(("backward", stage, mb, chunk), tick))
            for (kind, stage, mb, chunk), tick in when.items()
            if kind == "forward" and stage == s
        ]
        for s in stages
    ]
    messages = schedule.num_microbatches * (schedule.num_pieces - 1)
    exchanges = [
        kind
        for phase in phases(schedule)
        for kinds in phase.kinds * len(phase.rounds)
        for kind in kinds
    ]
    return Report(
        num_ticks=len(schedule.ticks),
        duration=duration,
        bubble=1.0 - work / duration,
        peak_stash=tuple(_peak(held[s]) for s in stages),
        peak_pending=tuple(_peak(lives.pending[s].values()) for s in stages),
        activation_slots=_num_slots(lives.activations),
        cotangent_slots=_num_slots(lives.cotangents),
        pending_slots=_num_slots(lives.pending),
        messages=messages * (2 if "backward" in schedule.kinds else 1),
        forward_permutes=exchanges.count("forward"),
        backward_permutes=exchanges.count("backward"),
    )


Work: TypeAlias = tuple[int, int]
"""(microbatch, chunk): what one buffer slot of a stage belongs to."""
Interval: TypeAlias = tuple[int, int]
"""First and last tick, both included."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lifetimes:
    """Per stage, from which tick to which each stashed value is alive.

    Attributes:
        activations: input of a piece, from its arrival to its backward.
        cotangents: gradient of a piece's output, from its arrival to its backward. The last piece
            has none: it starts from the loss.
        pending: what a weight gradient needs, from the backward to the weight action.
    """

    activations: list[dict[Work, Interval]]
    cotangents: list[dict[Work, Interval]]
    pending: list[dict[Work, Interval]]

    @classmethod
    def of(cls, schedule: Schedule) -> Lifetimes:
        """The lifetimes that a checked schedule implies."""
        when = _when(schedule)
        stages = range(schedule.num_stages)
        lives = cls(
            activations=[{} for _ in stages],
            cotangents=[{} for _ in stages],
            pending=[{} for _ in stages],
        )
        for (kind, stage, microbatch, chunk), tick in when.items():
            work = (microbatch, chunk)
            # Evaluation has no backward: an input lives until its forward.
            backward = when.get(("backward", stage, microbatch, chunk), tick)
            if kind == "forward":
                before = _neighbour(schedule, stage, chunk, -1)
                arrival = (
                    tick
                    if before is None
                    else when["forward", before[0], microbatch, before[1]] + 1
                )
                lives.activations[stage][work] = (arrival, backward)
            elif kind == "backward":
                after = _neighbour(schedule, stage, chunk, +1)
                if after is not None:
                    arrival = when["backward", after[0], microbatch, after[1]] + 1
                    lives.cotangents[stage][work] = (arrival, tick)
            else:
                lives.pending[stage][work] = (backward, tick)
        return lives


def colour(intervals: Mapping[Work, Interval]) -> dict[Work, int]:
    """Give each interval a slot so that intervals that overlap never share one; fewest slots.

    A slot read in tick t is free for what arrives at the end of t, which is alive from t + 1.
    """
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


# --- what the executor reads ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tables:
    """A schedule as integer arrays [num_ticks + 1, num_stages], for a program that stages share.

    In the last row all are idle.

    Attributes:
        branch: 0 idle, 1 forward, 2 backward, 3 weight.
        microbatch: which microbatch (0 when idle).
        chunk: which chunk of the stage (0 when idle).
        activation: slot of the piece's input.
        cotangent: slot of the gradient of its output.
        pending: slot of what the weight gradient needs.
        activation_arrival: slot for the activation that arrives at the end of the tick. Stages that
            get none name the spare slot, one past the last.
        cotangent_arrival: the same for gradients.
        num_slots: slots of (activations, cotangents, pending), the spare slot not counted.
    """

    branch: np.ndarray
    microbatch: np.ndarray
    chunk: np.ndarray
    activation: np.ndarray
    cotangent: np.ndarray
    pending: np.ndarray
    activation_arrival: np.ndarray
    cotangent_arrival: np.ndarray
    num_slots: tuple[int, int, int]


def tabulate(schedule: Schedule) -> Tables:
    """Number the actions and give every stashed value its slot."""
    lives = Lifetimes.of(schedule)
    families = (lives.activations, lives.cotangents, lives.pending)
    slots = [[colour(stage) for stage in family] for family in families]
    num_slots = tuple(_num_slots(family) for family in families)
    shape = (len(schedule.ticks) + 1, schedule.num_stages)
    branch, microbatch, chunk, activation, cotangent, pending = (
        np.zeros(shape, np.int32) for _ in range(6)
    )
    arrivals = [np.full(shape, num_slots[0], np.int32), np.full(shape, num_slots[1], np.int32)]
    for t, tick in enumerate(schedule.ticks):
        for s, action in enumerate(tick):
            if action is None:
                continue
            work = (action.microbatch, action.chunk)
            branch[t, s] = 1 + KINDS.index(action.kind)
            microbatch[t, s], chunk[t, s] = work
            activation[t, s] = slots[0][s][work]
            # The last piece reads no gradient: the spare slot.
            cotangent[t, s] = slots[1][s].get(work, num_slots[1])
            pending[t, s] = slots[2][s].get(work, 0)
            step = {"forward": 1, "backward": -1}.get(action.kind)
            target = _neighbour(schedule, s, action.chunk, step) if step else None
            if step and target:
                way = 0 if step == 1 else 1
                arrivals[way][t, target[0]] = slots[way][target[0]][action.microbatch, target[1]]
    return Tables(
        branch=branch,
        microbatch=microbatch,
        chunk=chunk,
        activation=activation,
        cotangent=cotangent,
        pending=pending,
        activation_arrival=arrivals[0],
        cotangent_arrival=arrivals[1],
        num_slots=num_slots,  # type: ignore[arg-type]
    )


class Phase(NamedTuple):
    """A loop: rounds of ticks, all of one form.

    `kinds[i]` are the kinds of action that the i-th tick of a round may hold; a tick whose kinds
    include forward exchanges activations, one that includes backward exchanges gradients.
    `rounds[r][i]` is the tick's number; the number of ticks stands for one in which all are idle.
    """

    rounds: tuple[tuple[int, ...], ...]
    kinds: tuple[tuple[Kind, ...], ...]


def phases(schedule: Schedule) -> list[Phase]:
    """Cut a schedule into few loops, so that a compiled loop body holds only what its ticks need.

    A forward-only warm-up then moves no gradients, and an alternation F, B becomes a loop over
    pairs; backwards alone that follow it go on in pairs without a forward. (A loop of their own
    would be one more to compile, and XLA:GPU copies all totals in it.) Stretches without a rhythm
    become one loop whose every tick may hold any of their kinds: a few idle exchanges instead of
    many loop bodies to compile.
    """
    shapes = [_kinds(tick) for tick in schedule.ticks]
    found: list[_Stretch] = []
    start = 0
    while start < len(shapes):
        best = max(
            (_rhythm(shapes, start, period) for period in range(1, _LONGEST_PERIOD + 1)),
            key=lambda stretch: (stretch.repeats > 1) * stretch.num_ticks - len(stretch.kinds),
        )
        irregular = best.repeats < _FEWEST_REPEATS
        if irregular and found and found[-1].repeats < _FEWEST_REPEATS:
            last = found.pop()
            mixed = {kind for shape in (*last.kinds, *best.kinds) for kind in shape}
            ticks = last.num_ticks + best.num_ticks
            best = _Stretch(last.start, 1, (_ordered(mixed),) * ticks)
        found.append(best)
        start = best.start + best.num_ticks
    loops: list[Phase] = []
    for stretch in found:
        phase = stretch.rolled()
        if loops and len(phase.kinds) == 1 < len(phase.rounds) and phase.kinds[0] in _pair(loops):
            loops[-1] = _continued(loops[-1], phase, len(shapes))
        else:
            loops.append(phase)
    return loops


_LONGEST_PERIOD = 3
_FEWEST_REPEATS = 2


class _Stretch(NamedTuple):
    """`repeats` rounds of `len(kinds)` ticks from tick `start`."""

    start: int
    repeats: int
    kinds: tuple[tuple[Kind, ...], ...]

    @property
    def num_ticks(self) -> int:
        """Ticks that the stretch covers."""
        return len(self.kinds) * self.repeats

    def rolled(self) -> Phase:
        """As a loop; one round of equal ticks as rounds of one tick."""
        kinds = self.kinds
        if self.repeats == 1 and len(set(kinds)) == 1:
            kinds = kinds[:1]
        ticks = range(self.start, self.start + self.num_ticks)
        period = len(kinds)
        return Phase(
            tuple(tuple(ticks[i : i + period]) for i in range(0, len(ticks), period)), kinds
        )


def _rhythm(shapes: list[set[Kind]], start: int, period: int) -> _Stretch:
    """The longest run of rounds of `period` ticks from `start`."""
    pattern = shapes[start : start + period]
    repeats = 1
    while shapes[start + repeats * period : start + (repeats + 1) * period] == pattern:
        repeats += 1
    return _Stretch(start, repeats, tuple(map(_ordered, pattern)))


def _pair(loops: list[Phase]) -> tuple[tuple[Kind, ...], ...]:
    """Kinds of the last loop where it alternates forwards and backwards, else none."""
    kinds = loops[-1].kinds
    return kinds if sorted(kinds) == [("backward",), ("forward",)] else ()


def _continued(loop: Phase, alone: Phase, idle: int) -> Phase:
    """A loop over pairs that goes on with ticks of one of its kinds."""
    place = loop.kinds.index(alone.kinds[0])
    more = tuple(
        tuple(tick if i == place else idle for i in range(len(loop.kinds)))
        for (tick,) in alone.rounds
    )
    return Phase(loop.rounds + more, loop.kinds)


def _ordered(kinds: Iterable[str]) -> tuple[Kind, ...]:
    return tuple(kind for kind in KINDS if kind in kinds)


# --- drawing -------------------------------------------------------------------------------------


def draw(schedule: Schedule, costs: Costs | None = None) -> str:
    """The table as text: one row per stage, one column per tick, and what it costs below.

    `F2` is the forward of microbatch 2, `B` backward, `W` weight gradient, `·` idle; with chunks a
    letter follows (`F2a` the stage's first chunk).
    """
    costs = costs or Costs()
    report = simulate(schedule, costs)
    many = schedule.chunks_per_stage > 1

    def cell(action: Action | None) -> str:
        if action is None:
            return "·"
        chunk = _letters(action.chunk) if many else ""
        return f"{action.kind[0].upper()}{action.microbatch}{chunk}"

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
    title += f", {schedule.chunks_per_stage} chunks per stage" if many else ""
    facts = (
        f"{report.num_ticks} ticks, bubble {report.bubble:.1%} at {unit}, "
        f"stash per stage {' '.join(map(str, report.peak_stash))}, "
        f"{report.forward_permutes}+{report.backward_permutes} permutes"
    )
    return "\n".join([title, *(row.rstrip() for row in rows), facts])


# --- private -------------------------------------------------------------------------------------


def _neighbour(schedule: Schedule, stage: int, chunk: int, step: int) -> tuple[int, int] | None:
    """(stage, chunk) of the piece `step` further along the model; None past its ends."""
    piece = schedule.piece(stage, chunk) + step
    if not 0 <= piece < schedule.num_pieces:
        return None
    chunk, stage = divmod(piece, schedule.num_stages)
    return stage, chunk


def _when(schedule: Schedule) -> dict[tuple[Kind, int, int, int], int]:
    """(kind, stage, microbatch, chunk) -> tick."""
    return {
        (action.kind, stage, action.microbatch, action.chunk): t
        for t, tick in enumerate(schedule.ticks)
        for stage, action in enumerate(tick)
        if action is not None
    }


def _kinds(tick: Tick) -> set[Kind]:
    return {action.kind for action in tick if action is not None}


def _peak(intervals: Iterable[Interval]) -> int:
    """Most intervals alive at once."""
    spans = list(intervals)
    return max((sum(a <= first <= b for a, b in spans) for first, _ in spans), default=0)


def _num_slots(stages: list[dict[Work, Interval]]) -> int:
    return max(max(colour(stage).values(), default=-1) + 1 for stage in stages)


def _letters(chunk: int) -> str:
    return chr(ord("a") + chunk) if chunk < 26 else f".{chunk}"


def _problems(schedule: Schedule) -> Iterable[str]:
    yield from _wrong_places(schedule)
    when: dict[tuple[Kind, int, int, int], int] = {}
    for t, tick in enumerate(schedule.ticks):
        for stage, action in enumerate(tick):
            if action is None:
                continue
            key = (action.kind, stage, action.microbatch, action.chunk)
            if key in when:
                yield f"{_name(key)} runs twice, in ticks {when[key]} and {t}"
            when[key] = t
    for kind in schedule.kinds:
        for stage in range(schedule.num_stages):
            for microbatch in range(schedule.num_microbatches):
                for chunk in range(schedule.chunks_per_stage):
                    key = (kind, stage, microbatch, chunk)
                    if key not in when:
                        yield f"{_name(key)} never runs"
                        continue
                    for source in _sources(schedule, key):
                        if source in when and when[source] >= when[key]:
                            yield (
                                f"{_name(key)} runs in tick {when[key]} but needs {_name(source)}, "
                                f"which runs in tick {when[source]}"
                            )


def _wrong_places(schedule: Schedule) -> Iterable[str]:
    """Actions on microbatches, chunks or stages that do not exist."""
    for t, tick in enumerate(schedule.ticks):
        if len(tick) != schedule.num_stages:
            yield f"tick {t} has {len(tick)} entries for {schedule.num_stages} stages"
        for stage, action in enumerate(tick):
            if action is None:
                continue
            inside = (
                action.kind in KINDS
                and 0 <= action.microbatch < schedule.num_microbatches
                and 0 <= action.chunk < schedule.chunks_per_stage
            )
            if not inside:
                yield f"tick {t} stage {stage}: {action} does not exist"


def _sources(
    schedule: Schedule, key: tuple[Kind, int, int, int]
) -> list[tuple[Kind, int, int, int]]:
    """What must have run in an earlier tick."""
    kind, stage, microbatch, chunk = key
    if kind == "weight":
        return [("backward", stage, microbatch, chunk)]
    found: list[tuple[Kind, int, int, int]] = []
    other = _neighbour(schedule, stage, chunk, -1 if kind == "forward" else 1)
    if other is not None:
        found.append((kind, other[0], microbatch, other[1]))
    if kind == "backward":
        found.append(("forward", stage, microbatch, chunk))
    return found


def _name(key: tuple[Kind, int, int, int]) -> str:
    kind, stage, microbatch, chunk = key
    return f"{kind} of microbatch {microbatch} chunk {chunk} on stage {stage}"
