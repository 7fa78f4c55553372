"""Which local save a restart takes, and where each process finds its shards: a pure function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxdist.checkpoint.local.store import Save


class Answer(NamedTuple):
    """The answer to all: a save, and for each process the one that has its shards, at best itself.

    Where there is none, `sources` is empty and `reason` says why the newest one is not taken.
    """

    generation: int = 0
    step: int = 0
    sources: Sequence[int] = ()
    reason: str = ""


def newest(said: Sequence[Sequence[Any]], at_least: int) -> Answer:
    """Return the newest save, of that step or later, whose every set of shards some process has.

    Each process has said which shards it needs, and which `Save`s are on its disk.
    """
    needs = [str(needed) for needed, _ in said]
    disks = [{Save(*save) for save in has} for _, has in said]
    reason = ""
    for generation, step in sorted({save[:2] for disk in disks for save in disk}, reverse=True):
        if step < at_least:
            continue
        wanted = [Save(generation, step, needed) for needed in needs]
        having = {w: [p for p, disk in enumerate(disks) if w in disk] for w in set(wanted)}
        if all(having.values()):
            sources = [
                process if process in having[w] else having[w][process % len(having[w])]
                for process, w in enumerate(wanted)
            ]
            return Answer(generation, step, sources)
        reason = reason or _why_not(step, wanted, having)
    return Answer(reason=reason)


def _why_not(step: int, wanted: Sequence[Save], having: Mapping[Save, Sequence[int]]) -> str:
    lacking = sum(not having[save] for save in wanted)
    if lacking == len(wanted):
        return (
            f"the local save of step {step} is of another layout (mesh, processes, model or "
            "optimizer), which only the run directory can be restored onto"
        )
    return (
        f"the local save of step {step} cannot be put together: the shards of {lacking} of "
        f"{len(wanted)} processes are on no disk"
    )
