"""`convert consolidate SRC OUT`: a checkpoint as safetensors, one file or shards with an index."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from jaxdist.checkpoint.streaming_io import StoredArrays, dtype_of
from jaxdist.core.settings import ConfigError, read_settings, setting
from jaxdist.models.huggingface import safetensors
from jaxdist.runtime.formatting.numbers import in_bytes
from jaxdist.tools.convert.checkpoint_paths import checkpoint_of, new_directory


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConsolidateConfig:
    """What to write, and how."""

    src: str = setting("", "run directory, its checkpoints, or one checkpoint")
    out: str = setting("", "new directory for model*.safetensors")
    step: int = setting(-1, "which checkpoint; -1 = the newest whole one")
    items: Literal["params", "all"] = setting(
        "params", "params = weights only; all = optimizer state and the rest too"
    )
    dtype: Literal["stored", "float32", "bfloat16", "float16"] = setting(
        "stored", "dtype of floating point weights; stored = as they are"
    )
    shard_gb: float = setting(0.0, "GB in one file at most, with an index; 0 = one file")

    def problems(self) -> list[str]:
        """Every violated rule."""
        found = []
        if not (self.src and self.out):
            found.append("a source and an output are needed: jaxdist convert consolidate SRC OUT.")
        if self.shard_gb < 0:
            found.append(f"shard_gb={self.shard_gb} is below 0. Use 0 for one file.")
        return found


def main(argv: Sequence[str]) -> int:
    """Write the files; reads and verifies one array at a time."""
    config = read_settings(
        ConsolidateConfig,
        argv,
        command="jaxdist.convert consolidate",
        summary=__doc__ or "",
        positional=("src", "out"),
    )
    stored = StoredArrays(checkpoint_of(config.src, config.step))
    out = new_directory(config.out)
    names = [name for name in stored.entries if config.items == "all" or name.startswith("params/")]
    tensors = {_tensor_name(name): _tensor(stored, name, config) for name in names}
    out.make_directory()
    metadata = {"format": "pt", "step": str(stored.document["step"])}
    files = safetensors.write_shards(Path(out), tensors, config.shard_gb, metadata)
    total = sum(tensor.num_bytes for tensor in tensors.values())
    print(f"{len(tensors)} arrays, {in_bytes(total)}, in {len(files)} file(s): {out}")
    return 0


def _tensor_name(name: str) -> str:
    """`params/layers/w` -> `layers.w`; other parts keep their item's name."""
    return name.removeprefix("params/").replace("/", ".")


def _tensor(stored: StoredArrays, name: str, config: ConsolidateConfig) -> safetensors.Tensor:
    entry = stored.entries[name]
    dtype = dtype_of(entry["dtype"])
    if config.dtype != "stored" and name.startswith("params/") and _is_float(dtype):
        dtype = dtype_of(config.dtype)
    if dtype.name not in safetensors.DTYPES:
        raise ConfigError(
            f"{name} is {dtype.name}, which safetensors does not have. Use --items=params or "
            "--dtype=float32."
        )

    def parts() -> Iterator[np.ndarray]:
        for _, part in stored.blocks(name):
            yield part.astype(dtype)

    return safetensors.Tensor(entry["shape"], dtype, parts())


def _is_float(dtype: np.dtype) -> bool:
    """Whether a dtype is floating point, ml_dtypes' included."""
    import jax.numpy as jnp

    return bool(jnp.issubdtype(dtype, jnp.floating))
