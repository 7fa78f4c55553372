"""Plan the loops that run a schedule: ticks of one form become rounds of one loop, compiled once.

A body per tick would take minutes to compile. A single body would exchange activations and
gradients in every tick. The plan is between these.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxdist.core.parallel.pipeline.schedule import Kind, Schedule, kinds_of, ordered


class Loop(NamedTuple):
    """Rounds of ticks, all of one form.

    `kinds[i]` are the kinds of action that the i-th tick of a round may have; a tick whose kinds
    include forward exchanges activations, one that includes backward exchanges gradients.
    `rounds[r][i]` is the index of the tick, or the number of ticks if all stages are idle.
    """

    rounds: tuple[tuple[int, ...], ...]
    kinds: tuple[tuple[Kind, ...], ...]


def plan_loops(schedule: Schedule) -> list[Loop]:
    """Cut a schedule into few loops whose compiled bodies have only the actions of their ticks.

    1. From each tick on, the pattern of up to three ticks that repeats longest becomes a loop: a
       warm-up of forwards moves no gradients, and an alternation F, B is a loop over pairs.
    2. Ticks without such a pattern are joined into one loop whose every tick may have any of their
       kinds: a few idle exchanges instead of many loop bodies to compile.
    3. Backwards alone that follow a loop over pairs continue it, in pairs without a forward. A loop
       of their own would be one more to compile, and XLA:GPU copies all totals in it.
    """
    shapes = [kinds_of(tick) for tick in schedule.ticks]
    stretches: list[_Stretch] = []
    start = 0
    while start < len(shapes):
        best = max(
            (_longest_stretch(shapes, start, period) for period in range(1, _LONGEST_PERIOD + 1)),
            key=lambda stretch: (stretch.repeats > 1) * stretch.num_ticks - len(stretch.kinds),
        )
        irregular = best.repeats < _FEWEST_REPEATS
        if irregular and stretches and stretches[-1].repeats < _FEWEST_REPEATS:
            last = stretches.pop()
            mixed = {kind for shape in (*last.kinds, *best.kinds) for kind in shape}
            ticks = last.num_ticks + best.num_ticks
            best = _Stretch(last.start, 1, (ordered(mixed),) * ticks)
        stretches.append(best)
        start = best.start + best.num_ticks
    loops: list[Loop] = []
    for stretch in stretches:
        loop = stretch.as_loop()
        if loops and len(loop.kinds) == 1 < len(loop.rounds) and loop.kinds[0] in _pair(loops):
            loops[-1] = _continued(loops[-1], loop, len(shapes))
        else:
            loops.append(loop)
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
        return len(self.kinds) * self.repeats

    def as_loop(self) -> Loop:
        kinds = self.kinds
        if self.repeats == 1 and len(set(kinds)) == 1:
            kinds = kinds[:1]
        ticks = range(self.start, self.start + self.num_ticks)
        period = len(kinds)
        rounds = (tuple(ticks[i : i + period]) for i in range(0, len(ticks), period))
        return Loop(tuple(rounds), kinds)


def _longest_stretch(shapes: list[set[Kind]], start: int, period: int) -> _Stretch:
    pattern = shapes[start : start + period]
    repeats = 1
    while shapes[start + repeats * period : start + (repeats + 1) * period] == pattern:
        repeats += 1
    return _Stretch(start, repeats, tuple(map(ordered, pattern)))


def _pair(loops: list[Loop]) -> tuple[tuple[Kind, ...], ...]:
    kinds = loops[-1].kinds
    return kinds if sorted(kinds) == [("backward",), ("forward",)] else ()


def _continued(loop: Loop, alone: Loop, idle: int) -> Loop:
    """Append ticks of one kind to a loop over pairs, each paired with the `idle` tick."""
    own_tick = loop.kinds.index(alone.kinds[0])
    more = tuple(
        tuple(tick if i == own_tick else idle for i in range(len(loop.kinds)))
        for (tick,) in alone.rounds
    )
    return Loop(loop.rounds + more, loop.kinds)
