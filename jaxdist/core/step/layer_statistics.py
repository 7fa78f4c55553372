"""Statistics of every layer, computed inside the train step.

Norms come from the arrays of the update. Activations and logits of attention come from a forward
pass without dropout at the interval; in other steps they are 0.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import keystr, tree_leaves_with_path
from jaxtyping import Float

from jaxdist.core import collectives
from jaxdist.core.attention.blockwise import KV, Q, Span, visible_in_layer
from jaxdist.core.attention.context_parallel import gather_keys, gathered_spans
from jaxdist.core.collective_order import after
from jaxdist.core.parallel.context import CONTEXT
from jaxdist.core.parallel.pipeline.virtual_stages import LAYERS
from jaxdist.core.parallel.tensor import TENSOR
from jaxdist.core.state import TrainState
from jaxdist.core.types import LAYER_SUM, Array, AttentionMask, Batch, Context, Model, Params, Sums

Statistics = dict[str, dict[str, Array]]
"""Statistic -> parameter (or "layers") -> float32 [num_layers] in model order, or []."""


def make_measure(
    model: Model,
    evaluate: Callable[[Model], Callable[[Params, Batch], Sums]],
    positions: Any,
    interval: int,
) -> Callable[[TrainState, Batch, Params, Params, Sums], Statistics]:
    """Make (state, batch [rows, ...], gradients, new parameters, metrics) -> statistics.

    `evaluate` makes a model's forward pass: (params, batch) -> global sums. `positions` is the
    index of each layer among the stored ones, int [num_layers]. Norms are of leaves with
    update="gradient".
    """
    dims = dict(tree_leaves_with_path(model.axes))

    def norm(path: Any, x: Array) -> Array:
        stacked = path[0].key == LAYERS
        norms = jnp.sqrt(jnp.sum(jnp.square(x), axis=tuple(range(int(stacked), x.ndim))))
        return norms[positions] if stacked else norms

    def activations(params: Params, batch: Batch) -> Statistics:
        rows = jax.tree.leaves(batch)[0].shape[0]
        sums = evaluate(measured(model, rows))(params, batch)
        rms = jnp.sqrt(sums[f"{LAYER_SUM}squares"] / sums[f"{LAYER_SUM}elements"])
        rows_max = sums.get(f"{LAYER_SUM}logits")
        logits = {} if rows_max is None else {"attention_logit": {LAYERS: jnp.max(rows_max, 1)}}
        return {"activation_rms": {LAYERS: rms}, **logits}

    def measure(
        state: TrainState, batch: Batch, grads: Params, params: Params, metrics: Sums
    ) -> Statistics:
        update = jax.tree.map(jnp.subtract, params, state.params)
        trees = {"grad_norm": grads, "weight_norm": state.params, "update_norm": update}
        norms = {
            kind: {
                keystr(path, simple=True, separator="/"): norm(path, x)
                for path, x in tree_leaves_with_path(tree)
                if dims[path].update == "gradient"
            }
            for kind, tree in trees.items()
        }
        if model.block is None:
            return norms
        kinds = jax.eval_shape(activations, state.params, batch)
        zeros = lambda *_: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), kinds)
        # After everything else: see `core/collective_order.py`. XLA knows that norms are not
        # negative, and would not wait for them; minus 1 hides it.
        done = [x - 1 for x in jax.tree.leaves((norms, metrics)) if x.dtype != bool]
        now = after((state.step + 1) % interval == 0, done)
        return norms | lax.cond(now, activations, zeros, state.params, batch)

    return measure


def measured(model: Model, num_rows: int) -> Model:
    """Return a model without head whose blocks sum squares, elements and logits of each layer.

    The largest logit of each of `num_rows` rows of the global batch has an element of its own,
    because sums over microbatches and devices have no maximum.
    """
    block, prepare = model.block, model.prepare or (lambda batch, context: batch)
    assert block is not None

    @functools.wraps(block)
    def measure(params: Params, x: Array, aux: Any, context: Context) -> tuple[Array, Sums]:
        """Return (x [batch, seq_shard, d_model], sums [num_layers, ...])."""
        aux, rows = aux
        logits: list[Array] = []

        def attend(query: Array, key: Array, value: Array, mask: AttentionMask, **more: Any) -> Any:
            logits.append(largest_logits(query, key, mask))
            return context.attend(query, key, value, mask, **more)

        y, _ = block(params, x, aux, dataclasses.replace(context, attend=attend))
        squares = jnp.sum(jnp.square(y.astype(jnp.float32)))
        sums = {"squares": squares, "elements": collectives.zeros_like(squares) + y.size}
        if logits:
            largest = functools.reduce(jnp.maximum, logits)
            largest = jnp.where(jnp.isfinite(largest), largest, 0.0)
            if CONTEXT.name in collectives.varying_axes(y):  # count rows that devices share once
                largest = jnp.where(collectives.group_index(CONTEXT.name) == 0, largest, 0.0)
            zeros = collectives.vary(jnp.zeros(num_rows), tuple(collectives.varying_axes(largest)))
            sums["logits"] = zeros.at[rows].set(largest)
        one_hot = (jnp.arange(model.num_layers) == context.layer).astype(jnp.float32)
        own = lambda x: one_hot.reshape(-1, *(1,) * x.ndim) * x
        return y, {f"{LAYER_SUM}{name}": own(value) for name, value in sums.items()}

    return dataclasses.replace(
        model,
        block=measure,
        prepare=lambda batch, context: (prepare(batch, context), batch["rows"]),
        head=lambda params, x, batch, context: (None, {}),
        objective=lambda output, batch, context: {},
    )


_MOST_SCORES = 2**26  # in memory at once, float32


def largest_logits(query: Q, key: KV, mask: AttentionMask) -> Float[Array, " batch"]:
    """Return the maximum of query · key / √head_dim over all heads and visible pairs, uncapped."""
    if CONTEXT.name in collectives.varying_axes(query):
        queries, keys = gathered_spans(query, mask.segments)
        key = gather_keys(key)
    else:
        queries = keys = Span(jnp.arange(query.shape[1])[None], mask.segments)
    batch, length, heads, head_dim = query.shape
    grouped = query.reshape(batch, length, key.shape[2], -1, head_dim)
    scores = batch * heads * length * key.shape[1]
    fitting = (n for n in range(1, length) if not length % n and scores <= n * _MOST_SCORES)
    parts = next(fitting, length)

    def part(index: Array) -> Float[Array, " batch"]:
        """Return the largest logits of one part of the queries; index is int32 []."""
        cut = lambda x: lax.dynamic_slice_in_dim(x, index * (length // parts), length // parts, 1)
        logits = jnp.einsum(
            "bqhgd,bkhd->bhgqk", cut(grouped), key, preferred_element_type=jnp.float32
        )
        seen = visible_in_layer(mask, jax.tree.map(cut, queries), keys)
        return jnp.max(jnp.where(seen[:, None, None], logits, -jnp.inf), axis=(1, 2, 3, 4))

    largest = jnp.max(lax.map(part, jnp.arange(parts)), axis=0) / math.sqrt(head_dim)
    axes = {TENSOR.name, CONTEXT.name} & collectives.varying_axes(largest)
    return collectives.all_reduce(largest, tuple(sorted(axes)), "max") if axes else largest
