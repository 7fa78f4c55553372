"""Numeric check of the Hopper kernels of grouped products on the user's device.

A run first compares them with blocks in float32, on its own shapes and four distributions of the
rows. Each expert's error is relative to its own peak, because others may be larger.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jaxdist.core.attention.kernel_check import KernelCheck, judge
from jaxdist.core.matmul.grouped import Kernel, make_grouped_dot
from jaxdist.core.types import Array

_NAMES = ("output", "input gradient", "weight gradient")


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupedShapes:
    """Shapes of one device's experts; `widths` are (in, out) of the matrices of its products."""

    rows: int
    groups: int
    widths: tuple[tuple[int, int], ...]
    dtype: Any


def validate_grouped(shapes: GroupedShapes, device: jax.Device) -> KernelCheck:
    """Return the result of comparing the kernels with float32 blocks, forward and backward."""
    return judge("grouped", device, partial(_compare, shapes))


def sample_sizes(rows: int, groups: int) -> dict[str, Int[np.ndarray, " groups"]]:
    """Return name -> sizes of groups, `rows` at most: equal, halving, half of them 0, odd."""
    mean = rows // groups
    small = np.random.default_rng(0).integers(0, mean // 2 + 1, groups) // 2 * 2
    return {
        "balanced": np.full(groups, mean),
        "skewed": (max(0, rows - groups) >> np.minimum(np.arange(1, groups + 1), 62)) + 1,
        "empty": np.where(np.arange(groups) % 2, mean, 0),
        "unaligned": np.maximum(0, mean - 1 + mean % 2 - small),
    }


def errors_by_expert(
    actual: Array, expected: Array, sizes: Int[np.ndarray, " groups"]
) -> Float[np.ndarray, " experts"]:
    """Return the largest error of each expert relative to its own peak; inf if only that is 0.

    The arrays are [rows, width], whose rows after the last expert count as one more, or [groups,
    in, out].
    """
    inner = tuple(range(1, actual.ndim))
    expected = expected.astype(jnp.float32)
    difference = np.asarray(jnp.max(jnp.abs(actual.astype(jnp.float32) - expected), inner))
    peak = np.asarray(jnp.max(jnp.abs(expected), inner))
    if actual.ndim == 2:
        ends = np.cumsum(sizes)[:-1] if sizes.sum() == len(peak) else np.cumsum(sizes)
        parts = lambda values: [part.max(initial=0) for part in np.split(values, ends)]
        difference, peak = np.array(parts(difference)), np.array(parts(peak))
    without = np.where(difference == 0, 0.0, np.inf)
    return np.where(peak > 0, difference / np.where(peak > 0, peak, 1), without)


def _compare(shapes: GroupedShapes) -> dict[str, float]:
    """Return result and distribution -> the largest error of an expert."""
    errors: dict[str, float] = {}
    run, refer = make_vjp("mosaic"), make_vjp("blocks")  # compiled once for each width
    sample = lambda key, *shape: jax.random.normal(key, shape, shapes.dtype)
    for case, sizes in sample_sizes(shapes.rows, shapes.groups).items():
        group = np.repeat(np.arange(shapes.groups), sizes)
        scale = np.zeros((shapes.rows, 1), np.float32)
        scale[: len(group), 0] = 2.0 ** -(group % 8)  # so that peaks of experts differ
        rows_scale, counts = jnp.asarray(scale, shapes.dtype), jnp.asarray(sizes, jnp.int32)
        for width_in, width_out in shapes.widths:
            keys = jax.random.split(jax.random.key(0), 3)
            inputs = (
                sample(keys[0], shapes.rows, width_in) * rows_scale,
                sample(keys[1], shapes.groups, width_in, width_out),
                sample(keys[2], shapes.rows, width_out) * rows_scale,
            )
            results = run(*inputs, counts)
            with jax.default_matmul_precision("highest"):
                expected = refer(*(x.astype(jnp.float32) for x in inputs), counts)
            for name, a, b in zip(_NAMES, results, expected, strict=True):
                key = f"{name}, {case}"
                worst = np.max(errors_by_expert(a, b, sizes))  # NaN if any is NaN
                errors[key] = float(np.maximum(errors.get(key, 0.0), worst))
    return errors


def make_vjp(kernel: Kernel) -> Callable[..., tuple[Array, Array, Array]]:
    """Make (x [rows, in], w [groups, in, out], grad, sizes) -> product, gradients of x and w."""
    dot = make_grouped_dot("gpu", kernel)

    @jax.jit
    def run(x: Array, w: Array, grad: Array, sizes: Array) -> tuple[Array, Array, Array]:
        out, pull_back = jax.vjp(lambda x, w: dot(x, w, sizes), x, w)
        return out, *pull_back(grad)

    return run
