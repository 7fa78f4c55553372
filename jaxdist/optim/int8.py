"""Optimizer moments in 8 bits: codes of a dynamic map, and one float32 scale per 256 values.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization", 2022. Codes equal those of the CPU
AdamW8bit of bitsandbytes 0.50. Blocks follow the row-major order of the parameter, of each layer
if layers are stacked. They depend on no sharding, so codes are the same on every mesh.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float32, Shaped

from jaxdist.core.block_weights import dynamic_map
from jaxdist.core.types import Array, Params
from jaxdist.optim.adafactor import absent

BLOCK = 256
"""Values with a common scale."""

MIN_SIZE = 4096
"""Parameters with fewer values per layer keep float32 moments, as in bitsandbytes."""


class Moment(NamedTuple):
    """A moment becomes decay · moment + share · gradient, or the gradient's square."""

    decay: float
    share: float = 1.0
    is_square: bool = False


class BlockState(NamedTuple):
    """A moment in 8 bits.

    Attributes:
        codes: uint8, shapes of the parameters; the float32 moment if a parameter has fewer than
            `MIN_SIZE` values per layer.
        scales: float32, largest magnitude of each block, [*outer, blocks, 1, ...] with as many
            dims as the parameter; a scalar 0 for such small ones.
    """

    codes: Params
    scales: Params


