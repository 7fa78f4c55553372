"""Choose the local save to restore and, for each process, the source of its shards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxdist.checkpoint.local.store import Save


class Selection(NamedTuple):
    """The chosen save and, per process, the process to read its shards from (itself if possible).

    If no save is complete, `sources` is empty and `reason` has why the newest was rejected.
    """

    generation: int = 0
    step: int = 0
    sources: Sequence[int] = ()
    reason: str = ""


def newest(replies: Sequence[Sequence[Any]], at_least: int) -> Selection:
    """Return the newest save with step ≥ `at_least` whose sets of shards are all available.

    Each process replies with the shards that it needs and the `Save`s on its disk.
    """
    needs = [str(needed) for needed, _ in replies]
    disks = [{Save(*save) for save in has} for _, has in replies]
    reason = ""
    for generation, step in sorted({save[:2] for disk in disks for save in disk}, reverse=True):
        if step < at_least:
            continue
        required = [Save(generation, step, needed) for needed in needs]
        having = {w: [p for p, disk in enumerate(disks) if w in disk] for w in set(required)}
        if all(having.values()):
            sources = [
                process if process in having[w] else having[w][process % len(having[w])]
                for process, w in enumerate(required)
            ]
            return Selection(generation, step, sources)
        reason = reason or _why_not(step, required, having)
    return Selection(reason=reason)


def _why_not(step: int, required: Sequence[Save], having: Mapping[Save, Sequence[int]]) -> str:
    lacking = sum(not having[save] for save in required)
    if lacking == len(required):
        return (
            f"the local save of step {step} has another layout (mesh, processes, model or "
            "optimizer), and only the run directory can be restored onto this one"
        )
    return (
        f"the local save of step {step} is incomplete: the shards of {lacking} of "
        f"{len(required)} processes are on no disk"
    )
