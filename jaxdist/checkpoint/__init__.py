"""Save checkpoints asynchronously and atomically; restore them, verified, onto any mesh.

On disk (`checkpoints/<step>/`), independent of mesh, processes and pipeline schedule:

    arrays/                    the arrays in Orbax's format; their names begin with the item:
                               params, ema_params (if the run averages its weights), opt_state, rest
    params/ opt_state/ ...     instead, on an object store: plain zarr arrays
    meta/metadata              JSON: step, caller's meta, and shape, dtype, checksum of every array
    manifest.json              size and CRC-32 of every file, written last
    CORRUPT, SUPERSEDED        marker files with the reason not to load the checkpoint

A directory without a manifest is an unfinished save. No directory is renamed.

`checkpointer` is the interface for a run; `save` lists the steps of a save. Only `orbax_io` imports
Orbax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxdist.checkpoint.checkpointer import Checkpointer
    from jaxdist.checkpoint.config import CheckpointConfig
    from jaxdist.checkpoint.events import CheckpointError
    from jaxdist.checkpoint.save_schedule import Due

__all__ = ["CheckpointConfig", "CheckpointError", "Checkpointer", "Due"]

_MODULES = {
    "CheckpointConfig": "config",
    "CheckpointError": "events",
    "Checkpointer": "checkpointer",
    "Due": "save_schedule",
}


def __getattr__(name: str) -> Any:
    """Return a class, imported at the first access: the launcher reads manifests without JAX."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
