"""`convert merge RUN OUT`: add the adapters of a run to its frozen weights, as a new run.

The new run has complete weights: to-hf exports a decoder, and `--init-from` trains it further.
Quantized weights are dequantized first, so that the merged model computes as it was trained. It
needs host memory for the frozen weights.
"""

from __future__ import annotations

import dataclasses
import shlex
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.checkpoint.blocks import block_shape, grid
from jaxdist.checkpoint.streaming_io import BLOCK_BYTES, CheckpointWriter
from jaxdist.config import settings_of_run
from jaxdist.core.weights import CompositeWeight
from jaxdist.models.adapters import LoraConfig, merge
from jaxdist.runtime.entry_point import shell_python
from jaxdist.runtime.formatting.numbers import in_bytes
from jaxdist.settings import ConfigError, setting, write_toml
from jaxdist.tools.convert.checkpoint_paths import (
    WeightsToConvert,
    checkpoint_of,
    making_run,
    new_run_directory,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(WeightsToConvert):
    """Settings of `convert merge`: source, destination and dtype of the merged weights."""

    dtype: Literal["float32", "bfloat16"] = setting(
        "float32", "dtype of the merged weights; bfloat16 rounds base plus adapters"
    )


def run(config: Config) -> int:
    """Write a run with adapters merged into the weights; print a summary; return 0."""
    from jaxdist.run.trained_run import open_run

    out, checkpoint = new_run_directory(config.out), checkpoint_of(config.src, config.step)
    opened = open_run(str(checkpoint))
    settings = opened.parts.config
    if not settings.lora.rank:
        raise ConfigError(f"{config.src} has no adapters. Its weights are complete already.")
    loaded = opened.weights(kind=config.weights)
    leaves = jax.tree_util.tree_leaves_with_path(
        loaded.params, is_leaf=lambda node: isinstance(node, CompositeWeight)
    )
    dtype = jnp.dtype(config.dtype)
    size = sum(x.size for x in jax.tree.leaves(jax.eval_shape(merge, loaded.params)))
    own = settings_of_run(opened.path, loaded.step)
    text = write_toml(dataclasses.replace(own, lora=LoraConfig(), init_from=""))
    with making_run(out):
        writer = CheckpointWriter(out / "checkpoints" / "0", size * dtype.itemsize)
        for path, leaf in leaves:
            merged = np.asarray(jax.jit(merge)(leaf).astype(dtype))
            keys = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
            entry = {"shape": list(merged.shape), "dtype": dtype.name, "path": keys}
            chunk = block_shape(merged.shape, dtype.itemsize, BLOCK_BYTES)
            parts = ((index, merged[index]) for index in grid(merged.shape, chunk))
            writer.write("/".join(("params", *keys)), entry, chunk, parts)
        writer.finish({"mesh": "", "config": text, "source": f"{opened.path}, step {loaded.step}"})
        (out / "config.toml").write(text)
    print(
        f"{in_bytes(writer.num_bytes)} in {config.dtype}: {out}\n"
        f"next: {shell_python()} -m jaxdist.convert to-hf {shlex.quote(str(out))} OUT"
    )
    return 0
