"""Products of rows, sorted by group, with one matrix per group (the products of experts).

Rows are multiplied in blocks, each of which has rows of one group. Work and memory are those of the
rows, not rows times groups: `lax.ragged_dot` expands to that on CPUs and on NVIDIA GPUs
(`scripts/bench/results/experts.md`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int

from jaxdist.core import collectives
from jaxdist.core.types import Array

_CPU_BLOCK, _GPU_BLOCK = 64, 1024
"""Maximum number of rows in a block. Each one starts several kernels on a GPU."""


def make_grouped_dot(platform: str) -> Callable[..., Array]:
    """Make (x [rows, in], w [groups, in, out], sizes int32 [groups]) -> [rows, out].

    Rows are sorted by group; `sizes` are the numbers of rows of each. Rows after the last group
    give 0. Sums are float32, the result has the dtype of x.
    """
    # A loop whose number of iterations is computed on a GPU makes the host wait for it.
    is_static = platform != "cpu"

    def dot(x: Array, w: Array, sizes: Array) -> Array:
        """Return the products [rows, out] of x [rows, in]."""
        axes = tuple(sorted(collectives.varying_axes(x) | collectives.varying_axes(w)))
        block = block_rows(x.shape[0], w.shape[0], platform)
        return _grouped(*collectives.vary((x, w, sizes), axes), block, is_static)

    return dot


def block_rows(rows: int, groups: int, platform: str) -> int:
    """Return the number of rows in a block: a power of two up to the mean size of a group."""
    power = 1 << max(0, (rows // groups).bit_length() - 1)
    return max(8, min(_CPU_BLOCK if platform == "cpu" else _GPU_BLOCK, power))


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _grouped(
    x: Float[Array, "rows d_in"],
    w: Float[Array, "groups d_in d_out"],
    sizes: Int[Array, " groups"],
    block: int,
    is_static: bool,
) -> Float[Array, "rows d_out"]:
    """Return the product of each row with the matrix of its group."""
    product = lambda rows, group: _dot("rd,df->rf", rows, w[group])
    return _map_blocks(product, x, sizes, w.shape[2], block, is_static)


def _forward(x: Array, w: Array, sizes: Array, block: int, is_static: bool) -> Any:
    """Return the products [rows, out], and the arguments."""
    return _grouped(x, w, sizes, block, is_static), (x, w, sizes)


def _backward(block: int, is_static: bool, saved: Any, grad: Array) -> tuple[Array, Array, None]:
    """Return the gradients of x [rows, in] and w [groups, in, out]."""
    x, w, sizes = saved
    product = lambda rows, group: _dot("rf,df->rd", rows, w[group])
    dx = _map_blocks(product, grad, sizes, w.shape[1], block, is_static)
    rows, rows_grad = _padded(x, block), _padded(grad, block)

    def add(group: Array, start: Array, is_used: Array, total: Array) -> Array:
        """Add one block's part to the gradients of all matrices, float32 [groups, in, out]."""
        inputs = jnp.where(is_used, lax.dynamic_slice_in_dim(rows, start, block), 0)
        outputs = lax.dynamic_slice_in_dim(rows_grad, start, block)
        return total.at[group].add(_dot("rd,rf->df", inputs, outputs))

    zeros = collectives.vary(jnp.zeros(w.shape, jnp.float32), tuple(collectives.varying_axes(grad)))
    dw = _for_blocks(add, zeros, sizes, x.shape[0], block, is_static)
    return dx, dw.astype(w.dtype), None


_grouped.defvjp(_forward, _backward)


def _map_blocks(
    product: Callable[[Array, Array], Array],
    x: Array,
    sizes: Array,
    width: int,
    block: int,
    is_static: bool,
) -> Array:
    """Return `product(rows [block, in], group)` for all blocks of x [rows, in]: [rows, width]."""
    rows = _padded(x, block)

    def write(group: Array, start: Array, is_used: Array, output: Array) -> Array:
        """Write one block of the output [rows + block, width]; the next block starts in it."""
        part = product(lax.dynamic_slice_in_dim(rows, start, block), group)
        part = jnp.where(is_used, part, 0).astype(output.dtype)
        return lax.dynamic_update_slice_in_dim(output, part, start, 0)

    zeros = jnp.zeros((rows.shape[0], width), x.dtype)
    zeros = collectives.vary(zeros, tuple(collectives.varying_axes(x)))
    return _for_blocks(write, zeros, sizes, x.shape[0], block, is_static)[: x.shape[0]]


def _for_blocks(
    body: Callable[[Array, Array, Array, Array], Array],
    carry: Array,
    sizes: Array,
    num_rows: int,
    block: int,
    is_static: bool,
) -> Array:
    """Call body(group, first row, bool [block, 1] rows of the group, carry) in order of the rows.

    With `is_static`, the number of iterations is the most that any sizes int32 [groups] need;
    blocks after the last group start in the padding and have no rows.
    """
    blocks = (sizes + block - 1) // block
    ends, starts = jnp.cumsum(blocks), jnp.cumsum(sizes) - sizes

    def step(index: Array, carry: Array) -> Array:
        """Run the block of this index, int32 []."""
        group = jnp.sum(ends <= index).astype(jnp.int32)  # the number of groups before
        exists = group < sizes.shape[0]
        group = jnp.minimum(group, sizes.shape[0] - 1)
        offset = (index - (ends[group] - blocks[group])) * block
        start = jnp.where(exists, starts[group] + offset, num_rows)
        used = jnp.where(exists, sizes[group] - offset, 0)
        return body(group, start, jnp.arange(block)[:, None] < used, carry)

    if is_static:
        most = num_rows // block + sizes.shape[0]
        first = collectives.vary(jnp.int32(0), tuple(collectives.varying_axes(sizes)))
        return lax.fori_loop(0, most, lambda i, c: step(first + i, c), carry)
    state = (collectives.vary(jnp.int32(0), tuple(collectives.varying_axes(sizes))), carry)
    return lax.while_loop(lambda c: c[0] < ends[-1], lambda c: (c[0] + 1, step(*c)), state)[1]


def _padded(x: Array, block: int) -> Array:
    """Append a block of zero rows to x [rows, ...], because a block may end after the last row."""
    zeros = jnp.zeros((block, *x.shape[1:]), x.dtype)
    return jnp.concatenate([x, collectives.vary(zeros, tuple(collectives.varying_axes(x)))])


def _dot(dims: str, x: Array, y: Array) -> Array:
    """Return the product of x and y, float32 [*dims after the arrow]."""
    return jnp.einsum(dims, x, y, preferred_element_type=jnp.float32)
