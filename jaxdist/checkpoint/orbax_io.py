"""Write arrays to files and read them. Only this file depends on Orbax and its format.

Orbax's `AsyncCheckpointer` writes under the final name (`CommitFileTemporaryPath`), because our
manifest commits the checkpoint. We do not use Orbax's `CheckpointManager`, because it accepts
damaged files and reports a failed save only at the next save.

All arrays are zarr arrays in one OCDBT store, `arrays/`. With one store per item, Orbax would start
threads for each item, and training would wait longer. Orbax cannot write to S3, so on object stores
`object_io` replaces it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxdist.checkpoint import manifest, object_io
from jaxdist.checkpoint.blocks import Index
from jaxdist.checkpoint.object_io import ObjectWriter
from jaxdist.runtime.coordination.group import Barrier
from jaxdist.runtime.storage import Location

ARRAYS = "arrays"
"""Directory of the arrays in a checkpoint; keys start with the item: `params.layers.…`."""

PART = "part_"
"""First part of the name of a directory in `arrays/` to which a single process writes."""

CHUNK_BYTES = 64 << 20
"""Largest chunk of an array on disk; a restore reads complete chunks."""

_LEAST_SHARE_BYTES = 16 << 20
_HOST_MEMORY_GB = 32  # for concurrent reads or writes; with less, restores read twice

SAVE_TIMEOUT_S = 300
"""Time-out of the barrier at which processes wait until all have written a checkpoint."""

_DICT_KEY = 2  # Orbax's code for a key of a dict in its tree metadata


def make_writer(directory: Location) -> OrbaxWriter | ObjectWriter:
    """Return the writer for a directory of a file system (Orbax) or an object store."""
    return OrbaxWriter() if directory.is_local else ObjectWriter()


class OrbaxWriter:
    """Writer of one checkpoint at a time in the background; imports Orbax on first use.

    `fingerprints` is None, because the CRC-32s must be computed from the files.
    """

    fingerprints = None

    def __init__(self) -> None:
        self._barrier = Barrier("checkpoint/save")
        self._writer: Any = None

    def start(self, checkpoint: Location, items: dict[str, dict[str, Any]]) -> None:
        """Copy arrays, in nested dicts by item, to the host and start writing."""
        import orbax.checkpoint as ocp

        if self._writer is None:
            self._writer = self._make_writer()
        save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=CHUNK_BYTES), items)
        self._barrier.begin()
        args: Any = ocp.args.PyTreeSave(items, save_args=save_args)
        self._writer.save(str(checkpoint / ARRAYS), args=args)

    def wait(self) -> None:
        """Wait until every process has written its arrays; raise if a write failed."""
        self._writer.wait_until_finished()

    def give_up(self) -> None:
        """Abort the barrier, so that the others do not wait for this process after its failure."""
        self._barrier.give_up()

    def close(self) -> None:
        """Stop the background threads."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _make_writer(self) -> Any:
        import orbax.checkpoint as ocp
        from orbax.checkpoint._src.serialization import tensorstore_utils

        # Reading TensorStore's byte counters leaks memory in 0.1.86.
        if hasattr(tensorstore_utils, "get_tensorstore_raw_bytes"):
            vars(tensorstore_utils)["get_tensorstore_raw_bytes"] = lambda direction: 0
        _report_failures_once()
        return ocp.AsyncCheckpointer(
            _handler(),
            temporary_path_class=ocp.path.atomicity.CommitFileTemporaryPath,
            # If creating the directory in the background failed, only the time-out would show it.
            async_options=ocp.AsyncOptions(
                timeout_secs=SAVE_TIMEOUT_S,
                create_directories_asynchronously=False,
                barrier_sync_fn=self._barrier.wait,
            ),
        )


