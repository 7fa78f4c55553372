"""Program of tiled attention; `test_context.py` compares its values."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp

from jaxdist.core.attention import blockwise, tiled

HEAD_DIM = 8


def test_tiles_compare_no_positions_and_transpose_no_scores() -> None:
    """Otherwise XLA:CPU compares positions for each score, and transposes products in memory."""
    length = 2 * tiled.TILE
    kinds = [jax.ShapeDtypeStruct((1, length, n, HEAD_DIM), jnp.float32) for n in (4, 2, 2)]
    loss = lambda *x: jnp.sum(tiled.attend(*x, None, blockwise.Rule()))
    program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*kinds).as_text()
    assert program.count("dot_general") >= 2 * 7  # two tiles, forward and backward
    assert "stablehlo.iota" not in program
    transposed = re.findall(r"stablehlo.transpose.*-> tensor<([0-9x]+)xf32>", program)
    largest = max(math.prod(map(int, shape.split("x"))) for shape in transposed)
    assert largest <= length * 4 * HEAD_DIM < 4 * tiled.TILE**2
