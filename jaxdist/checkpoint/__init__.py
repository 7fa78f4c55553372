"""Checkpoints: asynchronous and atomic saves, verified restores onto any mesh.

On disk (`checkpoints/<step>/`), independent of mesh, processes and pipeline schedule:

    params/ opt_state/ rest/   arrays, written by Orbax; each can be read without the others
    meta/metadata              JSON: the caller's meta, and shape, dtype and digest of every array
    manifest.json              size and CRC-32 of every file, written last

A checkpoint is written under `.saving/` and gets its name when its manifest is complete: whatever
is found under a step's name was whole once.

`checkpointer` is what a run talks to: `saving` and `restoring` do its two jobs. `store` is the only
file that knows Orbax; `manifest` and `digest` prove that what is read is what was written; `tree`
names leaves; `schedule` says when to save, `retention` what is kept; `lock` keeps a second run out;
`coordination` lets process 0 decide for all; `probe` tries it all before training.
"""

from jaxdist.checkpoint.checkpointer import Checkpointer
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.errors import CheckpointError
from jaxdist.checkpoint.save_schedule import Due

__all__ = ["CheckpointConfig", "CheckpointError", "Checkpointer", "Due"]
