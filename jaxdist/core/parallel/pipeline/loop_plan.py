"""Plan the loops that run a schedule: ticks of the same form become rounds of one loop.

One loop body per tick would take minutes to compile. One body for all ticks would exchange
activations and gradients in every tick, and need a branch for each kind of action.
"""

from __future__ import annotations

from typing import NamedTuple

from jaxdist.core.parallel.pipeline.schedule import Kind, Schedule, ScheduleError, kinds_of


class Loop(NamedTuple):
    """Rounds of ticks: tick `rounds[r][i]` has actions of kind `kinds[i]` only."""

    rounds: tuple[tuple[int, ...], ...]
    kinds: tuple[Kind, ...]


def plan_loops(schedule: Schedule) -> list[Loop]:
    """Return up to three loops: forwards, pairs of a backward and a forward, backwards.

    Raises `ScheduleError` if a tick has both kinds of action, or if ticks with a backward and with
    a forward do not alternate between the first backward and the last forward.
    """
    kinds = [kinds_of(tick) for tick in schedule.ticks]
    forwards = [t for t, tick in enumerate(kinds) if "forward" in tick]
    backwards = [t for t, tick in enumerate(kinds) if "backward" in tick]
    first = backwards[0] if backwards else len(kinds)
    last = max(forwards[-1] + 1, first)
    pairs = [(t, t + 1) for t in range(first, last, 2)]
    loops = [
        Loop(tuple((t,) for t in range(first)), ("forward",)),
        Loop(tuple(pairs), ("backward", "forward")),
        Loop(tuple((t,) for t in range(last, len(kinds))), ("backward",)),
    ]
    for loop in loops:
        for ticks in loop.rounds:
            for t, kind in zip(ticks, loop.kinds, strict=True):
                if t >= len(kinds) or not kinds[t] <= {kind}:
                    raise ScheduleError(
                        f"schedule {schedule.name}: tick {t} must contain only {kind} actions, so "
                        "that forwards and backwards alternate."
                    )
    return [loop for loop in loops if loop.rounds]
