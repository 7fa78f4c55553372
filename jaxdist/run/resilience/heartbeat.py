"""Where each process of a run stands, in one small file each, and which of them is behind.

Files in the run directory and not the job's key-value store: that store lives in process 0, and it
must be found out just the same when it is process 0 that stands still. Nobody reads them until
something is wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Sequence

from jaxdist.runtime.storage import Location


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """One process as it last said.

    Attributes:
        process: its index.
        host: its host.
        pid: its process id there.
        phase: what it is doing: start, restore, compile, data, step, evaluation, save, end.
        step: the last step it has finished.
        beat: grows as long as the process can run Python at all.
    """

    process: int
    host: str
    pid: int
    phase: str
    step: int
    beat: int

    def __str__(self) -> str:
        return (
            f"process {self.process} on {self.host} (pid {self.pid}), "
            f"last step {self.step}, phase {self.phase}"
        )


def path_of(folder: Location, process: int) -> Location:
    """The file of one process."""
    return folder / f"process-{process}.progress.json"


def write(folder: Location, heartbeat: Heartbeat) -> None:
    """Replace this process's file; a full disk is no reason to stop."""
    with contextlib.suppress(OSError):
        path_of(folder, heartbeat.process).write(
            json.dumps(dataclasses.asdict(heartbeat)), durable=False
        )


def read(folder: Location, num_processes: int) -> list[Heartbeat | None]:
    """Every process's file; None where there is none."""
    found: list[Heartbeat | None] = []
    for process in range(num_processes):
        try:
            found.append(Heartbeat(**path_of(folder, process).json()))
        except (OSError, ValueError, TypeError):
            found.append(None)
    return found


def silent(before: Sequence[Heartbeat | None], after: Sequence[Heartbeat | None]) -> list[int]:
    """Processes that wrote nothing between two readings: stopped, dead, or their host is."""
    return [i for i, (old, new) in enumerate(zip(before, after, strict=True)) if old == new]


def diagnose(before: Sequence[Heartbeat | None], after: Sequence[Heartbeat | None]) -> str:
    """Who is behind, from two readings some beats apart; one line.

    In this order: who gives no sign of life; who has finished fewer steps; who does something else
    while the others wait for it inside a step.
    """
    if quiet := silent(before, after):
        who = [str(after[i] or f"process {i}, which never reported") for i in quiet]
        return f"{_some(who)}: no sign of life (stopped, dead, or its host is)"
    heartbeats = [heartbeat for heartbeat in after if heartbeat is not None]
    if len(heartbeats) == 1:
        return f"{heartbeats[0]}: it makes no progress"
    first = max(heartbeat.step for heartbeat in heartbeats)
    late = [str(heartbeat) for heartbeat in heartbeats if heartbeat.step < first]
    if late:
        return f"{_some(late)}: behind the others, who have finished step {first}"
    phases = Counter(heartbeat.phase for heartbeat in heartbeats)
    if len(phases) > 1:
        waiting = "step" if "step" in phases else phases.most_common(1)[0][0]
        odd = [str(heartbeat) for heartbeat in heartbeats if heartbeat.phase != waiting]
        return f"{_some(odd)}: the others wait for it in phase {waiting}"
    return (
        f"no process is behind: all {len(heartbeats)} stand after step {first} in phase "
        f"{heartbeats[0].phase}, so a device or the network between them hangs"
    )


def _some(names: list[str]) -> str:
    return "; ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
