"""Checkpoints: asynchronous and atomic saves, verified restores onto any mesh.

On disk (`checkpoints/<step>/`), independent of mesh, processes and pipeline schedule:

    params/ ema_params/        arrays in Orbax's format, on an object store plain zarr; each item
    opt_state/ rest/           can be read without the others; ema_params only where a run keeps
                               an average of its weights
    meta/metadata              JSON: the caller's meta, and shape, dtype, checksum of every array
    manifest.json              size and CRC-32 of every file, written last
    CORRUPT, SUPERSEDED        why it must not be loaded, where that is so

A directory without a manifest is no checkpoint: its save was not finished. Nothing is renamed.

A leaf on its way to disk and back: `pytree` names it, `checksum` takes its checksum on the devices,
`orbax_io` writes it, or `object_io` where the directory is on an object store, and `save` commits
the files with `manifest` and `crc32`. `restore` checks the files against the manifest, `orbax_io`
or `object_io` reads the leaf onto its new sharding, and its checksum is compared.

`checkpointer` is what a run talks to. `save_schedule` says when to save, `retention` what to keep,
`lock` keeps a second run out, `preflight` tries the save path before training. `streaming_io` reads
and writes checkpoints without devices, for tools.
`local` holds a second tier: frequent saves to the hosts' own disks, which a restart prefers.
`blocks` cuts arrays into pieces, and `group` has the processes that save and restore together.
`config` holds the settings, `events` and `errors` what is reported, `crash_points` where tests kill
a save. `orbax_io` is the only module that knows Orbax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxdist.checkpoint.checkpointer import Checkpointer
    from jaxdist.checkpoint.config import CheckpointConfig
    from jaxdist.checkpoint.errors import CheckpointError
    from jaxdist.checkpoint.save_schedule import Due

__all__ = ["CheckpointConfig", "CheckpointError", "Checkpointer", "Due"]

_MODULES = {
    "CheckpointConfig": "config",
    "CheckpointError": "errors",
    "Checkpointer": "checkpointer",
    "Due": "save_schedule",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
