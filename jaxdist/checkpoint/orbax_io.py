"""Arrays to files and back. The only file that knows Orbax and its format on disk.

Orbax's `AsyncCheckpointer` copies arrays to the host and writes them in the background, each
process what its devices hold. It writes under the final name (`CommitFileTemporaryPath`, as it does
on object stores): our manifest makes the checkpoint count, so nothing has to be renamed.

Its `CheckpointManager` is not used. It trusts damaged files, takes an empty directory for the
newest checkpoint and hides a failed save until the next one, so when to save, what to keep and what
to trust is decided here (`save_schedule`, `retention`, `manifest`).

On disk all arrays are zarr arrays in one OCDBT store, `arrays/`, which Orbax and TensorStore read;
`open_array` does so without JAX, for tools. One store and not one for each item: an item takes
Orbax threads of its own, and with three of them training waited twice as long for a save.

Orbax writes to no S3 and, beside a run on Google Cloud Storage, wants credentials of its own for
each of the three libraries below it. On an object store `object_io` takes its place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jaxdist.checkpoint import manifest, object_io
from jaxdist.checkpoint.blocks import Index
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.object_io import ObjectWriter
from jaxdist.runtime.coordination.barrier import Barrier
from jaxdist.runtime.storage import Location

ARRAYS = "arrays"
"""Directory of a checkpoint that holds its arrays; keys start with the item: `params.layers.…`."""

CHUNK_BYTES = 64 << 20
"""Largest chunk of an array on disk: the least that a restore on another mesh reads."""

_LEAST_SHARE_BYTES = 16 << 20
_HOST_MEMORY_GB = 32  # of arrays being read or written at a time; less makes restores read again

SAVE_TIMEOUT_S = 300
"""How long processes wait for each other to finish writing one checkpoint."""

_DICT_KEY = 2  # Orbax's code for a key of a dict in its tree metadata


def make_writer(directory: Location, config: CheckpointConfig) -> OrbaxWriter | ObjectWriter:
    """What writes checkpoints into a directory, one at a time."""
    return OrbaxWriter(config) if directory.is_local else ObjectWriter()


class OrbaxWriter:
    """Writes one checkpoint at a time in the background; Orbax is imported on first use.

    Attributes:
        fingerprints: None: what is on disk must be read to be known (`ObjectWriter`).
    """

    fingerprints = None

    def __init__(self, config: CheckpointConfig) -> None:
        self._barrier = Barrier("checkpoint/save")
        self._config = config
        self._writer: Any = None

    def start(self, checkpoint: Location, items: dict[str, dict[str, Any]]) -> None:
        """Copy arrays to the host and begin to write; returns before they are on disk.

        `items` are nested dicts of global arrays, of any shape, dtype and sharding.
        """
        import orbax.checkpoint as ocp

        if self._writer is None:
            self._writer = self._make_writer()
        save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), items)
        self._barrier.begin()
        args: Any = ocp.args.PyTreeSave(items, save_args=save_args)
        self._writer.save(str(checkpoint / ARRAYS), args=args)

    def wait(self) -> None:
        """Wait until what `start` began is on disk on every process; raise if it failed."""
        self._writer.wait_until_finished()

    def give_up(self) -> None:
        """Free the other processes from waiting for this one, whose disk may be full."""
        self._barrier.give_up()

    def close(self) -> None:
        """Stop the background threads."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _make_writer(self) -> Any:
        import orbax.checkpoint as ocp

        _skip_byte_counts()
        return ocp.AsyncCheckpointer(
            _handler(),
            temporary_path_class=ocp.path.atomicity.CommitFileTemporaryPath,
            # Made in the background, a directory that cannot be made would be noticed only after
            # the time-out, by threads that keep the process from exiting.
            async_options=ocp.AsyncOptions(
                timeout_secs=SAVE_TIMEOUT_S,
                create_directories_asynchronously=False,
                barrier_sync_fn=self._barrier.wait,
            ),
        )


