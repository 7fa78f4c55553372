"""Grouped products by the Mosaic GPU kernels of the installed jax, on Hopper GPUs.

They read the matrix of each group where it is, blocks of rows (`grouped.py`) copy it. Sums are
float32 and rounded once. A kernel writes no row after the last group, so these are set to 0 here.

Source: `ragged_dot_mgpu` and `transposed_ragged_dot_mgpu` of jax.experimental.pallas.ops.gpu.
"""

from __future__ import annotations

import math
import types
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jaxdist.core import collectives
from jaxdist.core.types import Array

COMPUTE_CAPABILITY = "9.0"
MULTIPLE = 64
"""A dimension is cut into tiles of this size or of twice this size."""

_STEPS, _SNAKE = 4, 8  # tiles that are loaded ahead; tiles of columns in a band

Sizes = Int[Array, " groups"]


def rejection(widths: Sequence[int], dtype: Any) -> str:
    """Return why the kernels cannot multiply matrices of these dims in `dtype`; "" = they can."""
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float16):
        return f"the kernels have no {jnp.dtype(dtype).name}"
    odd = sorted({width for width in widths if width % MULTIPLE})
    return f"widths {odd} are no multiples of {MULTIPLE}" if odd else ""


def dot(
    x: Float[Array, "rows d_x"],
    w: Float[Array, "groups d_in d_out"],
    sizes: Sizes,
    *,
    transpose: bool = False,
) -> Float[Array, "rows d_result"]:
    """Return each row's product with its group's matrix, or with the transposed one."""
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot  # loads MLIR

    is_small = x.shape[0] < 2 * MULTIPLE * w.shape[0]  # rows of a mean group
    options = _options(MULTIPLE if is_small else 2 * MULTIPLE, w.shape[1 if transpose else 2])
    out = ragged_dot(x, w, group_sizes=sizes, transpose_rhs=transpose, **options)
    is_used = jnp.arange(x.shape[0], dtype=jnp.int32) < jnp.sum(sizes)
    out = collectives.vary(out, tuple(collectives.varying_axes(x)))
    return jnp.where(is_used[:, None], out, 0)


def sum_products(
    x: Float[Array, "rows d_in"], grad: Float[Array, "rows d_out"], sizes: Sizes
) -> Float[Array, "groups d_in d_out"]:
    """Return the sum over each group's rows of x transposed times `grad`; 0 for empty groups."""
    from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import transposed_ragged_dot

    options = _options(_tile(x.shape[1]), grad.shape[1])
    sums = transposed_ragged_dot(x, grad, group_sizes=sizes, **options)
    return collectives.vary(sums, tuple(collectives.varying_axes(x)))


def emulate_gpu(num_sms: int) -> None:
    """Let the kernels be traced without a GPU, for one with this number of multiprocessors."""
    from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu as module

    described = types.ModuleType("jax")
    device = types.SimpleNamespace(core_count=num_sms)
    vars(described).update(vars(jax), devices=lambda: [device])
    module.jax = described  # type: ignore[assignment]


def _tile(size: int) -> int:
    return 2 * MULTIPLE if size % (2 * MULTIPLE) == 0 else MULTIPLE


def _options(block_m: int, columns: int) -> dict[str, Any]:
    """Return a kernel's options for tiles of `block_m` rows; the result has `columns` columns."""
    block_n = _tile(columns)
    return {
        "block_m": block_m,
        "block_n": block_n,
        "block_k": MULTIPLE,
        "max_concurrent_steps": _STEPS,
        "grid_block_n": math.gcd(columns // block_n, _SNAKE),
    }
