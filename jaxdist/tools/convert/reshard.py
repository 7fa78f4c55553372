"""`convert reshard SRC DST --mesh dp=4,tp=2`: rewrite a checkpoint for another mesh.

Any checkpoint loads on any mesh. After a rewrite in chunks that divide the shards of a mesh, no
device of a later start on that mesh reads more than its shards. It needs no GPU, keeps one chunk in
memory and verifies the arrays.
"""

from __future__ import annotations

import dataclasses
import shlex
import time
from typing import Literal

from jaxdist.checkpoint import pytree
from jaxdist.checkpoint.blocks import dtype_of, even_chunk
from jaxdist.checkpoint.streaming_io import StoredArrays, rewrite
from jaxdist.config import settings_of_run
from jaxdist.core.mesh import MeshSpec
from jaxdist.runtime.entry_point import shell_python
from jaxdist.runtime.formatting.numbers import in_bytes
from jaxdist.settings import ConfigError, setting, write_toml
from jaxdist.tools.convert.checkpoint_paths import checkpoint_of, making_run, new_run_directory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of `convert reshard`: checkpoint, target mesh, items and dtype of the output."""

    src: str = setting("", "run directory, its checkpoints/, or one checkpoint", required=True)
    dst: str = setting("", "new run directory", required=True)
    step: int = setting(-1, "step of the checkpoint; -1 = as named by SRC, else the newest valid")
    mesh: str = setting("dp=1", "target mesh, e.g. fsdp=64 or dp=4,tp=2,pp=2")
    items: Literal["all", "params"] = setting(
        "all", "all = with optimizer state, for resuming; params = weights only"
    )
    dtype: Literal["stored", "float32", "bfloat16"] = setting(
        "stored", "dtype of the weights; a later start casts them as needed"
    )
    chunk_mb: int = setting(64, "largest chunk of an array, and memory for copying, in MiB", ge=1)


def run(config: Config) -> int:
    """Rewrite one checkpoint into a new run directory; return 0."""
    spec = MeshSpec.parse(config.mesh)
    checkpoint = checkpoint_of(config.src, config.step)
    destination = new_run_directory(config.dst)
    stored = StoredArrays(checkpoint)
    settings, shard_shapes = _target(config, spec, stored)
    every = {name.partition("/")[0] for name in shard_shapes}
    items = every if config.items == "all" else {"params"}

    def dtype_for(name: str) -> str:
        is_weight = name.startswith("params/") and config.dtype != "stored"
        return config.dtype if is_weight else stored.entries[name]["dtype"]

    def chunk_of(name: str) -> tuple[int, ...]:
        itemsize = dtype_of(stored.entries[name]["dtype"]).itemsize
        return even_chunk(shard_shapes[name], itemsize, config.chunk_mb << 20)

    start = time.perf_counter()
    with making_run(destination):
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
        f"{in_bytes(writer.num_bytes)} in {seconds:.1f} s\n"
        f"next: {shell_python()} -m jaxdist.train --resume "
        f"{shlex.quote(str(destination))} --mesh {config.mesh}"
    )
    return 0


def _target(
    config: Config, spec: MeshSpec, stored: StoredArrays
) -> tuple[str, dict[str, tuple[int, ...]]]:
    """Return the run's settings (TOML) with the new mesh, and array -> shape of one shard."""
    from jaxdist.run.trained_run import open_run

    checkpoint = stored.checkpoint
    settings = settings_of_run(checkpoint.parent.parent, int(checkpoint.name))
    train = {"offload_optimizer": "none"}  # moments next to the parameters, as in checkpoints
    parts = open_run(checkpoint, mesh=config.mesh, simulate=spec.num_devices, train=train).parts
    leaves = pytree.leaves_of(parts.without_base(parts.abstract_state()))
    if problems := pytree.mismatches(leaves, stored.entries):
        raise ConfigError(
            [f"{checkpoint} does not match the settings of the run: {p}" for p in problems]
        )
    shapes = {}
    for leaf in leaves:
        shard = leaf.value.sharding.shard_shape(leaf.value.shape)
        extra = stored.entries[leaf.name]["shape"][len(shard) :]  # dim of a random key's data
        shapes[leaf.name] = (*shard, *extra)
    moved = dataclasses.replace(settings.mesh, shape=config.mesh)
    return write_toml(dataclasses.replace(settings, mesh=moved)), shapes
