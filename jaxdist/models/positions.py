"""Compute rotary angles and masks for the decoder's blocks, per layer if they differ."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jaxdist.core.types import Array, AttentionMask, Batch, Context
from jaxdist.models import layers
from jaxdist.models.configs import DecoderConfig


def prepare(config: DecoderConfig, batch: Batch, context: Context) -> dict[str, Any]:
    """Return the inputs that all blocks share: rotary angles, documents, and dropout indices.

    `segments` int32 [batch, seq] or None, `rows` int32 [batch] or None, `index` int32 [seq_shard];
    with rotary positions `cos`, `sin` float32 [batch or 1, seq, head_dim / 2], and `local_cos`,
    `local_sin` if layers with a window have other frequencies.
    """
    seq = batch["tokens"].shape[1]
    aux: dict[str, Any] = {
        "segments": batch.get("segments"),
        "rows": batch.get("rows"),
        "index": context.split(context.position_ids(seq)[None])[0],
    }
    if config.positions == "rotary":
        angles = _angles(config, positions_of(batch, context))
        aux |= layers.computed_once(angles) if context.platform == "cpu" else angles
    return aux


def positions_of(batch: Batch, context: Context) -> Array:
    """Return positions [batch or 1, seq]; by default they count from the row's start."""
    if "positions" in batch:
        return batch["positions"]
    return context.position_ids(batch["tokens"].shape[1])[None]


def _angles(config: DecoderConfig, positions: Array) -> dict[str, Array]:
    """Return `cos`, `sin` (and `local_*`) of [batch or 1, seq], float32 [..., head_dim / 2]."""
    width, theta = config.head_width, config.rope_theta
    stretch: tuple[Any, ...] = ()
    if config.rope_scaling:
        stretch = layers.rope_stretch(config.rope_scaling, width, theta)
    angles = layers.rotary_angles(positions, width, theta, *stretch)
    named = dict(zip(("cos", "sin"), angles, strict=True))
    if config.local_rope_theta:
        local = layers.rotary_angles(positions, width, config.local_rope_theta)
        named |= dict(zip(("local_cos", "local_sin"), local, strict=True))
    return named


def angles_of_layer(
    config: DecoderConfig, aux: dict[str, Any], context: Context
) -> tuple[Array, Array]:
    """Return (cos, sin) of the current layer, each float32 [batch or 1, seq, head_dim / 2]."""
    if not config.local_rope_theta:
        return aux["cos"], aux["sin"]
    sees_all = mask_of_layer(config, context).has_no_window
    return (
        jnp.where(sees_all, aux["cos"], aux["local_cos"]),
        jnp.where(sees_all, aux["sin"], aux["local_sin"]),
    )


def mask_of_layer(config: DecoderConfig, context: Context, **fields: Any) -> AttentionMask:
    """Return the attention mask of the current layer; `fields` are its other fields."""
    every, layer = config.full_attention_every, context.layer
    return AttentionMask(
        sliding_window=config.sliding_window, full_every=every, layer=layer, **fields
    )


def decoding_aux(config: DecoderConfig, positions: Array, *, max_len: int) -> dict[str, Any]:
    """Return the inputs of cached attention for positions int32 [batch, n]; -1 writes nothing.

    `slots` and `positions` int32 [batch, n]; `cos`, `sin` float32 [batch, n, head_dim / 2].
    """
    real = jnp.maximum(positions, 0)
    aux: dict[str, Any] = {
        # Scatter drops indices beyond the end; a negative index would wrap.
        "slots": jnp.where(positions < 0, max_len, positions),
        "positions": real,
    }
    if config.positions == "rotary":
        aux |= _angles(config, real)
    return aux
