"""The failure of a checkpoint that no change of config would cure."""


class CheckpointError(RuntimeError):
    """Saving or restoring failed for good; the message says what, where and what to do."""


class CorruptCheckpoint(CheckpointError):
    """This checkpoint holds other bits than were saved; an older one may be good."""
