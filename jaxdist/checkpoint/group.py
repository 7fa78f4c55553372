"""Create groups of processes that save and restore together."""

from __future__ import annotations

from jaxdist.checkpoint.errors import CheckpointError, CorruptCheckpoint
from jaxdist.runtime.coordination import Group


def make_group() -> Group:
    """Return a group for the exchanges of one thread; all processes raise the same errors."""
    errors = (CorruptCheckpoint, CheckpointError)
    return Group("checkpoint", errors=errors, otherwise=CheckpointError)
