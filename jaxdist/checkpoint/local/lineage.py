"""Record which local saves belong to a run: a small file in its checkpoint directory.

The file has an id of the run, and the step from which each generation (start or rollback) resumed.
A local save is valid unless a later generation resumed from an earlier step.
"""

from __future__ import annotations

import dataclasses
import json
import uuid

from jaxdist.runtime.storage import Location

FILE_NAME = "local_tier.json"


@dataclasses.dataclass
class Lineage:
    """Id of the run on local disks, and the step each generation resumed from (-1 = none)."""

    run: str
    resumed_from: list[int]

    @property
    def generation(self) -> int:
        """Number of the newest generation (a start or a rollback), counted from 0; -1 = none."""
        return len(self.resumed_from) - 1

    def counts(self, generation: int, step: int) -> bool:
        """Return whether a save is valid: no later generation resumed from a step before `step`."""
        exists = 0 <= generation <= self.generation
        return exists and all(step <= later for later in self.resumed_from[generation + 1 :])


def read(directory: Location) -> Lineage:
    """Return the lineage of a checkpoint directory; a new one if it has none that is valid."""
    try:
        stored = (directory / FILE_NAME).json()
        return Lineage(str(stored["run"]), [int(step) for step in stored["resumed_from"]])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return Lineage(uuid.uuid4().hex[:16], [])  # existing local saves are unrelated


def write(directory: Location, lineage: Lineage) -> None:
    """Store the lineage durably."""
    (directory / FILE_NAME).write(json.dumps(dataclasses.asdict(lineage)))
