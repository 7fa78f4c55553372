"""Products in fp8: formats and scales.

Activations and weights are rounded to E4M3, and gradients of a product's result to E5M2. Each array
has one scale, computed from its largest magnitude.

A GPU multiplies the 8-bit elements, accumulates in a wider dtype and scales the result. Other
platforms multiply the values that they represent in the compute dtype.

Scales are powers of two, so a value is rounded equally under every scale, except the smallest
values (below 2^-14 of the largest in E4M3). Sharding of the rows therefore hardly changes results.

Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning", sections 3 and 4: the formats.
Deviations: a scale is a power of two, computed from the current array, and nothing saturates.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Bool, Float, Float32, Shaped

from jaxdist.core import collectives, types
from jaxdist.core.axis import axes_of
from jaxdist.core.parallel import fsdp
from jaxdist.core.types import Array

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2

SCALE = "fp8_scale"
"""Name of scales in a traced program; every remat policy saves them (4 bytes each)."""

# Both formats end at 1.75 * 2^n: 448 and 57344.
_LARGEST_EXPONENT = {E4M3: 8, E5M2: 15}
_LARGEST_MANTISSA = 0x600000  # mantissa of 1.75 in float32
_SMALLEST_SCALE = -100  # 2^-100 and its inverse cannot overflow


def scale_of(largest: Float32[Array, "*arrays"], dtype: Any) -> Float32[Array, "*arrays"]:
    """Return the power-of-two scales by which arrays are divided before rounding to `dtype`.

    `largest` / scale is in (max / 2, max] of the format, or less if the scale is 2^-100, the
    smallest. The scale is 1 for 0, NaN for NaN or Inf.
    """
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    exponent = (bits >> 23) - 127 - _LARGEST_EXPONENT[dtype]
    exponent += ((bits & 0x7FFFFF) > _LARGEST_MANTISSA).astype(jnp.int32)
    exponent = jnp.maximum(exponent, _SMALLEST_SCALE)
    scale = lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)
    scale = jnp.where(largest > 0, scale, jnp.ones_like(scale))
    return jnp.where(jnp.isfinite(largest), scale, jnp.full_like(scale, jnp.nan))


def largest_of(
    x: Float[Array, "*dims"], axes: tuple[str, ...], dims: tuple[int, ...] | None = None
) -> Float32[Array, "*rest"]:
    """Return the largest magnitude over `dims` (None = all) and `axes`; Inf if a part has a NaN."""
    largest = jnp.max(jnp.abs(x), axis=dims).astype(jnp.float32)
    largest = jnp.where(jnp.isnan(largest), jnp.full_like(largest, jnp.inf), largest)
    over = tuple(axis for axis in axes if axis in collectives.varying_axes(largest))
    return collectives.all_reduce(largest, over, "max") if over else largest


def narrow(
    x: Float[Array, "*dims"], scale: Float32[Array, "*#dims"], dtype: Any
) -> Float[Array, "*dims"]:
    """Return x / scale in the 8-bit `dtype`, rounded to nearest, ties to even."""
    return (x * (1 / scale).astype(x.dtype)).astype(dtype)


def widen(x: Float[Array, "*dims"], scale: Float32[Array, ""], dtype: Any) -> Float[Array, "*dims"]:
    """Return the values [*dims] that 8-bit x and its scale represent, exactly, in `dtype`."""
    return x.astype(dtype) * scale.astype(dtype)


Rounded: TypeAlias = tuple[Shaped[Array, "..."], Float32[Array, ""]]
"""An array in 8 bits and its scale."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RoundedWeight:
    """A gathered weight [*dims] in the compute dtype, and in 8 bits (rounded before the gather)."""

    values: Any
    rounded: Any

    def astype(self, dtype: Any) -> Shaped[Array, "*dims"]:
        """Return the values in a dtype, for products other than `Context.dot`."""
        return self.values.astype(dtype)

    def __jax_array__(self) -> Shaped[Array, "*dims"]:
        return self.values

    def __getitem__(self, index: Any) -> Any:
        """Return itself for `[...]`, by which Flax reads a parameter, else a part of the values."""
        return self if index is ... else self.values[index]


