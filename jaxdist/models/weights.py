"""List names, dims and shapes of a model's parameters without allocating them."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp

from jaxdist.core.types import Dims, Model


@dataclasses.dataclass(frozen=True)
class Weight:
    """One array of the parameters; `name` is like "layers.mlp.up", `shape` is global."""

    name: str
    dims: Dims
    shape: tuple[int, ...]

    @functools.cached_property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Number of bytes per stored element."""
        return jnp.dtype(self.dims.storage).itemsize

    @property
    def is_quantized(self) -> bool:
        """Return whether the elements are integer codes of weights."""
        return self.dims.storage in ("int8", "uint8") and self.dims.num_weights > 0

    def num_gathered_bytes(self, compute_bytes: int) -> int:
        """Return bytes per element after FSDP's all-gather: stored ones if the dtype stays."""
        return self.num_bytes if self.dims.keeps_dtype else compute_bytes

    @property
    def is_stacked(self) -> bool:
        """Return whether the array is stacked over layers."""
        return bool(self.dims) and self.dims[0] == "layers"

    @property
    def is_matrix(self) -> bool:
        """Return whether it has two dims or more besides layers, and is no scale or bias."""
        return not self.name.endswith(("bias", "scale")) and len(self.dims) - self.is_stacked > 1


@functools.lru_cache(maxsize=64)
def weights_of(model: Model) -> tuple[Weight, ...]:
    """Return the parameters of a model in tree order; starts no device."""
    # Use only the key's shape, because a real key would start a device.
    key = jax.eval_shape(lambda: jax.random.key(0))
    shapes = jax.tree_util.tree_leaves_with_path(jax.eval_shape(model.init, key))
    return tuple(
        Weight(jax.tree_util.keystr(path, simple=True, separator="."), dims, tuple(shape.shape))
        for (path, shape), dims in zip(shapes, jax.tree.leaves(model.axes), strict=True)
    )


def num_params(model: Model, active_experts: float = 1.0) -> int:
    """Return the number of parameters without vocabulary padding, with a share of the experts."""
    padded = model.dims.get("vocab", 0)
    real = lambda weight: model.vocab_size and "vocab" in weight.dims
    share = lambda weight: active_experts if "experts" in weight.dims else 1.0
    return sum(
        w.size // padded * model.vocab_size
        if real(w)
        else round(w.dims.num_weights * w.size * share(w))
        for w in weights_of(model)
        if w.dims.update not in ("statistic", "increment")
    )
