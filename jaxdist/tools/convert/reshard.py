"""`convert reshard SRC DST --mesh dp=4,tp=2`: rewrite a checkpoint for another mesh.

Any checkpoint loads on any mesh as it is. Rewriting it in chunks that are exactly what each device
of a mesh holds makes every later start there read each byte once. It needs no GPU and holds one
chunk at a time; arrays are verified on the way.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Literal

from jaxdist.checkpoint import manifest, pytree
from jaxdist.checkpoint.streaming_io import StoredArrays, dtype_of, even_chunk, rewrite
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.settings import ConfigError, read_settings, setting
from jaxdist.runtime.formatting.numbers import in_bytes
from jaxdist.runtime.storage import Location
from jaxdist.tools.convert.checkpoint_paths import checkpoint_of, new_directory


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReshardConfig:
    """What to rewrite, and for which mesh."""

    src: str = setting("", "run directory, its checkpoints, or one checkpoint")
    dst: str = setting("", "new run directory")
    step: int = setting(-1, "which checkpoint; -1 = the newest whole one")
    mesh: str = setting("dp=1", "mesh to write for, e.g. fsdp=64 or dp=4,tp=2,pp=2")
    items: Literal["all", "params"] = setting(
        "all", "all = a run can go on from it; params = weights only, to evaluate or start from"
    )
    dtype: Literal["stored", "float32", "bfloat16"] = setting(
        "stored", "dtype of the weights; a later start casts them to what it needs"
    )
    chunk_mb: int = setting(64, "MiB of a chunk at most: what is held in memory at a time")

    def problems(self) -> list[str]:
        """Every violated rule."""
        found = []
        if not (self.src and self.dst):
            found.append("a source and a destination are needed: jaxdist convert reshard SRC DST.")
        if self.chunk_mb < 1:
            found.append(f"chunk_mb={self.chunk_mb} is below 1. Use 1 or more.")
        try:
            MeshSpec.parse(self.mesh)
        except ConfigError as error:
            found += error.problems
        return found


def main(argv: Sequence[str]) -> int:
    """Rewrite one checkpoint into a run directory of its own."""
    config = read_settings(
        ReshardConfig,
        argv,
        command="jaxdist.convert reshard",
        summary=__doc__ or "",
        positional=("src", "dst"),
    )
    checkpoint = checkpoint_of(config.src, config.step)
    destination = new_directory(config.dst)
    stored = StoredArrays(checkpoint)
    settings, shard_shapes = _target(manifest.directory_of(config.src).parent, config.mesh, stored)
    items = pytree.ITEMS if config.items == "all" else ("params",)

    def dtype_for(name: str) -> str:
        is_weight = name.startswith("params/") and config.dtype != "stored"
        return config.dtype if is_weight else stored.entries[name]["dtype"]

    def chunk_of(name: str) -> tuple[int, ...]:
        itemsize = dtype_of(stored.entries[name]["dtype"]).itemsize
        return even_chunk(shard_shapes[name], itemsize, config.chunk_mb << 20)

    start = time.perf_counter()
    (destination / "checkpoints").make_directory()
    writer = rewrite(
        stored,
        destination / "checkpoints" / checkpoint.name,
        items=items,
        chunk_of=chunk_of,
        dtype_for=dtype_for,
        meta={**stored.document["meta"], "mesh": config.mesh, "config": settings},
    )
    (destination / "config.toml").write(settings)
    seconds = time.perf_counter() - start
    print(
        f"checkpoint {checkpoint.name} rewritten for {config.mesh}: {len(writer.entries)} arrays, "
        f"{in_bytes(writer.num_bytes)} in {seconds:.1f} s\nnext: python -m jaxdist.train --resume "
        f"{destination} --mesh {config.mesh}"
    )
    return 0


def _target(
    run: Location, mesh: str, stored: StoredArrays
) -> tuple[str, dict[str, tuple[int, ...]]]:
    """The run's settings with the new mesh, and what one device of it holds of each array."""
    if not (run / "config.toml").exists():
        raise ConfigError(
            f"{run} holds no config.toml, so the model's dims are not known. Name a whole run."
        )
    from jaxdist.config import stored_run
    from jaxdist.core.settings import write_toml
    from jaxdist.run.trained_run import open_run

    spec = MeshSpec.parse(mesh)
    parts = open_run(str(run), mesh=mesh, simulate=spec.num_devices).parts
    leaves = pytree.leaves_of(parts.abstract_state())
    problems = pytree.mismatches(leaves, stored.entries)
    if problems:
        raise ConfigError(
            [f"{stored.checkpoint} does not fit {run}/config.toml: {p}" for p in problems]
        )
    shapes = {}
    for leaf in leaves:
        shard = leaf.value.sharding.shard_shape(leaf.value.shape)
        extra = stored.entries[leaf.name]["shape"][len(shard) :]  # a key's data has one dim more
        shapes[leaf.name] = (*shard, *extra)
    settings = stored_run(run / "config.toml")
    moved = dataclasses.replace(settings.mesh, shape=mesh, reason="")
    return write_toml(dataclasses.replace(settings, mesh=moved)), shapes
