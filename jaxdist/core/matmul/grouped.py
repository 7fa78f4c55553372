"""Products of rows, sorted by group, with one matrix per group (the products of experts).

Rows are multiplied in blocks, each of which has rows of one group. Work and memory are those of the
rows, not rows times groups: `lax.ragged_dot` expands to that on CPUs and on NVIDIA GPUs. On CPUs a
loop runs the blocks that have rows. On GPUs a loop would start several small kernels for each
block, so many blocks are one batched product, for which their matrices are copied. On Hopper GPUs
a kernel reads them where they are (`hopper.py`), after `grouped_check.py` has compared it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int

from jaxdist.core import collectives
from jaxdist.core.matmul import hopper
from jaxdist.core.types import Array

Kernel: TypeAlias = Literal["blocks", "mosaic"]
"""Implementations: blocks in plain JAX, or jax's kernels for Hopper."""

_CPU_BLOCK, _GPU_BLOCK = 64, 2048
"""Maximum number of rows in a block."""

_ROWS_OF_A_COPY = 750
"""Rows whose product takes as long as the copy of their matrix, on an H100: per element 6 bytes at
2.85 TB/s, and for each row 2 FLOPs at 712 TFLOP/s."""

COPIED = 2**27
"""Maximum number of elements of the matrices that one batched product copies, if several."""


def make_grouped_dot(platform: str, kernel: Kernel = "blocks") -> Callable[..., Array]:
    """Make (x [rows, in], w [groups, in, out], sizes int32 [groups]) -> [rows, out].

    Rows are sorted by group; `sizes` are the numbers of rows of each. Rows after the last group
    give 0. Sums are float32, the result has the dtype of x. Blocks multiply what a kernel cannot.
    """

    def dot(x: Array, w: Array, sizes: Array) -> Array:
        """Return the products [rows, out]."""
        axes = tuple(sorted(collectives.varying_axes(x) | collectives.varying_axes(w)))
        block = block_rows(x.shape[0], w.shape[0], platform)
        blocks = "looped" if platform == "cpu" else "batched"
        is_rejected = kernel == "blocks" or hopper.rejection(w.shape[1:], x.dtype)
        way = blocks if is_rejected else kernel
        return _grouped(*collectives.vary((x, w, sizes), axes), block, way)

    return dot


def block_rows(rows: int, groups: int, platform: str) -> int:
    """Return the number of rows in a block: a power of two, 8 to `_CPU_BLOCK` or `_GPU_BLOCK`.

    Above 8 it is at most the n rows of a mean group, and on GPUs √(n · `_ROWS_OF_A_COPY`), at
    which copying matrices (less with large blocks) costs as much as unused rows.
    """
    mean, limit = rows // groups, _CPU_BLOCK
    if platform != "cpu":
        mean, limit = min(mean, math.isqrt(mean * _ROWS_OF_A_COPY)), _GPU_BLOCK
    return max(8, min(limit, 1 << max(0, mean.bit_length() - 1)))


def num_blocks(rows: int, groups: int, block: int) -> int:
    """Return an upper bound of the number of blocks for any sizes of the groups."""
    return rows // block + groups


