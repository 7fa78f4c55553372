"""`convert consolidate SRC OUT`: write a checkpoint as safetensors, one file or shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from jaxdist.checkpoint.blocks import dtype_of
from jaxdist.checkpoint.streaming_io import StoredArrays
from jaxdist.models.huggingface import safetensors
from jaxdist.runtime.formatting.numbers import in_bytes
from jaxdist.runtime.new_output import new_output
from jaxdist.settings import ConfigError, setting
from jaxdist.tools.convert.checkpoint_paths import checkpoint_of, new_local_directory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of `convert consolidate`: checkpoint, arrays to write and form of the output."""

    src: str = setting("", "run directory, its checkpoints/, or one checkpoint", required=True)
    out: str = setting("", "new directory for model*.safetensors", required=True)
    step: int = setting(-1, "step of the checkpoint; -1 = as named by SRC, else the newest valid")
    items: Literal["params", "all"] = setting(
        "params", "params = weights only; all = all arrays, e.g. optimizer state"
    )
    dtype: Literal["stored", "float32", "bfloat16", "float16"] = setting(
        "stored", "dtype of floating-point weights; stored = unchanged"
    )
    shard_gb: float = setting(0.0, "largest file of several tensors, GB; 0 = one file", ge=0)


def run(config: Config) -> int:
    """Write the checkpoint as safetensors files, one verified array at a time; return 0."""
    out = new_local_directory(config.out)
    stored = StoredArrays(checkpoint_of(config.src, config.step))
    names = [name for name in stored.entries if config.items == "all" or name.startswith("params/")]
    # `params/layers/w` -> `layers.w`; other parts keep their item's name.
    flat = [name.removeprefix("params/").replace("/", ".") for name in names]
    tensors = {new: _tensor(stored, old, config) for new, old in zip(flat, names, strict=True)}
    metadata = {"format": "pt", "step": str(stored.document["step"])}
    with new_output(Path(out)) as partial:
        partial.mkdir()
        files = safetensors.write_shards(partial, tensors, config.shard_gb, metadata)
    total = sum(tensor.num_bytes for tensor in tensors.values())
    print(f"{len(tensors)} arrays, {in_bytes(total)}, in {len(files)} file(s): {out}")
    return 0


def _tensor(stored: StoredArrays, name: str, config: Config) -> safetensors.Tensor:
    import jax.numpy as jnp

    entry = stored.entries[name]
    dtype = dtype_of(entry["dtype"])
    is_float = bool(jnp.issubdtype(dtype, jnp.floating))  # bfloat16 included
    if config.dtype != "stored" and name.startswith("params/") and is_float:
        dtype = dtype_of(config.dtype)
    if dtype.name not in safetensors.DTYPES:
        raise ConfigError(
            f"{name} is {dtype.name}, which safetensors does not support. Use --items=params or "
            "--dtype=float32."
        )

    def parts() -> Iterator[np.ndarray]:
        for _, part in stored.blocks(name):
            yield part.astype(dtype)

    return safetensors.Tensor(entry["shape"], dtype, parts())
