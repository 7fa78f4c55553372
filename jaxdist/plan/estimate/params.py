"""The parameters of a model, leaf by leaf: names, logical dims and shapes, from its sizes alone.

A decoder's are written down here, so that planning imports no model code and takes no time; a test
holds them equal to what the model makes. Other models are asked.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax

from jaxdist import models
from jaxdist.core.types import Dims, Model
from jaxdist.models.configs import DecoderConfig, ModelConfig


@dataclasses.dataclass(frozen=True)
class Weight:
    """One array of the parameters.

    Attributes:
        name: its path, e.g. "layers.mlp.up".
        dims: logical dims.
        shape: of the whole array.
    """

    name: str
    dims: Dims
    shape: tuple[int, ...]

    @functools.cached_property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def is_stacked(self) -> bool:
        """Whether it holds all layers."""
        return bool(self.dims) and self.dims[0] == "layers"

    @property
    def is_matrix(self) -> bool:
        """Whether it multiplies; norm scales and biases do not."""
        return not self.name.endswith(("bias", "scale")) and len(self.dims) - self.is_stacked > 1


def weights_of(config: ModelConfig, model: Model | None = None) -> tuple[Weight, ...]:
    """The parameters of a model.

    Args:
        config: the model's sizes.
        model: the built model; needed for a custom one, which is built from its factory otherwise.
    """
    if isinstance(config, DecoderConfig):
        return _decoder(config)
    return _built(model or models.build(config, seq_len=1))


@functools.lru_cache(maxsize=64)
def _decoder(config: DecoderConfig) -> tuple[Weight, ...]:
    sizes = {**config.dims, "ways": 2 if config.activation == "swiglu" else 1}
    sizes["group"] = config.num_heads // config.kv_heads + 2

    def weight(name: str, *dims: str) -> Weight:
        # Dims that no axis may split are written in brackets here and are None for the layout.
        named = Dims(None if dim in ("ways", "group") else dim for dim in dims)
        return Weight(name, named, tuple(sizes[dim] for dim in dims))

    return tuple(_decoder_weights(config, weight))


def _decoder_weights(config: DecoderConfig, weight: Any) -> Iterator[Weight]:
    def norm(name: str, *dims: str) -> Iterator[Weight]:
        yield weight(f"{name}.scale", *dims)
        if config.norm == "layer":
            yield weight(f"{name}.bias", *dims)

    yield weight("embed.table", "vocab", "d_model")
    if config.positions == "learned":
        yield weight("embed.positions", "positions", "d_model")
    yield from norm("layers.attention_norm", "layers", "d_model")
    yield weight("layers.attention.qkv", "layers", "d_model", "kv_heads", "group", "head_dim")
    yield weight("layers.attention.out", "layers", "heads", "head_dim", "d_model")
    if config.qkv_bias:
        yield weight("layers.attention.qkv_bias", "layers", "kv_heads", "group", "head_dim")
    if config.out_bias:
        yield weight("layers.attention.out_bias", "layers", "d_model")
    if config.qk_norm:
        yield weight("layers.attention.query_norm.scale", "layers", "head_dim")
        yield weight("layers.attention.key_norm.scale", "layers", "head_dim")
    yield from norm("layers.mlp_norm", "layers", "d_model")
    yield weight("layers.mlp.up", "layers", "d_model", "ways", "mlp")
    yield weight("layers.mlp.down", "layers", "mlp", "d_model")
    if config.mlp_bias:
        yield weight("layers.mlp.up_bias", "layers", "ways", "mlp")
        yield weight("layers.mlp.down_bias", "layers", "d_model")
    yield from norm("head.norm", "d_model")
    if not config.tie_embeddings:
        yield weight("head.kernel", "d_model", "vocab")


def _built(model: Model) -> tuple[Weight, ...]:
    # The key's shape only: a real key would start a device.
    key = jax.eval_shape(lambda: jax.random.key(0))
    shapes = jax.tree_util.tree_leaves_with_path(jax.eval_shape(model.init, key))
    return tuple(
        Weight(jax.tree_util.keystr(path, simple=True, separator="."), dims, tuple(shape.shape))
        for (path, shape), dims in zip(shapes, jax.tree.leaves(model.axes), strict=True)
    )