def batches_of(blocks: int, matrix_size: int) -> tuple[int, int]:
    """Return the number of batched products for all blocks, and of blocks in each."""
    batches = -(-blocks // max(1, COPIED // matrix_size))
    return batches, -(-blocks // max(1, batches))


class _Blocks(NamedTuple):
    """Blocks of rows: the group of each block, and its rows.

    Attributes:
        group: index of the group, int32 [blocks].
        start: first row of the block, int32 [blocks].
        used: number of its rows, int32 [blocks]; 0 for blocks after the last group.
    """

    group: Array
    start: Array
    used: Array


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _grouped(
    x: Float[Array, "rows d_in"],
    w: Float[Array, "groups d_in d_out"],
    sizes: Int[Array, " groups"],
    block: int,
    way: str,
) -> Float[Array, "rows d_out"]:
    """Return the product of each row with the matrix of its group."""
    if way == "mosaic":
        return hopper.dot(x, w, sizes)
    run = _batched if way == "batched" else _looped
    return run(x, w, sizes, block)


def _backward(block: int, way: str, saved: Any, grad: Array) -> tuple[Array, Array, None]:
    """Return the gradients of x [rows, in] and w [groups, in, out]."""
    x, w, sizes = saved
    if way == "mosaic":
        return hopper.dot(grad, w, sizes, transpose=True), hopper.sum_products(x, grad, sizes), None
    dx = (_batched if way == "batched" else _looped)(grad, w.swapaxes(1, 2), sizes, block)
    sum_blocks = _sum_batches if way == "batched" else _sum_looped
    return dx, sum_blocks(x, grad, w, sizes, block).astype(w.dtype), None


_grouped.defvjp(lambda *inputs: (_grouped(*inputs), inputs[:3]), _backward)


def _looped(x: Array, w: Array, sizes: Array, block: int) -> Array:
    """Multiply x [rows, in] by w [groups, in, out], block by block; return [rows, out]."""
    rows = _padded(x, block)

    def write(one: _Blocks, output: Array) -> Array:
        part = _dot("rd,df->rf", lax.dynamic_slice_in_dim(rows, one.start, block), w[one.group])
        part = jnp.where(jnp.arange(block)[:, None] < one.used, part, 0).astype(output.dtype)
        return lax.dynamic_update_slice_in_dim(output, part, one.start, 0)

    zeros = _zeros((rows.shape[0], w.shape[2]), x.dtype, x)
    return _for_blocks(write, zeros, sizes, x.shape[0], block)[: x.shape[0]]


def _sum_looped(x: Array, grad: Array, w: Array, sizes: Array, block: int) -> Array:
    """Return the gradients of the matrices of all groups, float32 [groups, in, out]."""
    rows, rows_grad = _padded(x, block), _padded(grad, block)

    def add(one: _Blocks, total: Array) -> Array:
        inputs = lax.dynamic_slice_in_dim(rows, one.start, block)
        inputs = jnp.where(jnp.arange(block)[:, None] < one.used, inputs, 0)
        outputs = lax.dynamic_slice_in_dim(rows_grad, one.start, block)
        return total.at[one.group].add(_dot("rd,rf->df", inputs, outputs))

    return _for_blocks(add, _zeros(w.shape, jnp.float32, grad), sizes, x.shape[0], block)


def _for_blocks(
    body: Callable[[_Blocks, Array], Array], carry: Array, sizes: Array, num_rows: int, block: int
) -> Array:
    """Return the carry [*dims] after body(block, carry) for each block with rows, in row order."""
    blocks = _blocks_of(sizes, num_rows, block)
    count = jnp.sum(blocks.used > 0)
    take = lambda index: jax.tree.map(lambda a: a[index], blocks)
    state = (collectives.vary(jnp.int32(0), tuple(collectives.varying_axes(sizes))), carry)
    step = lambda state: (state[0] + 1, body(take(state[0]), state[1]))
    return lax.while_loop(lambda state: state[0] < count, step, state)[1]


def _batched(x: Array, w: Array, sizes: Array, block: int) -> Array:
    """Multiply x [rows, in] by w [groups, in, out], many blocks at a time; return [rows, out]."""

    def multiply(blocks: _Blocks) -> Array:
        return _dot("nrd,ndf->nrf", _rows_of(x, blocks, block), w[blocks.group]).astype(x.dtype)

    batches = _in_batches(_blocks_of(sizes, x.shape[0], block), w.shape[1] * w.shape[2])
    products = lax.map(multiply, batches).reshape(-1, w.shape[2])
    # Row r is in block (r - start of its group) / block of its group.
    index = jnp.arange(x.shape[0], dtype=jnp.int32)
    ends = jnp.cumsum(sizes)
    group = jnp.sum(ends[:, None] <= index, 0, dtype=jnp.int32)
    exists, group = group < sizes.shape[0], jnp.minimum(group, sizes.shape[0] - 1)
    per_group = (sizes + block - 1) // block
    first = (jnp.cumsum(per_group) - per_group)[group] * block
    position = first + index - (ends - sizes)[group]
    return jnp.where(exists[:, None], products[jnp.where(exists, position, 0)], 0)


def _sum_batches(x: Array, grad: Array, w: Array, sizes: Array, block: int) -> Array:
    """Return the gradients of the matrices of all groups, float32 [groups, in, out]."""

    def add(total: Array, one: _Blocks) -> tuple[Array, None]:
        alone = jax.tree.map(lambda a: a[None], one)
        rows = (_rows_of(array, alone, block)[0] for array in (x, grad))
        part = total[one.group] + _dot("rd,rf->df", *rows)
        return lax.dynamic_update_index_in_dim(total, part, one.group, 0), None

    # Block by block, because a batch of gradients would read and write those of all groups.
    blocks = _blocks_of(sizes, x.shape[0], block)
    return lax.scan(add, _zeros(w.shape, jnp.float32, grad), blocks)[0]


def _in_batches(blocks: _Blocks, matrix_size: int) -> _Blocks:
    """Split the blocks into batches, [batches, blocks]; the last ones get blocks without rows."""
    batches, each = batches_of(blocks.group.shape[0], matrix_size)
    missing = batches * each - blocks.group.shape[0]
    return jax.tree.map(lambda a: jnp.pad(a, (0, missing)).reshape(batches, each), blocks)


def _rows_of(x: Array, blocks: _Blocks, block: int) -> Array:
    """Return the rows of blocks, [blocks, block, width], of x [rows, width]; unused rows are 0."""
    offset = jnp.arange(block, dtype=jnp.int32)
    index = jnp.minimum(blocks.start[:, None] + offset, x.shape[0] - 1)
    return jnp.where((offset < blocks.used[:, None])[..., None], x[index], 0)


def _blocks_of(sizes: Array, num_rows: int, block: int) -> _Blocks:
    """Return all blocks of groups with these sizes, int32 [groups], in the order of the rows."""
    per_group = (sizes + block - 1) // block
    ends, starts = jnp.cumsum(per_group), jnp.cumsum(sizes) - sizes
    index = jnp.arange(num_blocks(num_rows, sizes.shape[0], block), dtype=jnp.int32)
    group = jnp.sum(ends[:, None] <= index, 0, dtype=jnp.int32)  # the number of groups before
    exists, group = group < sizes.shape[0], jnp.minimum(group, sizes.shape[0] - 1)
    offset = (index - (ends - per_group)[group]) * block
    used = jnp.where(exists, jnp.minimum(sizes[group] - offset, block), 0)
    return _Blocks(group, jnp.where(exists, starts[group] + offset, 0), used)


def _zeros(shape: tuple[int, ...], dtype: Any, like: Array) -> Array:
    """Return zeros [*shape] that vary over the same axes as `like`."""
    return collectives.vary(jnp.zeros(shape, dtype), tuple(collectives.varying_axes(like)))


def _padded(x: Array, block: int) -> Array:
    """Append a block of zero rows to x [rows, ...], because a block may end after the last row."""
    return jnp.concatenate([x, _zeros((block, *x.shape[1:]), x.dtype, x)])


def _dot(dims: str, x: Array, y: Array) -> Array:
    """Return the product of x and y, float32 [*dims after the arrow]."""
    return jnp.einsum(dims, x, y, preferred_element_type=jnp.float32)