def read(checkpoint: Location, targets: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Read items onto shardings; each process reads what its own devices hold.

    `targets` maps an item to a nested dict of `jax.ShapeDtypeStruct` with sharding, as stored; a
    part of an item's leaves is enough.

    Returns:
        The same items and dicts with global arrays of the shapes, dtypes and shardings asked for.
    """
    if not checkpoint.is_local:
        return object_io.read(checkpoint, targets)
    import orbax.checkpoint as ocp

    reader = ocp.Checkpointer(_handler())
    args: Any = ocp.args.PyTreeRestore(
        targets,
        restore_args=ocp.checkpoint_utils.construct_restore_args(targets),
        partial_restore=True,  # `pytree.mismatches` has named what is missing or left over
    )
    try:
        return reader.restore(str(checkpoint / ARRAYS), args=args)
    finally:
        reader.close()


def write_document(checkpoint: Location, document: dict[str, Any]) -> None:
    """Write the JSON next to the arrays."""
    file = checkpoint / manifest.DOCUMENT
    file.parent.make_directory()
    file.write(json.dumps(document))


def read_document(checkpoint: Location) -> dict[str, Any]:
    """Return the JSON that was written next to the arrays."""
    return (checkpoint / manifest.DOCUMENT).json()


def open_array(
    checkpoint: Location, item: str, keys: Sequence[str], create: Mapping[str, Any] | None = None
) -> Any:
    """Return the array with these keys in an item, to `read` and `write` by index, or to make it.

    `create` has `shape`, `chunks` (shape of a piece on disk) and NumPy `dtype` of a new array.
    """
    if not checkpoint.is_local:
        return object_io.open_array(checkpoint, item, keys, create)
    import tensorstore

    place = {"base": (checkpoint / ARRAYS).uri() + "/", "path": ".".join((item, *keys)) + "/"}
    spec: dict[str, Any] = {"driver": "zarr", "kvstore": {"driver": "ocdbt", **place}}
    if create is None:
        return _StoredArray(tensorstore.open(spec, open=True, read=True).result())
    spec["kvstore"]["config"] = {"max_inline_value_bytes": 1024}
    described = ("shape", "chunks", "dtype", "compressor")
    metadata = object_io.zarr_metadata(create["shape"], create["chunks"], create["dtype"])
    spec["metadata"] = {key: metadata[key] for key in described}
    return _StoredArray(tensorstore.open(spec, create=True).result())


class _StoredArray:
    """An array on disk, read and written in parts; `chunk` is the shape of its pieces."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.chunk: tuple[int, ...] = handle.chunk_layout.read_chunk.shape

    def read(self, index: Index) -> np.ndarray:
        """Return a part [...] in the stored dtype: one slice for each leading dim, () = all of it."""
        return self._handle[index].read().result()

    def write(self, index: Index, part: np.ndarray) -> None:
        """Write `part` [shape of `index`] to its place."""
        self._handle[index].write(part).result()


def write_frame(checkpoint: Location, document: dict[str, Any]) -> None:
    """Write what Orbax needs next to arrays made with `open_array`, and the document."""
    write_document(checkpoint, document)
    if not checkpoint.is_local:
        return
    leaves = {}
    for name, entry in document["arrays"].items():
        keys = (name.partition("/")[0], *entry["path"])
        leaves[str(keys)] = {
            "key_metadata": [{"key": key, "key_type": _DICT_KEY} for key in keys],
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
        }
    metadata = {
        "tree_metadata": leaves,
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    (checkpoint / ARRAYS / "_METADATA").write(json.dumps(metadata))


def _skip_byte_counts() -> None:
    """Keep Orbax from reading TensorStore's counters of bytes around a save; it only logs them.

    TensorStore 0.1.86 never frees what it returns there: 48 lists and 34 kB a save.
    """
    from orbax.checkpoint._src.serialization import tensorstore_utils

    if hasattr(tensorstore_utils, "get_tensorstore_raw_bytes"):
        vars(tensorstore_utils)["get_tensorstore_raw_bytes"] = lambda direction: 0


def _handler() -> Any:
    import orbax.checkpoint as ocp

    arrays = ocp.type_handlers.ArrayHandler(
        # Replicas share the copying of a leaf only where that is worth it: every share is a program
        # of its own per device to compile, 190 s for 4 MB on 64 simulated devices.
        min_slice_bytes_for_replica_parallel=_LEAST_SHARE_BYTES,
        # A restore is told its shardings. The file costs a thread an item while training waits.
        enable_write_sharding_file=False,
    )
    return ocp.PyTreeCheckpointHandler(
        type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array, arrays)),
        use_compression=False,  # floats shrink by 8 % and take 3 to 4 times longer
        save_concurrent_gb=_HOST_MEMORY_GB,
        restore_concurrent_gb=_HOST_MEMORY_GB,
    )
