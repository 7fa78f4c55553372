"""Which local saves belong to the run as it stands: a small file in the run directory.

Local disks forget nothing by themselves. A host that comes back may hold saves of a run that was
deleted, or of steps that were done again from an older checkpoint. So the checkpoint directory
names the run, and tells from which step each start or rollback went on. One of those is a
generation. A save counts while no later generation went on from an earlier step.
"""

from __future__ import annotations

import dataclasses
import json
import uuid

from jaxdist.runtime.storage import Location

FILE_NAME = "local_tier.json"


@dataclasses.dataclass
class Lineage:
    """The run's name on local disks, and the step that each generation went on from (-1: none)."""

    run: str
    resumed_from: list[int]

    @property
    def generation(self) -> int:
        """The newest one."""
        return len(self.resumed_from) - 1

    def counts(self, generation: int, step: int) -> bool:
        """Return whether a save belongs to the run as it stands."""
        known = 0 <= generation <= self.generation
        return known and all(step <= later for later in self.resumed_from[generation + 1 :])


def read(directory: Location) -> Lineage:
    """What a checkpoint directory tells; a new run where it tells nothing."""
    try:
        found = (directory / FILE_NAME).json()
        return Lineage(str(found["run"]), [int(step) for step in found["resumed_from"]])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return Lineage(uuid.uuid4().hex[:16], [])  # what lies on local disks is a stranger's


def write(directory: Location, lineage: Lineage) -> None:
    """Keep it, durably."""
    (directory / FILE_NAME).write(json.dumps(dataclasses.asdict(lineage)))


def forget(directory: Location) -> None:
    """A run goes on without local saves: those that it has made do not count any more."""
    (directory / FILE_NAME).delete()
