"""Named points during saving and restoring at which tests kill the process."""

from __future__ import annotations

import os
import signal
from typing import Literal, get_args

VARIABLE = "JAXDIST_CRASH_POINT"
"""Environment variable that names the point at which this process dies; for tests."""

CrashPoint = Literal[
    "lock_taken",  # the directory is locked, unfinished saves are not deleted yet
    "before_arrays",  # a save is prepared, none of its files exists
    "during_arrays",  # Orbax writes arrays in the background
    "during_upload",  # the object store has only some objects of a save
    "after_arrays",  # all arrays are on disk on this process
    "before_manifest",  # every file has its CRC-32, the manifest is not written
    "after_manifest",  # the checkpoint counts, older ones are not deleted yet
    "during_retention",  # an old checkpoint has lost its manifest, not its other files
    "during_mark",  # a corrupt or superseded checkpoint is not marked yet
    "during_restore",  # the arrays are read and not yet returned to the run
    "during_moments",  # new moments of a group are complete, and have not replaced the old ones
]
POINTS: tuple[CrashPoint, ...] = get_args(CrashPoint)


def crash_point(name: CrashPoint) -> None:
    """Kill this process (SIGKILL) if the environment variable `VARIABLE` names this point."""
    if os.environ.get(VARIABLE) == name:
        os.kill(os.getpid(), signal.SIGKILL)