def make_dot(
    axes: tuple[str, ...], platform: str, *, is_wide: Bool[Array, ""] | None = None
) -> Any:
    """Make a `Context.dot` in fp8: product [*dims]; `RoundedWeight`s are not rounded again."""

    def dot(dims: str, x: Array, w: Array | RoundedWeight, *, out_dtype: Any = None) -> Array:
        """Multiply as `types.dot` does: [*dims named after the arrow]."""
        w8 = w.rounded if isinstance(w, RoundedWeight) else None
        w = w.astype(x.dtype)
        both = tuple(collectives.varying_axes(x) | collectives.varying_axes(w))
        x, w, w8, wide = collectives.vary((x, w, w8, is_wide), both)
        product = _Product(dims, x.dtype, out_dtype or x.dtype, axes, platform == "gpu")
        return _dot(product, x, w, w8, wide)

    return dot


def names_of(dims: str) -> tuple[list[str], list[str], list[str]]:
    """Return the names of the dims of x, of w and of the product; `dims` as in `types.dot`."""
    inputs, _, out = dims.partition("->")
    left, right = inputs.split(",")
    return left.split(), right.split(), out.split()


class _Product(NamedTuple):
    """A product and its two gradient products, of 8-bit elements (`in_8_bits`) or their values."""

    dims: str
    dtype: Any
    out_dtype: Any
    axes: tuple[str, ...]
    in_8_bits: bool

    def forward(self, x: Rounded, w: Rounded) -> Array:
        """Return the product [*dims]."""
        left, right, out = names_of(self.dims)
        return self._multiply((left, right, out), x, w, self.out_dtype)

    def backward(self, x: Rounded, w: Rounded, g: Rounded) -> tuple[Array, Array]:
        """Return gradients of x [*dims] and w [*dims] from the result's gradient g."""
        left, right, out = names_of(self.dims)
        dx = self._multiply((out, right, left), g, w, self.dtype)
        return dx, self._multiply((left, out, right), x, g, self.dtype)

    def wide(self, x: Array, w: Array) -> Array:
        """Return the product [*dims] of unrounded x [*dims] and w [*dims]."""
        return types.dot(self.dims, x, w, out_dtype=self.out_dtype)

    def rounded(self, x: Float[Array, "*dims"], dtype: Any) -> Rounded:
        scale = checkpoint_name(scale_of(largest_of(x, self.axes), dtype), SCALE)
        return narrow(x, scale, dtype), scale

    def _multiply(
        self, names: tuple[list[str], list[str], list[str]], a: Rounded, b: Rounded, dtype: Any
    ) -> Array:
        """Return the product [*out] of a [*left] and b [*right]; names = (left, right, out)."""
        left, right, out = names
        shared = [name for name in left if name in right]
        batch = [name for name in shared if name in out]
        summed = [name for name in shared if name not in out]
        indices = lambda names: (tuple(map(left.index, names)), tuple(map(right.index, names)))
        numbers = (indices(summed), indices(batch))
        if self.in_8_bits:
            product = lax.dot_general(a[0], b[0], numbers, preferred_element_type=dtype)
            product = product * a[1].astype(dtype) * b[1].astype(dtype)
        else:
            wide, other = widen(*a, self.dtype), widen(*b, self.dtype)
            product = lax.dot_general(wide, other, numbers, preferred_element_type=dtype)
        order = [*batch, *(n for n in left + right if n not in shared)]
        return jnp.transpose(product, [order.index(name) for name in out])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(
    product: _Product, x: Array, w: Array, w8: Rounded | None, wide: Bool[Array, ""] | None
) -> Array:
    """Return the product [*dims named after the arrow]; `wide` is `is_wide` of `make_dot`."""
    return _dot_forward(product, x, w, w8, wide)[0]


def _dot_forward(
    product: _Product, x: Array, w: Array, w8: Rounded | None, wide: Bool[Array, ""] | None
) -> tuple[Array, Any]:
    """Return the product [*dims] and its residuals."""
    x8, near = product.rounded(x, E4M3), w8 or product.rounded(w, E4M3)
    if wide is None:
        # Gathered weights are never saved; see `fsdp.keep_all_but_weights`.
        return product.forward(x8, near), (_as_bytes(x8), w8 or _as_bytes(near), None)
    out = lax.cond(wide, lambda: product.wide(x, w), lambda: product.forward(x8, near))
    return out, (x, w, wide)


