"""Data type and rules of pipeline schedules: the action of each stage in each tick.

The model's layers are cut into `num_stages × num_virtual_stages` virtual stages. Virtual stage `k`
runs on stage `k % num_stages`, so neighbors in the model are neighbors on a ring. Its index among
the virtual stages of that stage is `k // num_stages`; this index is called `virtual`. A
schedule is a list of *ticks*. In a tick each stage runs one action or is idle:

    forward   run a virtual stage on a microbatch; send the output to the next one
    backward  compute its gradients; send the input's gradient to the previous one

A value sent in a tick can be used from the next tick. A tick lasts as long as its longest action.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Literal, NamedTuple, TypeAlias, get_args

Kind: TypeAlias = Literal["forward", "backward"]

KINDS: tuple[Kind, ...] = get_args(Kind)

Key: TypeAlias = tuple[Kind, int, int, int]
"""(kind, stage, microbatch, virtual) of an action."""


class Action(NamedTuple):
    """Work of one stage in one tick: its kind, microbatch and virtual stage."""

    kind: Kind
    microbatch: int
    virtual: int = 0


Tick: TypeAlias = tuple[Action | None, ...]
"""Actions of the stages; None is idle."""


class ScheduleError(ValueError):
    """Invalid sizes or actions of a schedule; the message lists up to 20."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """`ticks[t][s]` is the action of stage `s` in tick `t`."""

    name: str
    num_stages: int
    num_microbatches: int
    num_virtual_stages: int = 1
    ticks: tuple[Tick, ...]

    @property
    def total_virtual_stages(self) -> int:
        """Return the number of virtual stages of all stages together."""
        return self.num_stages * self.num_virtual_stages

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Return the kinds of actions in this schedule; evaluation has only forward."""
        kinds = set().union(*map(kinds_of, self.ticks))
        return tuple(kind for kind in KINDS if kind in kinds)

    def virtual_stage(self, stage: int, virtual: int) -> int:
        """Return the index in the model of virtual stage `virtual` of a stage."""
        return virtual * self.num_stages + stage

    def neighbor(self, stage: int, virtual: int, step: int) -> tuple[int, int] | None:
        """Return the (stage, virtual) `step` virtual stages later; None outside the model."""
        target = self.virtual_stage(stage, virtual) + step
        if not 0 <= target < self.total_virtual_stages:
            return None
        virtual, stage = divmod(target, self.num_stages)
        return stage, virtual

    def when(self) -> dict[Key, int]:
        """Return `Key` of an action -> the tick in which it runs."""
        return {
            (action.kind, stage, action.microbatch, action.virtual): t
            for t, tick in enumerate(self.ticks)
            for stage, action in enumerate(tick)
            if action is not None
        }


def kinds_of(tick: Tick) -> set[Kind]:
    """Return the kinds of action in a tick."""
    return {action.kind for action in tick if action is not None}


def check(schedule: Schedule) -> None:
    """Raise `ScheduleError` if a schedule omits, repeats or misorders work."""
    problems = list(_problems(schedule))
    if problems:
        listed = problems[:20] + ["..."] * (len(problems) > 20)
        raise ScheduleError("\n".join([f"schedule {schedule.name}:", *listed]))


def _problems(schedule: Schedule) -> Iterable[str]:
    when: dict[Key, int] = {}
    p, m, v = schedule.num_stages, schedule.num_microbatches, schedule.num_virtual_stages
    for t, tick in enumerate(schedule.ticks):
        if len(tick) != p:
            yield f"tick {t} has {len(tick)} entries for {p} stages"
        for stage, action in enumerate(tick):
            if action is None:
                continue
            kind, microbatch, virtual = action
            if not (kind in KINDS and 0 <= microbatch < m and 0 <= virtual < v):
                yield f"tick {t} stage {stage}: {action} does not exist"
            key = (kind, stage, microbatch, virtual)
            if key in when:
                yield f"{_name(key)} runs twice, in ticks {when[key]} and {t}"
            when[key] = t
    for key in itertools.product(schedule.kinds, range(p), range(m), range(v)):
        if key not in when:
            yield f"{_name(key)} never runs"
            continue
        for source in _sources(schedule, key):
            if source in when and when[source] >= when[key]:
                yield (
                    f"{_name(key)} runs in tick {when[key]} but needs {_name(source)}, "
                    f"which runs in tick {when[source]}"
                )


def _sources(schedule: Schedule, key: Key) -> list[Key]:
    """Return the actions on which this action depends; they must run in an earlier tick."""
    kind, stage, microbatch, virtual = key
    sources: list[Key] = []
    other = schedule.neighbor(stage, virtual, -1 if kind == "forward" else 1)
    if other is not None:
        sources.append((kind, other[0], microbatch, other[1]))
    if kind == "backward":
        sources.append(("forward", stage, microbatch, virtual))
    return sources


def _name(key: Key) -> str:
    kind, stage, microbatch, virtual = key
    return f"{kind} of microbatch {microbatch}, virtual={virtual}, on stage {stage}"
