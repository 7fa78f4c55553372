"""The processes that save and restore together."""

from __future__ import annotations

from jaxdist.checkpoint.errors import CheckpointError, CorruptCheckpoint
from jaxdist.runtime.coordination import Group


def make_group() -> Group:
    """Return a group for one thread's exchanges; failures of a checkpoint reach all processes alike."""
    errors = (CorruptCheckpoint, CheckpointError)
    return Group("checkpoint", errors=errors, otherwise=CheckpointError)
