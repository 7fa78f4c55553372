"""Heartbeats: the progress of each process in one small file, and which process is behind.

They are files of the run directory, because the key-value store of the job runs in process 0, which
may be the stuck one. The files are read only if a process makes no progress.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections import Counter
from collections.abc import Sequence

from jaxdist.runtime.formatting.tables import few
from jaxdist.runtime.storage import Location


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """The last report of a process.

    Attributes:
        phase: see `Watchdog.enter`.
        step: last finished step.
        beat: a count that increases while the process can run Python.
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
    """Return the heartbeat file of a process."""
    return folder / f"process-{process}.progress.json"


def write(folder: Location, heartbeat: Heartbeat) -> None:
    """Replace the file of this process. A full disk is ignored, so that it does not end the run."""
    with contextlib.suppress(OSError):
        path_of(folder, heartbeat.process).write(
            json.dumps(dataclasses.asdict(heartbeat)), durable=False
        )


def read(folder: Location, num_processes: int) -> list[Heartbeat | None]:
    """Return the heartbeats by process; None for a process without one."""
    heartbeats: list[Heartbeat | None] = [None] * num_processes
    for process in range(num_processes):
        with contextlib.suppress(OSError, ValueError, TypeError):
            heartbeats[process] = Heartbeat(**path_of(folder, process).json())
    return heartbeats


def silent(before: Sequence[Heartbeat | None], after: Sequence[Heartbeat | None]) -> list[int]:
    """Return the processes that wrote nothing between two readings (stopped, dead, host dead)."""
    return [i for i, (old, new) in enumerate(zip(before, after, strict=True)) if old == new]


def diagnose(before: Sequence[Heartbeat | None], after: Sequence[Heartbeat | None]) -> str:
    """Name the process that is behind, in one line, from heartbeats read some beats apart.

    The first that applies: processes without a heartbeat; processes that finished fewer steps;
    processes in another phase while the others wait in a step.
    """
    if stopped := silent(before, after):
        who = [str(after[i] or f"process {i}, which never reported") for i in stopped]
        return f"{few(who, 4, '; ')}: no sign of life (stopped, dead, or its host is)"
    heartbeats = [heartbeat for heartbeat in after if heartbeat is not None]
    if len(heartbeats) == 1:
        return f"{heartbeats[0]}: no progress"
    first = max(heartbeat.step for heartbeat in heartbeats)
    late = [str(heartbeat) for heartbeat in heartbeats if heartbeat.step < first]
    if late:
        return f"{few(late, 4, '; ')}: behind the others, who have finished step {first}"
    phases = Counter(heartbeat.phase for heartbeat in heartbeats)
    if len(phases) > 1:
        waiting = "step" if "step" in phases else phases.most_common(1)[0][0]
        others = [str(heartbeat) for heartbeat in heartbeats if heartbeat.phase != waiting]
        return f"{few(others, 4, '; ')}: the others wait for it in phase {waiting}"
    return (
        f"no process is behind: all {len(heartbeats)} have finished step {first} and are in phase "
        f"{heartbeats[0].phase}, so a device or the network between them hangs"
    )
