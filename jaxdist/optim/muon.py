"""Muon: momentum of matrices, made orthogonal; divided over the devices that shard it.

An orthogonal matrix needs the whole matrix, and a device holds a slice of each. An all-to-all turns
slices of every matrix into every n-th matrix whole, each device orthogonalises its own, and a
second all-to-all brings the slices back: no device ever holds more than its share of the stack.
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

from jaxdist.core import collectives
from jaxdist.core.axis import axes_of
from jaxdist.core.matrices import Sides
from jaxdist.core.types import Array, Params
from jaxdist.optim.config import OptimConfig

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic Newton-Schulz step x -> a x + b (x xᵀ) x + c (x xᵀ)² x (Jordan, 2024)."""

_NUM_ITERATIONS = 5

_ADAM_RMS = 0.2
"""RMS of an AdamW update in practice, which Muon's is scaled to, so that both take the same
learning rate. Liu et al., "Muon is Scalable for LLM Training", 2025, section 2.2."""


class MuonState(NamedTuple):
    """Muon's momentum.

    Attributes:
        step: int32 [], steps taken.
        momentum: like the parameters, in `optim.moment_dtype`.
    """

    step: Array
    momentum: Params


def scale_by_muon(
    config: OptimConfig, sides: Params, shardings: Params | None
) -> optax.GradientTransformation:
    """Orthogonal updates with the RMS of AdamW's, for trees of nothing but matrices.

    Jordan, "Muon: An optimizer for hidden layers in neural networks", 2024. Deviations: the
    momentum is debiased as in NAdam before it is orthogonalised, as optax does; the update is then
    scaled to AdamW's RMS (Liu et al., 2025).

    `sides` is a tree of `Sides`, `shardings` one of the `NamedSharding` that gradients and momentum
    have; None where one device holds everything. A leaf is float32 [*stacked, *rows, *columns] in
    any order of dims.

    Wire, per leaf of B bytes over n shards: 2·B/n·(n−1)/n per device, in float32, and the padding
    of its matrices to a multiple of n.
    """

    def init(params: Params) -> MuonState:
        return MuonState(
            jnp.zeros((), jnp.int32), optax.tree.zeros_like(params, dtype=config.moment_dtype)
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
        if shardings is None:
            updates = jax.tree.map(direction, ahead, sides)
        else:
            updates = jax.tree.map(direction, ahead, sides, shardings)
        return updates, MuonState(step, optax.tree.cast(momentum, config.moment_dtype))

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]  # our own state


def _direction(
    x: Array, sides: Sides, sharding: NamedSharding | None = None, *, eps: float
) -> Array:
    """Momentum float32 [*stacked, *rows, *columns], each of its matrices made orthogonal."""
    size = lambda dims: math.prod(x.shape[i] for i in dims)
    scale = _ADAM_RMS * math.sqrt(max(size(sides.rows), size(sides.columns)))
    orthogonal = functools.partial(_orthogonal, eps=eps)
    if sharding is None or not any(_matrix_axes(x, sides, sharding)):
        shape = (-1, size(sides.rows), size(sides.columns))
        made = jax.vmap(orthogonal)(_stack(x, sides).reshape(shape))
        return scale * _unstack(made, x, sides)
    divided = functools.partial(
        _divided, orthogonal=orthogonal, sides=sides, axes=_matrix_axes(x, sides, sharding)
    )
    spec = sharding.spec
    return scale * jax.shard_map(divided, mesh=sharding.mesh, in_specs=spec, out_specs=spec)(x)


def _orthogonal(x: Array, eps: float) -> Array:
    """A matrix [rows, columns] with its singular values brought to about 1, float32.

    Newton-Schulz steps on the orientation with fewer rows, whose products are the smaller ones.
    """
    if x.shape[0] > x.shape[1]:
        return _orthogonal(x.T, eps).T
    a, b, c = _COEFFICIENTS
    x = x / (jnp.linalg.norm(x) + eps)
    for _ in range(_NUM_ITERATIONS):
        square = x @ x.T
        x = a * x + (b * square + (c * square) @ square) @ x
    return x


def _divided(x: Array, *, orthogonal: Any, sides: Sides, axes: list[tuple[str, ...]]) -> Array:
    """Every matrix of a stack orthogonalised by one of the devices that shard it.

    `x` [*stacked, *rows, *columns] in any order of dims, float32, is this device's slice of the
    stack, and so is the result. `axes` are the mesh axes that split each dim of a matrix, rows
    before columns. Runs inside `jax.shard_map`.
    """
    stack = _stack(x, sides)  # [count, *dims], dims local
    count, *dims = stack.shape
    group = tuple(axis for names in axes for axis in names)
    devices = collectives.group_size(group)
    each = -(-count // devices)
    padded = jnp.pad(stack, [(0, devices * each - count)] + [(0, 0)] * len(dims))
    slices = collectives.all_to_all(padded, group, 0, 0)  # of this device's matrices, by sender

    # [*group, each, *dims] -> [each, *(axes of a dim, the dim)]: a dim's slices lie side by side.
    sizes = [collectives.group_size(axis) for axis in group]
    order, first = [len(sizes)], 0
    for i, names in enumerate(axes):
        order += [*range(first, first + len(names)), len(sizes) + 1 + i]
        first += len(names)
    by_axis = slices.reshape(*sizes, each, *dims).transpose(order)
    rows = math.prod(
        by_axis.shape[1 : 1 + sum(len(names) + 1 for names in axes[: len(sides.rows)])]
    )

    # One matrix at a time: the products of a single one fill a device.
    whole = jax.lax.map(orthogonal, by_axis.reshape(each, rows, -1))

    back = whole.reshape(by_axis.shape).transpose([order.index(i) for i in range(len(order))])
    returned = collectives.all_to_all(back.reshape(padded.shape), group, 0, 0)
    return _unstack(returned[:count], x, sides)


def _matrix_axes(x: Array, sides: Sides, sharding: NamedSharding) -> list[tuple[str, ...]]:
    """The mesh axes that split each dim of the matrices of a leaf [...], rows before columns."""
    entries = [*sharding.spec, *[None] * (x.ndim - len(sharding.spec))]
    return [axes_of(P(entries[i])) for i in sides.rows + sides.columns]


def _stack(x: Array, sides: Sides) -> Array:
    """[...] -> [count, *rows, *columns], the stacked dims as one."""
    order = sides.stacked + sides.rows + sides.columns
    moved = x.transpose(order)
    return moved.reshape(-1, *moved.shape[len(sides.stacked) :])


def _unstack(stack: Array, x: Array, sides: Sides) -> Array:
    """What `_stack` did to `x`, undone: [...], of the shape of `x`."""
    order = sides.stacked + sides.rows + sides.columns
    moved = stack.reshape([x.shape[i] for i in order])
    return moved.transpose(sorted(range(x.ndim), key=lambda i: order[i]))
