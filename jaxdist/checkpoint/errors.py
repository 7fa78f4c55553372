"""Failures of a checkpoint that no change of config would cure; all processes raise them alike."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """Saving or restoring failed for good; the message says what, where and what to do."""


class CorruptCheckpoint(CheckpointError):
    """This checkpoint holds other bits than were saved; an older one may be good."""
