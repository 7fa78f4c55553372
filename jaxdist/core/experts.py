"""Products of tokens with the experts that a router chose for them.

An *assignment* is one choice of one token, with index token · experts_per_token + choice. Rows of
activations are moved by gathers in both directions, never by additions to scattered places. The
outputs of a token's experts are added in float32, in the order of the choices.

Source: Gale et al. 2022, "MegaBlocks: Efficient Sparse Training with Mixture-of-Experts", section 4
(no token is dropped). Deviation: blocks have rows of one expert and are not padded in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jaxdist.core import collectives
from jaxdist.core.types import Array, Routing

Activate: TypeAlias = Callable[[Array], Array]
"""The activation function of an expert: [rows, ways, mlp] -> [rows, mlp]."""

GroupedDot: TypeAlias = Callable[[Array, Array, Array], Array]
"""The type of `matmul.grouped.make_grouped_dot`'s results."""


def make_experts(grouped_dot: GroupedDot) -> Callable[..., tuple[Array, None]]:
    """Make `Context.experts` for devices that have all experts.

    Returns (x [batch, seq, d_model], routing, up [experts, d_model, ways, mlp], down [experts, mlp,
    d_model], activate) -> ([batch, seq, d_model], None). The first are partial sums if `mlp` is
    split over devices; in place of None, an exchange returns the number of its further rounds. Two
    optional arguments are biases of the products, [experts, ways, mlp] and [experts, d_model].
    """

    def experts(
        x: Array, routing: Routing, up: Array, down: Array, activate: Activate, *biases: Array
    ) -> tuple[Array, None]:
        """Return each token's sum over its experts of share · output, [batch, seq, d_model]."""
        tokens, chosen, shares = flatten(x, routing)
        order = order_by_expert(chosen.reshape(-1))
        rows = inverse(order).reshape(chosen.shape)
        sizes = count(chosen, up.shape[0])
        inputs = take(tokens, order, rows)
        outputs = run_sorted(grouped_dot, inputs, sizes, activate, up, down, *biases)
        return combine(outputs, shares, order, rows).astype(x.dtype).reshape(x.shape), None

    return experts


def run_sorted(
    grouped_dot: GroupedDot, rows: Array, sizes: Array, activate: Activate, *weights: Array
) -> Array:
    """Return the outputs [rows, d_model] of rows [rows, d_model] from their experts.

    Rows are sorted by expert; `sizes`, int32 [experts], counts those of each. `weights` are up,
    down and optional biases, as in `make_experts`.
    """
    up, down, *biases = weights
    num_experts, _, ways, mlp = up.shape
    of_up, of_down = biases or (None, None)

    def dot(x: Array, kernel: Array, bias: Array | None) -> Array:
        """Return each row's product with its expert's kernel, [rows, out], plus the bias."""
        out = grouped_dot(x, kernel.reshape(num_experts, x.shape[1], -1), sizes)
        if bias is None:
            return out
        # A product with 1: its gradient adds up in a fixed order, that of a gather would scatter.
        ones = jnp.ones((x.shape[0], 1), x.dtype)
        return out + grouped_dot(ones, bias.reshape(num_experts, 1, -1).astype(x.dtype), sizes)

    hidden = dot(rows, up, of_up).reshape(-1, ways, mlp)
    return dot(activate(hidden), down, of_down)


def flatten(x: Array, routing: Routing) -> tuple[Array, Array, Array]:
    """Return x as [tokens, d_model], and experts and shares as [tokens, experts_per_token]."""
    per_token = routing.experts.shape[-1]
    flat = (part.reshape(-1, per_token) for part in routing)
    return (x.reshape(-1, x.shape[-1]), *flat)  # type: ignore[return-value]


def count(chosen: Array, num_experts: int) -> Int[Array, " experts"]:
    """Return the number of entries of `chosen`, int32 [tokens, ...], for each expert."""
    is_chosen = chosen.reshape(-1, 1) == jnp.arange(num_experts, dtype=chosen.dtype)
    # The audit would treat a sum over local tokens as an incomplete sum over all tokens.
    return collectives.mark_device_local(jnp.sum(is_chosen, 0, dtype=jnp.int32))


def order_by_expert(chosen: Int[Array, " rows"]) -> Int[Array, " rows"]:
    """Return the indices that sort assignments by `chosen`, the expert of each (stable)."""
    order = jnp.argsort(chosen, stable=True).astype(jnp.int32)
    # JAX gives the result of argsort the type of an array that is equal on all devices.
    return collectives.vary(order, tuple(collectives.varying_axes(chosen)))


def inverse(order: Int[Array, " rows"]) -> Int[Array, " rows"]:
    """Return the inverse of the permutation `order`: the index in `order` of each number."""
    zeros = collectives.zeros_like(order)
    index = jnp.arange(order.shape[0], dtype=order.dtype)
    return zeros.at[order].set(index, unique_indices=True)


@jax.custom_vjp
def take(
    x: Float[Array, "tokens d_model"],
    source: Int[Array, " rows"],
    rows: Int[Array, "tokens experts_per_token"],
) -> Float[Array, "rows d_model"]:
    """Return x of the token of each assignment in `source`, 0 for -1; `rows` is its inverse."""
    tokens = x[jnp.maximum(source, 0) // rows.shape[1]]
    return jnp.where((source >= 0)[:, None], tokens, 0)


def _take_backward(rows: Array, grad: Array) -> tuple[Array, None, None]:
    """Return the gradient of x [tokens, d_model], summed over its rows in float32."""
    total = sum(part.astype(jnp.float32) for part in _rows_of(grad, rows))
    return jnp.asarray(total).astype(grad.dtype), None, None


take.defvjp(lambda x, source, rows: (take(x, source, rows), rows), _take_backward)


@jax.custom_vjp
def combine(
    y: Float[Array, "rows d_model"],
    shares: Float[Array, "tokens experts_per_token"],
    source: Int[Array, " rows"],
    rows: Int[Array, "tokens experts_per_token"],
) -> Float[Array, "tokens d_model"]:
    """Return each token's float32 sum of shares · y; `source` and `rows` as in `take`."""
    parts = enumerate(_rows_of(y, rows))
    return jnp.asarray(sum(part.astype(jnp.float32) * shares[:, i : i + 1] for i, part in parts))


def _combine_backward(saved: Any, grad: Array) -> tuple[Array, Array, None, None]:
    """Return the gradients of y [rows, d_model] and shares [tokens, experts_per_token]."""
    y, shares, source, rows = saved
    assignment = jnp.maximum(source, 0)
    factors = shares.reshape(-1)[assignment][:, None]
    dy = jnp.where((source >= 0)[:, None], grad[assignment // rows.shape[1]] * factors, 0)
    parts = [jnp.sum(part.astype(jnp.float32) * grad, -1) for part in _rows_of(y, rows)]
    return dy.astype(y.dtype), jnp.stack(parts, -1), None, None


combine.defvjp(lambda *inputs: (combine(*inputs), inputs), _combine_backward)


def _rows_of(y: Array, rows: Array) -> list[Array]:
    """Return the rows of y at `rows`, 0 for -1: for each choice, an array [tokens, d_model]."""
    parts = (rows[:, i] for i in range(rows.shape[1]))
    return [jnp.where((part >= 0)[:, None], y[jnp.maximum(part, 0)], 0) for part in parts]
