"""The processes that save and restore together, and the errors that all of them raise alike."""

from __future__ import annotations

from jaxdist.checkpoint.errors import CheckpointError, CorruptCheckpoint
from jaxdist.runtime import coordination


def make_group() -> coordination.Group:
    """A group for one thread's exchanges about checkpoints."""
    errors = (CorruptCheckpoint, CheckpointError)
    return coordination.Group("checkpoint", errors=errors, otherwise=CheckpointError)


def make_barrier() -> coordination.Barrier:
    """The barrier at which Orbax's writers meet; a process whose disk is full gives it up."""
    return coordination.Barrier("checkpoint/save")