def read(checkpoint: Location, targets: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return item -> nested dict of arrays; each process reads the shards of its own devices.

    `targets` maps an item to a nested dict of `jax.ShapeDtypeStruct`: the stored shape and dtype,
    with the requested sharding. Leaves missing in it are not read.
    """
    if not checkpoint.is_local:
        return object_io.read(checkpoint, targets)
    import orbax.checkpoint as ocp

    reader = ocp.Checkpointer(_handler())
    args: Any = ocp.args.PyTreeRestore(
        targets,
        restore_args=ocp.checkpoint_utils.construct_restore_args(targets),
        partial_restore=True,  # `pytree.mismatches` has reported missing and extra leaves
    )
    try:
        return reader.restore(str(checkpoint / ARRAYS), args=args)
    finally:
        reader.close()


def write_document(checkpoint: Location, document: dict[str, Any]) -> None:
    """Write the JSON next to the arrays: `step`, `meta` and `arrays`."""
    file = checkpoint / manifest.DOCUMENT
    file.parent.make_directory()
    file.write(json.dumps(document))


def read_document(checkpoint: Location) -> dict[str, Any]:
    """Return the JSON next to the arrays: `step`, `meta` and `arrays`."""
    return (checkpoint / manifest.DOCUMENT).json()


def open_array(
    checkpoint: Location,
    item: str,
    keys: Sequence[str],
    create: Mapping[str, Any] | None = None,
    *,
    part: str = "",
) -> Any:
    """Open the array with these keys in an item, to `read` it by index.

    With `create`, make it, to `write` it: `shape`, `chunks` (shape of a chunk on disk), `dtype`. In
    a `part` of the store, whose name starts with `PART`, a process writes alone (`merge_parts`).
    """
    if not checkpoint.is_local:
        return object_io.open_array(checkpoint, item, keys, create)
    import tensorstore

    base = Path(str(checkpoint / ARRAYS / part)).absolute().as_uri()
    path = ".".join((item, *keys))
    store: dict[str, Any] = {"driver": "ocdbt", "base": f"{base}/", "path": f"{path}/"}
    spec: dict[str, Any] = {"driver": "zarr", "kvstore": store}
    if create is None:
        return _StoredArray(tensorstore.open(spec, open=True, read=True).result())
    spec["kvstore"]["config"] = {"max_inline_value_bytes": 1024}
    described = ("shape", "chunks", "dtype", "compressor")
    metadata = object_io.zarr_metadata(create["shape"], create["chunks"], create["dtype"])
    spec["metadata"] = {key: metadata[key] for key in described}
    return _StoredArray(tensorstore.open(spec, create=True).result())


def merge_parts(checkpoint: Location) -> None:
    """Add to the store the arrays that processes wrote to its parts; it refers to their files."""
    import tensorstore

    base, context = Path(str(checkpoint / ARRAYS)).absolute(), tensorstore.Context()  # shares files
    names = [name for name in (checkpoint / ARRAYS).entries() if name.startswith(PART)]
    specs = [{"driver": "ocdbt", "base": f"{(base / name).as_uri()}/"} for name in ("", *names)]
    target, *parts = (tensorstore.KvStore.open(x, context=context).result() for x in specs)
    with tensorstore.Transaction(atomic=True) as transaction:
        for part in parts:
            part.experimental_copy_range_to(target.with_transaction(transaction)).result()


class _StoredArray:
    """One array on disk; `chunk` is the shape of its chunks."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.chunk: tuple[int, ...] = handle.chunk_layout.read_chunk.shape

    def read(self, index: Index) -> np.ndarray:
        """Return the part [...] at `index` (slices of leading dims), in the stored dtype."""
        return self._handle[index].read().result()

    def write(self, index: Index, part: np.ndarray) -> None:
        """Write `part` [shape of `index`] at `index` of the stored array."""
        self._handle[index].write(part).result()


def write_frame(checkpoint: Location, document: dict[str, Any]) -> None:
    """Write the document, and the metadata that Orbax needs for arrays made by `open_array`."""
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


def _report_failures_once() -> None:
    """Keep a failed write from filling stderr; `OrbaxWriter.wait` raises its error.

    Orbax ends at the first failed write and closes the event loop under the other writes, each of
    which then prints a traceback. Three of its threads also log the error with a traceback.
    """
    from orbax.checkpoint._src import asyncio_utils

    if hasattr(asyncio_utils, "_run_sync_via_new_loop"):
        vars(asyncio_utils)["_run_sync_via_new_loop"] = _run_to_the_last_task
    logger = logging.getLogger("absl")
    logger.removeFilter(_is_no_failure_of_orbax)  # added once
    logger.addFilter(_is_no_failure_of_orbax)


def _run_to_the_last_task(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine in a new event loop; close it when the last of its tasks has ended."""
    loop = asyncio.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        return loop.run_until_complete(coroutine)
    finally:
        if pending := asyncio.all_tasks(loop):
            loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))
        asyncio.set_event_loop(None)
        loop.close()


def _is_no_failure_of_orbax(record: logging.LogRecord) -> bool:
    return not record.exc_info or "orbax" not in record.pathname


def _handler() -> Any:
    import orbax.checkpoint as ocp

    arrays = ocp.type_handlers.ArrayHandler(
        # Only large leaves are split among replicas for the copy, because each split compiles one
        # program per device: 190 s for 4 MB on 64 simulated devices.
        min_slice_bytes_for_replica_parallel=_LEAST_SHARE_BYTES,
        # Restores pass their shardings. Writing the file would start threads while training waits.
        enable_write_sharding_file=False,
    )
    return ocp.PyTreeCheckpointHandler(
        type_handler_registry=ocp.type_handlers.create_type_handler_registry((jax.Array, arrays)),
        use_compression=False,  # floats shrink by 8 % and take 3 to 4 times longer
        save_concurrent_gb=_HOST_MEMORY_GB,
        restore_concurrent_gb=_HOST_MEMORY_GB,
    )