def _dot_backward(product: _Product, kept: Any, gradient: Array) -> tuple[Array, Array, None, None]:
    """Return gradients of x [*dims] and w [*dims]."""
    x, w, wide = kept
    g8 = product.rounded(gradient, E5M2)
    if wide is None:
        return *product.backward(_from_bytes(x), _from_bytes(w), g8), None, None
    x8, w8 = product.rounded(x, E4M3), product.rounded(w, E4M3)
    dx, dw = lax.cond(
        wide, lambda: jax.vjp(product.wide, x, w)[1](gradient), lambda: product.backward(x8, w8, g8)
    )
    return dx, dw, None, None


_dot.defvjp(_dot_forward, _dot_backward)


def _as_bytes(x: Rounded) -> Rounded:
    """Reinterpret 8-bit floats as integers, because `jax.checkpoint` turns E4M3's max into NaN."""
    return lax.bitcast_convert_type(x[0], jnp.uint8), x[1]


def _from_bytes(x: Rounded) -> Rounded:
    return (lax.bitcast_convert_type(x[0], E4M3), x[1]) if x[0].dtype == jnp.uint8 else x


def round_weights(layers: Any, specs: Any, is_product: Any, dtype: Any) -> Any:
    """Round the float32 shards [layers, ...] of weights used in products, before their gather.

    `specs` of one layer have all mesh axes that shard a leaf. `is_product` marks the weights that
    `Context.dot` multiplies. Like `fsdp.gather`, weights are first rounded to the compute `dtype`.
    Returns, for each leaf, (E4M3 [layers, ...], float32 scales [layers]), or (). No gradients.
    """

    def leaf(spec: P, product: bool, w: Float[Array, "layers ..."]) -> Any:
        if not product:
            return ()
        w = lax.stop_gradient(w).astype(dtype)
        scale = scale_of(largest_of(w, axes_of(spec), tuple(range(1, w.ndim))), E4M3)
        return narrow(w, scale.reshape(-1, *[1] * (w.ndim - 1)), E4M3), scale

    return jax.tree.map(leaf, specs, is_product, layers)


def gather(shards: Any, rounded: Any, specs: Any, dtypes: Any, *, reduce_dtype: Any) -> Any:
    """Gather the weights of one layer like `fsdp.gather`; rounded ones become `RoundedWeight`s.

    `rounded` is one layer of the result of `round_weights` for these `shards`. Gradients are those
    of `shards` and ignore the rounding. For a rounded leaf of n elements over k shards, each device
    sends n·(k−1)/k elements of 1 byte in forward and of `reduce_dtype` in backward.
    """

    def leaf(spec: P, w: Any, near: Any, dtype: Any) -> Any:
        if not near:
            return fsdp.gather(w, spec, dtype, reduce_dtype=reduce_dtype)
        how = axes_of(spec), fsdp.gathered_dim(spec), dtype, reduce_dtype
        both = gather_rounded(how, w, *near)
        weight, weight8 = (checkpoint_name(x, fsdp.GATHERED) for x in both)
        return RoundedWeight(weight, (weight8, near[1]))

    return jax.tree.map(leaf, specs, shards, rounded, dtypes)


_How: TypeAlias = tuple[tuple[str, ...], int, Any, Any]
"""Axes to gather over, the dim that they split, compute dtype, dtype of reductions."""
_Shard: TypeAlias = Float[Array, "*shard"]
_Weight: TypeAlias = Float[Array, "*weight"]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def gather_rounded(
    how: _How, w: _Shard, near: _Shard, scale: Float32[Array, ""]
) -> tuple[_Weight, _Weight]:
    """Return the gathered weight, whose gradient flows to `w`, and its 8 bits (in `GATHERS`)."""
    axes, dim, dtype, _ = how
    weight8 = collectives.all_gather(near, axes, dim) if axes else near
    return widen(weight8, scale, dtype), weight8


def _gather_backward(
    how: _How, _: None, gradients: tuple[_Weight, Any]
) -> tuple[Float32[Array, "*shard"], None, None]:
    axes, dim, _, reduce_dtype = how
    return fsdp.shard_of_sum(gradients[0], axes, dim, reduce_dtype), None, None


gather_rounded.defvjp(lambda *inputs: (gather_rounded(*inputs), None), _gather_backward)
