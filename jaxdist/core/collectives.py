"""Collectives over a mesh axis, for use inside `jax.shard_map`.

A collective takes the mesh axis (or axes, slow to fast). Its docstring gives the bytes that a
device sends, if the group has n devices with an array of B bytes each. Arrays are local, keep their
dtype, and have any shape. Functions are differentiable unless stated otherwise. `vary` declares
that a value may differ between devices of an axis ("varying" in JAX); a reduction ends this.
"""

from __future__ import annotations

import math
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Shaped

from jaxdist.core.types import Array

Axes: TypeAlias = str | tuple[str, ...]
Tree = TypeVar("Tree")
Same: TypeAlias = Shaped[Array, "*dims"]
"""An array of any shape; results have the shape of the argument."""


def group_size(axes: Axes) -> int:
    """Return the number of devices in the group that `axes` spans."""
    return math.prod(lax.axis_size(axis) for axis in _names(axes))


def group_index(axes: Axes) -> Array:
    """Return this device's index in its group, int32 []; the first axis is the slowest."""
    return lax.axis_index(_names(axes))


def varying_axes(x: Array | jax.ShapeDtypeStruct) -> frozenset[str]:
    """Return the mesh axes over which `x` [*dims] may differ between devices."""
    # Arrays and the structs of `eval_shape` have different names for it.
    if isinstance(x, jax.ShapeDtypeStruct):
        manual = x.manual_axis_type
        return frozenset(manual.varying if manual is not None else ())
    return frozenset(jax.typeof(x).mat.varying)


def vary(tree: Tree, axes: Axes) -> Tree:
    """Return the tree, with every leaf [...] declared to differ over `axes`; no communication.

    The gradient of the argument is summed over those of `axes` over which it did not vary.
    """

    def leaf(x: Array) -> Array:
        missing = tuple(axis for axis in _names(axes) if axis not in varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(leaf, tree)


OWN_VALUE = "own_value"
"""Name of values marked by `mark_device_local` in a traced program."""


def mark_device_local(tree: Tree) -> Tree:
    """Declare for the audit that every leaf [...] is intentionally device-local; sends nothing."""
    return jax.tree.map(lambda x: checkpoint_name(x, OWN_VALUE), tree)


TOKEN_VALUES = "token_values"
"""Name of values marked by `per_token` in a traced program."""


def per_token(x: Array) -> Array:
    """Declare for the mesh audit that x [batch, seq, ...] is split like the tokens of the batch."""
    return checkpoint_name(x, TOKEN_VALUES)


def zeros_like(x: Array | jax.ShapeDtypeStruct, *lead: int) -> Array:
    """Return zeros [*lead, *shape of x] that have its dtype and vary over the same axes."""
    return vary(jnp.zeros((*lead, *x.shape), x.dtype), tuple(varying_axes(x)))


def all_reduce(x: Same, axes: Axes, op: str = "sum") -> Same:
    """Return the sum (or "max", "min", "mean") of x over the group, on every device.

    Sends 2·B·(n−1)/n bytes. "max" and "min" are not differentiable.
    """
    reductions = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin, "mean": lax.pmean}
    if op not in reductions:
        raise ValueError(f"all_reduce op={op!r} is unknown. Use {', '.join(reductions)}.")
    return reductions[op](x, _names(axes))


def all_gather(x: Array, axes: Axes, dim: int = 0) -> Array:
    """Concatenate arrays in group order: [..., d, ...] -> [..., n·d, ...]. Sends B·(n−1) bytes."""
    return lax.all_gather(x, _names(axes), axis=dim, tiled=True)


def reduce_scatter(x: Array, axes: Axes, dim: int = 0) -> Array:
    """Sum; keep this device's part: [..., d, ...] -> [..., d/n, ...]. Sends B·(n−1)/n bytes."""
    size = group_size(axes)
    if x.shape[dim] % size:
        raise ValueError(
            f"reduce_scatter over {axes} needs dim {dim} of {x.shape} divisible by {size}."
        )
    return lax.psum_scatter(x, _names(axes), scatter_dimension=dim, tiled=True)


def all_to_all(x: Array, axes: Axes, split_dim: int, concat_dim: int, group: int = 0) -> Array:
    """Send part i of `split_dim` to device i, and concatenate received parts along `concat_dim`.

    [..., s, ..., c, ...] -> [..., s/n, ..., n·c, ...], among n = `group` neighbors of the axis; 0 =
    all. Sends B·(n−1)/n bytes.
    """
    size, groups = group_size(axes), None
    if group and group != size:
        groups = [list(range(first, first + group)) for first in range(0, size, group)]
    return lax.all_to_all(
        x, axes, split_axis=split_dim, concat_axis=concat_dim, tiled=True, axis_index_groups=groups
    )


def permute(x: Same, axis: str, shift: int = 1) -> Same:
    """Send x `shift` positions along the ring; return the array that arrives. Sends B bytes."""
    size = lax.axis_size(axis)
    return lax.ppermute(x, axis, [(i, (i + shift) % size) for i in range(size)])


def permute_in_pairs(x: Same, axis: str, shift: int) -> Same:
    """Return the result of `permute` from exchanges in pairs, for code that only some devices run.

    A permute waits for every device of the mesh; an exchange waits only for its pair. The ring must
    have even length, and `shift` be above 0. Sends B bytes on a ring of two, else 2·B.
    """
    size = lax.axis_size(axis)
    length = size // shift
    if size % (2 * shift):
        raise ValueError(
            f"permute_in_pairs by {shift} over {axis!r} needs an even ring, not {length}."
        )
    position = lax.axis_index(axis) // shift
    nothing, received = jnp.zeros_like(x), []
    for parity in range(1 if length == 2 else 2):
        pairs = [[i, (i + shift) % size] for i in range(size) if i // shift % 2 == parity]
        is_first = position % 2 == parity
        # On a ring of two, each device is the next one of the other.
        sends = (length == 2) | is_first
        sent = jnp.where(sends, x, nothing)
        slots = jnp.stack([jnp.where(is_first, nothing, sent), jnp.where(is_first, sent, nothing)])
        from_first, from_second = lax.all_to_all(slots, axis, 0, 0, axis_index_groups=pairs)
        received.append(jnp.where(is_first, from_second, from_first))
    return sum(received[1:], start=received[0])


def _names(axes: Axes) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes)
