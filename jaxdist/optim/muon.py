"""Muon: orthogonalized momentum of matrices; the devices that shard a matrix divide the work.

Orthogonalizing needs complete matrices, but each of n devices holds a slice of every matrix. One
all-to-all gives each device 1/n of the stack as complete matrices, padded to a multiple of n, and a
second one returns the slices.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Float32, Shaped

from jaxdist.core import collectives
from jaxdist.core.axis import axes_of
from jaxdist.core.matrices import Sides
from jaxdist.core.types import Array, Params
from jaxdist.optim.config import OptimConfig

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of a quintic Newton-Schulz step: a x + b (x xᵀ) x + c (x xᵀ)² x (Jordan, 2024)."""

_NUM_ITERATIONS = 5

_ADAM_RMS = 0.2
"""Typical RMS of an AdamW update; Muon's update is scaled to it (Liu et al., "Muon is Scalable for
LLM Training", 2025, section 2.2)."""


class MuonState(NamedTuple):
    """Muon's momentum, in `OptimConfig.rule_dtype` (see `in_8_bits`), after int32 [] steps."""

    step: Array
    momentum: Params


def scale_by_muon(
    config: OptimConfig, sides: Params, shardings: Params | None
) -> optax.GradientTransformation:
    """Make orthogonal updates with the RMS of AdamW's, for trees that contain only matrices.

    Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024. Deviations: the
    momentum is debiased as in NAdam, as optax does; the update is scaled to AdamW's RMS.

    `shardings` of gradients and momentum may be None (one device). A leaf is float32 [*stacked,
    *rows, *columns] in any order of dims.

    For a leaf of B bytes over n shards, each device sends 2·B/n·(n−1)/n in float32, plus padding to
    a multiple of n matrices.
    """

    def init(params: Any) -> MuonState:
        return MuonState(
            jnp.zeros((), jnp.int32), optax.tree.zeros_like(params, dtype=config.rule_dtype)
        )

    def update(
        grads: Params, state: MuonState, params: Params | None = None
    ) -> tuple[Params, MuonState]:
        beta, step = config.momentum, optax.safe_increment(state.step)
        momentum = optax.tree.update_moment(grads, state.momentum, beta, 1)
        ahead = jax.tree.map(
            lambda m, g: beta * m + (1 - beta) * g,
            optax.tree.bias_correction(momentum, beta, optax.safe_increment(step)),
            optax.tree.bias_correction(grads, beta, step),
        )
        direction = functools.partial(_direction, eps=config.eps)
        updates = jax.tree.map(direction, ahead, sides, *[] if shardings is None else [shardings])
        return updates, MuonState(step, optax.tree.cast(momentum, config.rule_dtype))

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]  # our state


def _direction(
    x: Float32[Array, "*leaf"], sides: Sides, sharding: NamedSharding | None = None, *, eps: float
) -> Float32[Array, "*leaf"]:
    if not x.size:  # a parameter outside of the updated group
        return x
    size = lambda dims: math.prod(x.shape[i] for i in dims)
    scale = _ADAM_RMS * math.sqrt(max(size(sides.rows), size(sides.columns)))
    orthogonal = functools.partial(_orthogonal, eps=eps)
    if sharding is None or not any(_matrix_axes(x, sides, sharding)):
        shape = (-1, size(sides.rows), size(sides.columns))
        made = jax.vmap(orthogonal)(_stack(x, sides).reshape(shape))
        return scale * _unstack(made, x, sides)
    axes = _matrix_axes(x, sides, sharding)
    split = functools.partial(_split_over_devices, orthogonal=orthogonal, sides=sides, axes=axes)
    spec = sharding.spec
    return scale * jax.shard_map(split, mesh=sharding.mesh, in_specs=spec, out_specs=spec)(x)


def _orthogonal(x: Float32[Array, "rows columns"], eps: float) -> Float32[Array, "rows columns"]:
    """Move a matrix's singular values to about 1, in the orientation with fewer rows."""
    if x.shape[0] > x.shape[1]:
        return _orthogonal(x.T, eps).T
    a, b, c = _COEFFICIENTS
    x = x / (jnp.linalg.norm(x) + eps)
    for _ in range(_NUM_ITERATIONS):
        square = x @ x.T
        x = a * x + (b * square + (c * square) @ square) @ x
    return x


def _split_over_devices(
    x: Float32[Array, "*slice"], *, orthogonal: Any, sides: Sides, axes: list[tuple[str, ...]]
) -> Float32[Array, "*slice"]:
    """Orthogonalize the matrices of a stack, each one on one of the devices that shard it.

    `x` and the result are this device's slices. `axes` are the mesh axes that shard each dim of a
    matrix, rows before columns. Runs inside `jax.shard_map`.
    """
    stack = _stack(x, sides)  # [count, *dims], dims local
    count, *dims = stack.shape
    group = tuple(axis for names in axes for axis in names)
    devices = collectives.group_size(group)
    each = -(-count // devices)
    padded = jnp.pad(stack, [(0, devices * each - count)] + [(0, 0)] * len(dims))
    slices = collectives.all_to_all(padded, group, 0, 0)  # slices of own matrices, by sender

    # [*group, each, *dims] -> [each, *(axes of a dim, the dim)], so that slices are adjacent.
    sizes = [collectives.group_size(axis) for axis in group]
    order, first = [len(sizes)], 0
    for i, names in enumerate(axes):
        order += [*range(first, first + len(names)), len(sizes) + 1 + i]
        first += len(names)
    by_axis = slices.reshape(*sizes, each, *dims).transpose(order)
    rows = math.prod(
        by_axis.shape[1 : 1 + sum(len(names) + 1 for names in axes[: len(sides.rows)])]
    )

    # One matrix at a time, because its products fill a device.
    matrices = jax.lax.map(orthogonal, by_axis.reshape(each, rows, -1))

    back = matrices.reshape(by_axis.shape).transpose([order.index(i) for i in range(len(order))])
    returned = collectives.all_to_all(back.reshape(padded.shape), group, 0, 0)
    return _unstack(returned[:count], x, sides)


def _matrix_axes(
    x: Shaped[Array, "*leaf"], sides: Sides, sharding: NamedSharding
) -> list[tuple[str, ...]]:
    """Return the mesh axes that shard each dim of the leaf's matrices, rows before columns."""
    entries = [*sharding.spec, *[None] * (x.ndim - len(sharding.spec))]
    return [axes_of(P(entries[i])) for i in sides.rows + sides.columns]


def _stack(x: Shaped[Array, "*leaf"], sides: Sides) -> Shaped[Array, "count ..."]:
    """Reshape to [count, *rows, *columns]."""
    order = sides.stacked + sides.rows + sides.columns
    moved = x.transpose(order)
    return moved.reshape(-1, *moved.shape[len(sides.stacked) :])


def _unstack(
    stack: Shaped[Array, "*stack"], x: Shaped[Array, "*leaf"], sides: Sides
) -> Shaped[Array, "*leaf"]:
    """Reshape `stack` back to the shape of x: the inverse of `_stack`."""
    order = sides.stacked + sides.rows + sides.columns
    moved = stack.reshape([x.shape[i] for i in order])
    return moved.transpose(sorted(range(x.ndim), key=lambda i: order[i]))
