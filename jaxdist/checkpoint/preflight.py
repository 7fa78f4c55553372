"""Test a small save and restore before training starts."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxdist.checkpoint import manifest, orbax_io, pytree
from jaxdist.checkpoint.checksum import checksums
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.errors import CheckpointError
from jaxdist.checkpoint.events import one_line
from jaxdist.runtime.coordination import Group
from jaxdist.runtime.storage import Location


def try_save_path(parent: Location, config: CheckpointConfig, group: Group) -> None:
    """Write a small array sharded over all devices, read it back, compare, delete it.

    If only one process fails, the others may hang inside Orbax until they are killed.
    """
    directory = parent / ".preflight"
    try:
        _round_trip(directory, config, group)
    except Exception as failure:
        # Raise at once: the others may hang in Orbax, and this process's exit ends them.
        raise CheckpointError(
            f"the test save before training to {parent} failed: {one_line(failure)}. "
            f"Fix that, or choose another --run-dir."
        ) from failure
    finally:
        if group.is_leader:
            with contextlib.suppress(OSError):
                directory.delete_tree()


def _round_trip(directory: Location, config: CheckpointConfig, group: Group) -> None:
    group.decide(directory.delete_tree)
    group.decide(directory.make_directory)
    devices = jax.devices()
    mesh = Mesh(np.asarray(devices, dtype=object), ("all",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("all"))
    make = jax.jit(
        lambda: jnp.arange(len(devices) * 128.0).reshape(-1, 128), out_shardings=sharding
    )
    leaves = pytree.leaves_of({"params": {"preflight": make()}})
    arrays = [leaf.value for leaf in leaves]
    writer = orbax_io.make_writer(directory, config)
    try:
        writer.start(directory / "0", pytree.nest(leaves, arrays))
        writer.wait()
        group.gather(None)  # barrier: each process waits for its own part only
        targets = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for a in arrays]
        restored = orbax_io.read(directory / "0", pytree.nest(leaves, targets))
    finally:
        writer.close()
    group.gather(None)  # barrier: all have read before the directory is deleted
    if group.is_leader:
        manifest.write(directory / "0", 0, {}, {})
    if checksums([pytree.pick(restored, leaf) for leaf in leaves]) != checksums(arrays):
        raise CheckpointError("the data read back differ from the data written")
