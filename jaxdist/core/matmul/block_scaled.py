"""Products in 8 and 4 bits with one scale per block of elements along the contracted dims.

mxfp8: inputs, weights and gradients are rounded to E4M3. Each 32 elements along the contracted dims
share a power-of-two scale (E8M0). Forward and both backward products use this format.

nvfp4: in forward, inputs and weights are rounded to E2M1. Each 16 elements share a scale in E4M3,
and the array has one more, a power of two. Both backward products use mxfp8 on unrounded inputs.

Blocks are along the dims that a product contracts, so an array is rounded again for each product.

A GPU multiplies the rounded elements (`jax.nn.scaled_matmul`). Other platforms multiply the values
that they represent in the compute dtype, which is exact: E2M1 times E4M3 has six significant bits.

Sources: Rouhani et al. 2023, "OCP Microscaling Formats (MX) Specification", section 5: the blocks.
Mishra et al. 2025, "Recipes for Pre-training LLMs with MXFP8", sections 2 and 3: E4M3 throughout,
scales rounded up. NVIDIA 2025, "Pretraining Large Language Models with NVFP4", section 2 and
appendix B: the two scales. Deviations from the last: its 4-bit backward is left out, and the scale
of the array is a power of two, so rounding does not depend on the split of rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float, Float32, Shaped

from jaxdist.core import collectives, types
from jaxdist.core.matmul.fp8 import E4M3, SCALE, largest_of, names_of, scale_of
from jaxdist.core.types import Array

E8M0, E2M1 = jnp.float8_e8m0fnu, jnp.float4_e2m1fn

PRODUCT = "block_scaled_product"
"""Name of a forward product in a traced program, for the remat policy that saves products."""

BLOCK = {"mxfp8": 32, "nvfp4": 16}
"""Number of elements that share a scale."""

_LARGEST_E2M1 = 6.0

Scales: TypeAlias = tuple[Float32[Array, ""], Float32[Array, ""]]
"""Array scales of both factors."""


class Blocks(NamedTuple):
    """Values in E4M3 or E2M1, a scale per block (E8M0 or E4M3), and nvfp4's scale of the array."""

    values: Float[Array, "batch rows summed"]
    scales: Shaped[Array, "batch rows blocks"]
    scale: Float32[Array, ""] | None

    def widen(self, dtype: Any) -> Float[Array, "batch rows summed"]:
        """Return the represented values in `dtype`, exactly."""
        size = self.values.shape[-1] // self.scales.shape[-1]
        wide = self.values.astype(dtype) * jnp.repeat(self.scales.astype(dtype), size, axis=-1)
        return wide if self.scale is None else wide * self.scale.astype(dtype)


def round_mxfp8(x: Float[Array, "batch rows summed"]) -> Blocks:
    """Return x in E4M3, with a scale for each block of 32 elements; `summed` is padded with zeros.

    A block with a NaN or Inf becomes NaN.
    """
    blocks = _cut(x, BLOCK["mxfp8"])
    scales = scale_of(jnp.max(jnp.abs(blocks), axis=-1), E4M3)
    values = (blocks * (1 / scales)[..., None]).astype(E4M3)
    return Blocks(_join(values), scales.astype(E8M0), None)


def round_nvfp4(x: Float[Array, "batch rows summed"], scale: Float32[Array, ""]) -> Blocks:
    """Return x in E2M1, with a scale for each block of 16 elements, and `scale` for the array.

    `summed` is padded with zeros. A block with a scale below E4M3's smallest number becomes zeros.
    """
    blocks = _cut(x, BLOCK["nvfp4"]) * (1 / scale)
    scales = (jnp.max(jnp.abs(blocks), axis=-1) / _LARGEST_E2M1).astype(E4M3)
    wide = scales.astype(jnp.float32)[..., None]
    values = jnp.where(
        wide == 0, jnp.zeros_like(blocks), blocks / jnp.where(wide == 0, jnp.ones_like(wide), wide)
    )
    # If a scale was rounded down, the largest value of its block exceeds 6.
    values = jnp.clip(values, -_LARGEST_E2M1, _LARGEST_E2M1).astype(E2M1)
    return Blocks(_join(values), scales, scale)


def scale_of_nvfp4(largest: Float32[Array, ""]) -> Float32[Array, ""]:
    """Return the scale of an array from its largest magnitude, so that block scales fit in E4M3."""
    return scale_of(largest / _LARGEST_E2M1, E4M3)


def _cut(
    x: Float[Array, "batch rows summed"], size: int
) -> Float32[Array, "batch rows blocks {size}"]:
    x = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, 0), (0, -x.shape[-1] % size)))
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def _join(blocks: Float[Array, "batch rows blocks size"]) -> Float[Array, "batch rows summed"]:
    return blocks.reshape(*blocks.shape[:-2], -1)


def make_dot(
    matmul_dtype: str,
    axes: tuple[str, ...],
    platform: str,
    *,
    is_wide: Bool[Array, ""] | None = None,
) -> Callable[..., Array]:
    """Make a `Context.dot` in mxfp8 or nvfp4: product [*dims], see `matmul.make_dot`."""

    def dot(dims: str, x: Array, w: Array, *, out_dtype: Any = None) -> Array:
        """Multiply as `types.dot` does: [*dims named after the arrow]."""
        w = w.astype(x.dtype)
        both = tuple(collectives.varying_axes(x) | collectives.varying_axes(w))
        x, w, wide = collectives.vary((x, w, is_wide), both)
        product = _Scaled(
            matmul_dtype, dims, x.dtype, out_dtype or x.dtype, axes, platform == "gpu"
        )
        return _dot(product, x, w, wide)

    return dot


