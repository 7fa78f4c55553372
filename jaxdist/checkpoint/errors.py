"""Failures of a checkpoint that no change of config would cure; all processes raise them alike."""

from __future__ import annotations

from typing import Any

from jaxdist.settings import ConfigError

_SHOWN = 3  # arrays that a mismatch names


class CheckpointError(RuntimeError):
    """Saving or restoring failed for good; the message says what, where and what to do."""


class CorruptCheckpoint(CheckpointError):
    """This checkpoint holds other bits than were saved; an older one may be good."""


class MismatchError(ConfigError):
    """A checkpoint has other arrays than the settings need; `document` describes its arrays."""

    def __init__(self, step: int, problems: list[str], document: dict[str, Any]):
        self.step, self.document = step, document
        lines = [f"checkpoint {step} does not fit: {line}" for line in problems[:_SHOWN]]
        if len(problems) > _SHOWN:
            lines[-1] += f" {len(problems) - _SHOWN} more arrays do not fit."
        super().__init__(lines)
