"""Errors of checkpoints that no setting can fix. All processes raise the same error."""

from __future__ import annotations

from typing import Any

from jaxdist.runtime.coordination import Group
from jaxdist.settings import ConfigError

_MAX_NAMED = 3  # arrays listed in an error message


class CheckpointError(RuntimeError):
    """A save or restore failed permanently; the message has cause, path and fix."""


class CorruptCheckpoint(CheckpointError):
    """The stored bits differ from the saved ones; an older checkpoint may be intact."""


class MismatchError(ConfigError):
    """The arrays of a checkpoint do not match the settings; `document` describes them."""

    def __init__(self, step: int, problems: list[str], document: dict[str, Any]):
        self.step, self.document = step, document
        lines = [f"checkpoint {step} does not fit: {line}" for line in problems[:_MAX_NAMED]]
        if len(problems) > _MAX_NAMED:
            lines[-1] += f" {len(problems) - _MAX_NAMED} more arrays do not fit."
        super().__init__(lines)


def make_group() -> Group:
    """Return a group for the exchanges of one thread; all processes raise the same errors."""
    errors = (CorruptCheckpoint, CheckpointError)
    return Group("checkpoint", errors=errors, otherwise=CheckpointError)