class _Scaled(NamedTuple):
    """A product and its mxfp8 gradient products, of rounded elements (`is_narrow`) or values."""

    matmul_dtype: str
    dims: str
    dtype: Any
    out_dtype: Any
    axes: tuple[str, ...]
    is_narrow: bool

    def scales(self, x: Array, w: Array) -> Scales | None:
        """Return the array scales of x [*dims] and w [*dims]; None for mxfp8."""
        if self.matmul_dtype == "mxfp8":
            return None
        x_scale, w_scale = (scale_of_nvfp4(largest_of(array, self.axes)) for array in (x, w))
        return checkpoint_name(x_scale, SCALE), checkpoint_name(w_scale, SCALE)

    def forward(self, x: Array, w: Array, scales: Scales | None) -> Array:
        """Return the product [*dims] of x [*dims] and w [*dims]."""
        names = names_of(self.dims)
        return checkpoint_name(self._multiply(names, x, w, self.out_dtype, scales), PRODUCT)

    def backward(self, x: Array, w: Array, g: Array) -> tuple[Array, Array]:
        """Return gradients of x [*dims] and w [*dims] from the result's gradient g [*dims]."""
        left, right, out = names_of(self.dims)
        dx = self._multiply((out, right, left), g, w, x.dtype)
        return dx, self._multiply((left, out, right), x, g, x.dtype)

    def wide(self, x: Array, w: Array) -> Array:
        """Return the product [*dims] of x [*dims] and w [*dims] without rounding them."""
        return types.dot(self.dims, x, w, out_dtype=self.out_dtype)

    def _multiply(
        self,
        names: tuple[list[str], list[str], list[str]],
        a: Array,
        b: Array,
        dtype: Any,
        scales: Scales | None = None,
    ) -> Array:
        """Return the product [*out] of a [*left] and b [*right]; names = (left, right, out)."""
        left, right, out = names
        shared = [name for name in left if name in right]
        batch = [name for name in shared if name in out]
        summed = [name for name in shared if name not in out]
        rows = [name for name in left if name not in shared]
        columns = [name for name in right if name not in shared]
        first = _lay_out(a, left, (batch, rows, summed))
        second = _lay_out(b, right, (batch, columns, summed))
        if scales is None:
            product = self._product(round_mxfp8(first), round_mxfp8(second), dtype)
        else:
            blocks = round_nvfp4(first, scales[0]), round_nvfp4(second, scales[1])
            product = self._product(*blocks, dtype)
        sizes = dict(zip((*left, *right), (*a.shape, *b.shape), strict=True))
        order = [*batch, *rows, *columns]
        product = product.reshape([sizes[name] for name in order])
        return jnp.transpose(product, [order.index(name) for name in out])

    def _product(self, a: Blocks, b: Blocks, dtype: Any) -> Float[Array, "batch rows columns"]:
        if not self.is_narrow:
            numbers = (((2,), (2,)), ((0,), (0,)))
            wide, other = a.widen(self.dtype), b.widen(self.dtype)
            return lax.dot_general(wide, other, numbers, preferred_element_type=dtype)
        product = jax.nn.scaled_matmul(
            a.values, b.values, a.scales, b.scales, preferred_element_type=dtype
        )
        # The product loses the axes over which its arguments vary.
        product = collectives.vary(product, tuple(collectives.varying_axes(a.values)))
        if a.scale is None or b.scale is None:
            return product
        return product * a.scale.astype(dtype) * b.scale.astype(dtype)


def _lay_out(x: Array, names: list[str], groups: Sequence[list[str]]) -> Array:
    """Reshape x [*names] to an array with one dim for each group of names."""
    sizes = dict(zip(names, x.shape, strict=True))
    order = [name for group in groups for name in group]
    transposed = jnp.transpose(x, [names.index(name) for name in order])
    return transposed.reshape([math.prod(sizes[name] for name in group) for group in groups])


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dot(product: _Scaled, x: Array, w: Array, wide: Bool[Array, ""] | None) -> Array:
    """Return the product [*dims after `->`] of rounded x and w, or of x and w if `wide` is True."""
    return _dot_forward(product, x, w, wide)[0]


def _dot_forward(
    product: _Scaled, x: Array, w: Array, wide: Bool[Array, ""] | None
) -> tuple[Array, Any]:
    """Return the product [*dims] and its residuals."""
    scales = product.scales(x, w)
    if wide is None:
        return product.forward(x, w, scales), (x, w, None)
    out = lax.cond(wide, lambda: product.wide(x, w), lambda: product.forward(x, w, scales))
    return out, (x, w, wide)


def _dot_backward(product: _Scaled, kept: Any, gradient: Array) -> tuple[Array, Array, None]:
    """Return gradients of x [*dims] and w [*dims]."""
    x, w, wide = kept
    if wide is None:
        return *product.backward(x, w, gradient), None
    dx, dw = lax.cond(
        wide,
        lambda: jax.vjp(product.wide, x, w)[1](gradient),
        lambda: product.backward(x, w, gradient),
    )
    return dx, dw, None


_dot.defvjp(_dot_forward, _dot_backward)
