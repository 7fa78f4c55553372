"""Plan the loops that run a schedule: ticks of the same form become rounds of one loop.

One loop body per tick would take minutes to compile. One body for all ticks would exchange
activations and gradients in every tick. The plan is a compromise: a few bodies.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxdist.core.parallel.pipeline.schedule import Kind, Schedule, kinds_of, ordered


class Loop(NamedTuple):
    """A loop whose rounds consist of the same kinds of ticks.

    `kinds[i]` are the action kinds that tick i of a round may contain. A tick exchanges activations
    if they include forward, and gradients if they include backward. `rounds[r][i]` is the index of
    the tick, or the number of ticks if all stages are idle.
    """

    rounds: tuple[tuple[int, ...], ...]
    kinds: tuple[tuple[Kind, ...], ...]


def plan_loops(schedule: Schedule) -> list[Loop]:
    """Cut a schedule into a few loops whose compiled bodies contain only the necessary actions.

    1. At each tick, the repeating pattern of up to three ticks that covers most ticks becomes a
       loop: a warm-up of forwards exchanges no gradients, alternating F, B is a loop over pairs.
    2. Ticks without a repeating pattern are joined into one loop, whose ticks may have any of their
       kinds. This costs a few idle exchanges but avoids compiling many bodies.
    3. Backward-only ticks after a loop over pairs extend that loop, as pairs with an idle forward.
       A separate loop would be one more to compile, and XLA:GPU would copy all totals for it.
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
    """A run of `repeats` rounds of `len(kinds)` ticks that starts at tick `start`."""

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
    """Append single ticks to a loop over pairs; the `idle` tick completes each pair."""
    own_tick = loop.kinds.index(alone.kinds[0])
    more = tuple(
        tuple(tick if i == own_tick else idle for i in range(len(loop.kinds)))
        for (tick,) in alone.rounds
    )
    return Loop(loop.rounds + more, loop.kinds)
