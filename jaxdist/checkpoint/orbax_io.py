"""Orbax, and nothing else of the package knows it: arrays to files and back.

Orbax's `AsyncCheckpointer` gives the atomic directory and the background writes. Its
`CheckpointManager` is not used: when to save, what to keep and what to trust is decided by us,
because the manager trusts damaged files, takes an empty directory for the newest checkpoint and
hides a failed save until the next one.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax

from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.pytree import ITEMS
from jaxdist.runtime.coordination import Barrier

_DOCUMENT = "meta"  # the JSON item beside the array items
_LEAST_SHARE_BYTES = 16 << 20

CHUNK_BYTES = 64 << 20
"""Largest chunk of an array on disk: the least that a restore on another mesh reads."""

SAVE_TIMEOUT_S = 300
"""How long processes wait for each other to finish writing one checkpoint."""

_DICT_KEY = 2  # Orbax's code for a key of a dict in its tree metadata


class Store:
    """Writes one checkpoint at a time in the background; Orbax is imported on first use."""

    def __init__(self, config: CheckpointConfig, barrier: Barrier) -> None:
        self._config = config
        self._barrier = barrier
        self._writer: Any = None

    def start_write(
        self, checkpoint: Path, items: dict[str, dict[str, Any]], document: dict[str, Any]
    ) -> None:
        """Copy arrays to the host and begin to write; returns before they are on disk.

        Args:
            checkpoint: directory to make; it appears under this name only when complete.
            items: item -> nested dict of global arrays.
            document: JSON beside the arrays.
        """
        import orbax.checkpoint as ocp

        if self._writer is None:
            self._writer = self._make_writer()
        save_args = ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES)
        parts: dict[str, Any] = {
            item: ocp.args.PyTreeSave(tree, save_args=jax.tree.map(lambda _: save_args, tree))
            for item, tree in items.items()
        }
        parts[_DOCUMENT] = ocp.args.JsonSave(document)
        self._barrier.begin()
        self._writer.save(checkpoint, args=ocp.args.Composite(**parts))

    def finish_write(self) -> None:
        """Wait until what `start_write` began is committed on every process; raise if it failed."""
        self._writer.wait_until_finished()

    def close(self) -> None:
        """Stop the background threads."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _make_writer(self) -> Any:
        import orbax.checkpoint as ocp

        handlers = {item: _handler(self._config) for item in ITEMS}
        return ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(**handlers, **{_DOCUMENT: ocp.JsonCheckpointHandler()}),
            # Made in the background, a directory that cannot be made would be noticed only after
            # the time-out, by threads that keep the process from exiting.
            async_options=ocp.AsyncOptions(
                timeout_secs=SAVE_TIMEOUT_S,
                create_directories_asynchronously=False,
                barrier_sync_fn=self._barrier.wait,
            ),
        )


def read(
    checkpoint: Path, targets: dict[str, dict[str, Any]], config: CheckpointConfig
) -> dict[str, dict[str, Any]]:
    """Read items onto shardings; each process reads what its own devices hold.

    Args:
        checkpoint: directory to read.
        targets: item -> nested dict of `jax.ShapeDtypeStruct` with sharding, as stored; a part of
            an item's leaves is enough.
        config: bounds the host memory.
    """
    import orbax.checkpoint as ocp

    reader = ocp.Checkpointer(
        ocp.CompositeCheckpointHandler(**{item: _handler(config) for item in targets})
    )
    parts = {
        item: ocp.args.PyTreeRestore(
            tree,
            restore_args=ocp.checkpoint_utils.construct_restore_args(tree),
            partial_restore=True,  # `tree.mismatches` has named what is missing or left over
        )
        for item, tree in targets.items()
    }
    try:
        restored = reader.restore(checkpoint, args=ocp.args.Composite(**parts))
    finally:
        reader.close()
    return {item: restored[item] for item in targets}


def read_document(checkpoint: Path) -> dict[str, Any]:
    """The JSON that was written beside the arrays."""
    return json.loads((checkpoint / _DOCUMENT / "metadata").read_text())


def write_frame(checkpoint: Path, document: dict[str, Any]) -> None:
    """Write what Orbax wants beside arrays that were written by other means, and the document."""
    trees: dict[str, dict[str, Any]] = {}
    for name, entry in document["arrays"].items():
        item, keys = name.partition("/")[0], entry["path"]
        trees.setdefault(item, {})[str(tuple(keys))] = {
            "key_metadata": [{"key": key, "key_type": _DICT_KEY} for key in keys],
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
        }
    for item, leaves in trees.items():
        metadata = {
            "tree_metadata": leaves,
            "use_ocdbt": True,
            "use_zarr3": False,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        }
        (checkpoint / item / "_METADATA").write_text(json.dumps(metadata))
    (checkpoint / _DOCUMENT).mkdir(parents=True)
    (checkpoint / _DOCUMENT / "metadata").write_text(json.dumps(document))


def _handler(config: CheckpointConfig) -> Any:
    import orbax.checkpoint as ocp

    arrays = ocp.type_handlers.ArrayHandler(
        # Replicas share the copying of a leaf only where that is worth it: every share is a program
        # of its own per device to compile, 190 s for 4 MB on 64 simulated devices.
        min_slice_bytes_for_replica_parallel=_LEAST_SHARE_BYTES
    )
    return ocp.PyTreeCheckpointHandler(
        type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array, arrays)),
        use_compression=False,  # floats shrink by 8 % and take 3 to 4 times longer
        save_concurrent_gb=config.host_memory_gb,
        restore_concurrent_gb=config.host_memory_gb,
    )
