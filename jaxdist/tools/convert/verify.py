"""`convert verify RUN`: check that each checkpoint is complete and not corrupt."""

from __future__ import annotations

import dataclasses
import json

from jaxdist.checkpoint import CheckpointError, manifest
from jaxdist.checkpoint.events import one_line
from jaxdist.checkpoint.streaming_io import StoredArrays
from jaxdist.runtime.formatting.numbers import in_bytes
from jaxdist.runtime.progress import waiting
from jaxdist.runtime.storage import Location
from jaxdist.settings import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of `convert verify`: checkpoints and extent of the check."""

    path: str = setting("", "run directory, its checkpoints/, or one checkpoint", required=True)
    arrays: bool = setting(
        False, "also read every array and compare its checksum with the stored one"
    )
    json: bool = setting(False, "print one JSON object per checkpoint instead of text")


def run(config: Config) -> int:
    """Check one checkpoint or all of a run, print results; return 0 if they are valid, else 1."""
    directory, named = manifest.named_step(config.path)
    steps = manifest.steps_in(directory) if named is None else [named]
    corrupt = 0
    for step in steps:
        checkpoint = directory / step
        with waiting(f"verifying checkpoint {step}"):
            reason = manifest.damage(checkpoint) or (
                _array_problem(checkpoint) if config.arrays else ""
            )
        if reason and named is None and step not in manifest.steps_in(directory):
            continue  # a run that is training has deleted it
        corrupt += bool(reason)
        if config.json:
            print(json.dumps({"step": step, "whole": not reason, "reason": reason}))
        else:
            files = {} if reason else manifest.read(checkpoint)["files"]
            size = in_bytes(sum(size for size, _ in files.values()))
            result = f"CORRUPT: {reason}" if reason else f"valid, {len(files)} files, {size}"
            print(f"checkpoint {step}: {result}")
    return 1 if corrupt else 0


def _array_problem(checkpoint: Location) -> str:
    stored = StoredArrays(checkpoint)
    try:
        for name in stored.entries:
            for _ in stored.blocks(name):
                pass
    except (CheckpointError, ValueError) as error:
        return one_line(error)
    return ""
