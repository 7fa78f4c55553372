"""Statistics of every layer, computed inside the train step.

Norms of gradients, weights and updates come from the arrays of the update. Activations and logits
of attention come from a forward pass of their own, without dropout, which runs at the interval.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.core import collectives
from jaxdist.core.attention.largest_logit import largest_logits
from jaxdist.core.parallel.context import CONTEXT
from jaxdist.core.parallel.pipeline.virtual_stages import LAYERS
from jaxdist.core.types import LAYER_SUM, Array, AttentionMask, Batch, Context, Model, Params, Sums

Statistics = dict[str, dict[str, Array]]
"""Statistic -> parameter (or "layers") -> float32 [num_layers] in model order, or [] without."""


def norms(trees: dict[str, Params], order: Any) -> Statistics:
    """Return the norm of each leaf; of stacked leaves [num_layers, ...] that of each layer.

    `trees` have one structure, leaves are global arrays [...]. `order` is the model index of each
    stored layer, int [num_layers].
    """

    def norm(path: Any, x: Array) -> Array:
        stacked = path[0].key == LAYERS
        squares = jnp.square(x.astype(jnp.float32))
        norms = jnp.sqrt(jnp.sum(squares, axis=tuple(range(int(stacked), x.ndim))))
        return jnp.zeros_like(norms).at[order].set(norms) if stacked else norms

    name = lambda path: jax.tree_util.keystr(path, simple=True, separator="/")
    leaves = jax.tree_util.tree_leaves_with_path
    return {
        kind: {name(path): norm(path, x) for path, x in leaves(tree)}
        for kind, tree in trees.items()
    }


def measured(model: Model, num_rows: int) -> Model:
    """Return a model without head whose blocks return the sums of `from_sums`.

    `num_rows` is the number of rows of the global batch. A row's largest logit has an element of
    its own, because sums over microbatches and devices have no maximum.
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


def make_activations(
    model: Model, evaluate: Callable[[Model], Callable[[Params, Batch], Sums]]
) -> Callable[[Params, Batch], Statistics]:
    """Make (params, batch [rows, ...]) -> RMS of activations and largest logits of each layer.

    `evaluate` makes the forward pass of a model: (params, batch) -> global sums.
    """

    def activations(params: Params, batch: Batch) -> Statistics:
        if model.block is None:
            return {}
        rows = jax.tree.leaves(batch)[0].shape[0]
        sums = evaluate(measured(model, rows))(params, batch)
        sums = {name.removeprefix(LAYER_SUM): value for name, value in sums.items()}
        rms = jnp.sqrt(sums["squares"] / sums["elements"])
        statistics = {"activation_rms": {LAYERS: rms}}
        if "logits" in sums:
            statistics["attention_logit"] = {LAYERS: jnp.max(sums["logits"], axis=1)}
        return statistics

    return activations


def at_interval(
    interval: int, step: Array, measure: Callable[..., Statistics], *arguments: Any
) -> Statistics:
    """Return the statistics after `step` (int32 []) at the interval, else zeros, for no cost."""
    kinds = jax.eval_shape(measure, *arguments)
    zeros = lambda *_: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), kinds)
    return lax.cond((step + 1) % interval == 0, measure, zeros, *arguments)
