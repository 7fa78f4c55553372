"""Record the experts that a router chooses; a batch with the field `routing` replays them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Int

from jaxdist.core.attention import AttentionPlan, make_attend
from jaxdist.core.experts import make_experts
from jaxdist.core.matmul.grouped import make_grouped_dot
from jaxdist.core.types import Array, Batch, Context, Model, Params, Routing


def record_routing(
    model: Model, params: Params, batch: Batch, *, dtype: Any = jnp.float32
) -> Int[Array, "batch seq layers experts_per_token"]:
    """Return the experts of each token, chosen by the router in each layer that has one.

    The result is the field `routing` of a batch that replays the choices, on any mesh. `batch` is a
    training batch without it; the layers compute in `dtype`, sharded as `params` by XLA.
    """
    platform = jax.default_backend()
    run = make_experts(make_grouped_dot(platform))

    @jax.jit
    def record(params: Params, batch: Batch) -> Array:
        """Return the choices [batch, seq, layers, experts_per_token] of an unrolled model."""
        chosen: list[Array] = []

        def experts(x: Array, routing: Routing, *weights: Any) -> tuple[Array, None]:
            chosen.append(routing.experts)
            return run(x, routing, *weights)

        attend = make_attend(AttentionPlan(platform))
        context = Context(dtype=dtype, attend=attend, experts=experts, platform=platform)
        assert model.embed is not None and model.prepare is not None and model.block is not None
        x, aux = model.embed(params, batch, context), model.prepare(batch, context)
        for index in range(model.num_layers):
            weights = jax.tree.map(lambda leaf, i=index: leaf[i], params["layers"])
            x, _ = model.block(weights, x, aux, dataclasses.replace(context, layer=index))
        return jnp.stack(chosen, 2)

    return record(params, batch)