def in_8_bits(
    rule: optax.GradientTransformation, axes: Params, moments: Mapping[str, Moment]
) -> optax.GradientTransformation:
    """Return `rule` with `moments` in 8 bits between updates; each update computes in float32.

    `moments` has the names of fields in the rule's state.

    There is no communication if each device's part of the dims of a block is a multiple of `BLOCK`
    values; otherwise XLA gathers these dims.
    """
    dims_of = dict(jax.tree_util.tree_leaves_with_path(axes))

    def each(function: Callable[..., Any], *trees: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, x, *rest: function(x, *rest, "layers" in dims_of[path]), *trees
        )

    def init(params: Any) -> Any:
        codes = each(lambda p, stacked: jnp.zeros(p.shape, _dtype(p.shape, stacked)), params)
        empty = BlockState(codes, each(_no_scales, params))
        return rule.init(params)._replace(**dict.fromkeys(moments, empty))

    def update(grads: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        old, new = {}, {}
        for name, moment in moments.items():
            read = functools.partial(dequantize, is_signed=not moment.is_square)
            write = functools.partial(quantize, is_signed=not moment.is_square)
            old[name] = each(read, *getattr(state, name))
            pairs = each(write, jax.tree.map(functools.partial(_moved, moment), old[name], grads))
            outer = jax.tree.structure(grads)
            new[name] = BlockState(*jax.tree.transpose(outer, jax.tree.structure((0, 0)), pairs))
        updates, state = rule.update(grads, state._replace(**old), params)
        return updates, state._replace(**new)

    return optax.GradientTransformation(init, update)


def _moved(
    moment: Moment, old: Float32[Array, "*leaf"], grad: Float32[Array, "*leaf"]
) -> Float32[Array, "*leaf"]:
    """Return the new moment, with the same bits on every mesh.

    Compilers fuse a product with a sum in some programs and not in others. Each comparison with
    the largest float32 keeps a product apart, and changes only results that are not applied.
    """
    apart = lambda x: jnp.where(x < jnp.finfo(jnp.float32).max, x, jnp.inf)
    power = grad * grad if moment.is_square else grad
    return apart(moment.decay * old) + apart(moment.share * power)


def quantize(
    x: Float32[Array, "*leaf"], is_stacked: bool, *, is_signed: bool
) -> tuple[Shaped[Array, "*leaf"], Float32[Array, "*other"]]:
    """Return the codes and scales of a moment, or the moment and 0 if it is not eligible."""
    if not is_eligible(x.shape, is_stacked):
        return x, absent()
    blocks = _in_blocks(x, is_stacked)
    largest = jnp.max(jnp.abs(blocks), -1, keepdims=True)
    # A block of zeros has scale 0, so its codes do not matter.
    shares = blocks * jnp.where(largest > 0, 1 / largest, 0)
    thresholds = _thresholds(is_signed)
    bisected = lambda x: jnp.searchsorted(
        thresholds, x, side="right", method="scan_unrolled"
    ).astype(jnp.uint8)
    # XLA:GPU stores each step of a bisection, and the keys that `searchsorted` compares.
    counted = lambda x: jnp.sum(x[..., None] >= thresholds, -1, dtype=jnp.uint8)
    codes = jax.lax.platform_dependent(shares, cpu=bisected, default=counted)
    scales = largest.reshape(_no_scales(x, is_stacked).shape)
    return _from_blocks(codes, x.shape, is_stacked), scales


def dequantize(
    codes: Shaped[Array, "*leaf"],
    scales: Float32[Array, "*other"],
    is_stacked: bool,
    *,
    is_signed: bool,
) -> Float32[Array, "*leaf"]:
    """Return the float32 moment from the codes and scales of `quantize`."""
    if not is_eligible(codes.shape, is_stacked):
        return codes.astype(jnp.float32)
    blocks = _in_blocks(codes, is_stacked)
    table = jnp.asarray(dynamic_map(is_signed))
    values = table.at[blocks].get(mode="promise_in_bounds", wrap_negative_indices=False)
    scaled = values * scales.reshape(*blocks.shape[:-1], 1)
    return _from_blocks(scaled, codes.shape, is_stacked)


def is_eligible(shape: tuple[int, ...], is_stacked: bool) -> bool:
    """Return whether moments are stored in 8 bits: those of `MIN_SIZE` or more values per layer."""
    return math.prod(shape[is_stacked:]) >= MIN_SIZE


def _dtype(shape: tuple[int, ...], is_stacked: bool) -> Any:
    return jnp.uint8 if is_eligible(shape, is_stacked) else jnp.float32


def outer_dims(shape: tuple[int, ...], is_stacked: bool) -> int:
    """Return the number of leading dims that are not part of a block.

    The fewest trailing dims are merged, because dims outside of blocks can be sharded freely.
    """
    for i in reversed(range(is_stacked, len(shape))):
        if math.prod(shape[i:]) % BLOCK == 0:
            return i
    return int(is_stacked)


def _no_scales(param: Any, is_stacked: bool) -> Float32[Array, "*other"]:
    if not is_eligible(param.shape, is_stacked):
        return absent()
    outer = outer_dims(param.shape, is_stacked)
    blocks = -(-math.prod(param.shape[outer:]) // BLOCK)
    shape = (*param.shape[:outer], blocks, *[1] * (len(param.shape) - outer - 1))
    return jnp.zeros(shape, jnp.float32)


def _in_blocks(x: Shaped[Array, "*leaf"], is_stacked: bool) -> Shaped[Array, "*outer blocks 256"]:
    """Divide the values into blocks; zeros complete the last one."""
    outer = x.shape[: outer_dims(x.shape, is_stacked)]
    flat = x.reshape(*outer, -1)
    missing = -flat.shape[-1] % BLOCK
    if missing:
        flat = jnp.pad(flat, [(0, 0)] * len(outer) + [(0, missing)])
    return flat.reshape(*outer, -1, BLOCK)


def _from_blocks(
    blocks: Shaped[Array, "*outer blocks 256"], shape: tuple[int, ...], is_stacked: bool
) -> Shaped[Array, "*other"]:
    outer = outer_dims(shape, is_stacked)
    flat = blocks.reshape(*shape[:outer], -1)
    return flat[..., : math.prod(shape[outer:])].reshape(shape)


@functools.cache
def _thresholds(is_signed: bool) -> Float32[np.ndarray, "codes=255"]:
    """Return for each k the smallest share of the scale whose code is above k.

    bitsandbytes rounds a share to a grid, i = floor((share + 1) · 32767.5 + 0.5), and stores the
    code closest to i / 32767.5 - 1, all in float32. Comparisons with these thresholds give equal
    codes even if a compiler fuses multiplications with additions.
    """
    values = dynamic_map(is_signed).astype(np.float64)
    grid = np.arange(65536, dtype=np.float32) / np.float32(32767.5) - np.float32(1)
    codes = np.searchsorted((values[:-1] + values[1:]) / 2, grid)
    first = np.searchsorted(codes, np.arange(1, 256))
    # Bisect among float32 values, in the order of their bits.
    low, high = (np.full(255, _ordered(np.float32(x))) for x in (-1.01, 1.01))
    while (high - low > 1).any():
        middle = (low + high) // 2
        share = _from_ordered(middle)
        index = np.floor((share + np.float32(1)) * np.float32(32767.5) + np.float32(0.5))
        reached = index >= first
        low, high = np.where(reached, low, middle), np.where(reached, middle, high)
    return _from_ordered(high)


def _ordered(x: Any) -> Any:
    """Return int64 keys of float32 values that have the same order."""
    bits = np.asarray(x, np.float32).view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def _from_ordered(keys: Any) -> Any:
    bits = np.where(keys < 0, -keys | 0x80000000, keys)
    return bits.astype(np.uint32).view(np.float32)
