"""A router and the experts among which it divides the tokens of a layer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxdist.core import collectives
from jaxdist.core.types import (
    LAYER_SUM,
    ROW_SHARE,
    Array,
    Batch,
    Context,
    Params,
    Routing,
    Sums,
    add_sums,
)
from jaxdist.core.weights import CompositeWeight, Parameter
from jaxdist.models import layers
from jaxdist.models.configs import DecoderConfig
from jaxdist.settings import ConfigError

STEP_SUMS = f"{LAYER_SUM}expert_tokens", f"{LAYER_SUM}trained_tokens"
"""Names of the sums of a layer: assignments to each expert, [experts], and weights of tokens."""

_FIRST_SITE = 3  # dropout sites of a layer have smaller numbers
_NEAR = 1e-5  # gap of two scores of which rounding may choose the other
_TINY = 1e-20  # added to sums of scores by which values are divided, as in transformers


def bias_increments(config: DecoderConfig, sums: Sums) -> Params:
    """Return the increments of `selection_bias`, [layers, experts], from the step's sums."""
    counts = sums[STEP_SUMS[0]]
    sign = jnp.sign(jnp.mean(counts, axis=-1, keepdims=True) - counts)
    block = config.stack[1]
    increments = (config.routing.bias_rate * sign).reshape(-1, sum(block), config.num_experts)
    sparse = [str(i) for i, has_experts in enumerate(block) if has_experts]
    of = {n: {"mlp": {"selection_bias": increments[:, i]}} for i, n in enumerate(sparse)}
    return {"layers": of if len(block) > 1 else of["0"]}


class Experts(nnx.Module):
    """MLPs of which a router chooses `experts_per_token` for each token.

    Sources: Shazeer et al. 2017, "Outrageously Large Neural Networks", section 2; Fedus et al.
    2021, "Switch Transformers", section 2.2 (capacity, balance loss); Qiu et al. 2025, "Demons in
    the Detail", section 3 (balance loss of the global batch); Zoph et al. 2022, "ST-MoE", section
    3.2 (router z-loss); DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2 (sigmoid scores, groups,
    bias).
    Deviation: the balance loss is that of each row, averaged by the number of trained tokens, or of
    the global batch, and a capacity is that of each row. None depends on mesh or microbatches.
    """

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        d, hidden, count = config.d_model, config.mlp_dim, config.num_experts
        ways = 1 if config.activation == "gelu" else 2
        std, out_std = config.init_std, config.init_std / math.sqrt(2 * config.num_layers)
        router = jax.random.normal(rngs.params(), (d, count), jnp.float32) * std
        # Rounding would change the choice of experts, so the router computes in float32.
        self.router = nnx.Param(router, dims=Parameter(("d_model", None), keeps_dtype=True))
        if config.routing.bias:
            dims = Parameter((None,), update="increment")
            self.selection_bias = nnx.Param(jnp.zeros(count, jnp.float32), dims=dims)
        names = ("experts", "d_model", None, "mlp")
        self.up = layers.weight(rngs, (count, d, ways, hidden), std, *names)
        self.down = layers.weight(rngs, (count, hidden, d), out_std, "experts", "mlp", "d_model")
        if "router" in config.bias:
            dims = Parameter((None,), keeps_dtype=True)
            self.router_bias = nnx.Param(jnp.zeros(count, jnp.float32), dims=dims)
        if "mlp" in config.bias:
            self.up_bias = layers.filled(0.0, (count, ways, hidden), "experts", None, "mlp")
            self.down_bias = layers.filled(0.0, (count, d), "experts", "d_model")
        self.config = config

    def route(self, x: Array, aux: dict[str, Any], context: Context) -> tuple[Routing, Sums]:
        """Return the `Routing` of x [batch, seq_shard, d_model], and `Sums`, {} in decoding."""
        config = self.config
        logits = jnp.einsum(
            "bsd,de->bse",
            x.astype(jnp.float32),
            self.router[...].astype(jnp.float32),
            precision=lax.Precision.HIGHEST,
        )
        if "router" in config.bias:
            logits = logits + self.router_bias[...].astype(jnp.float32)
        is_softmax = config.routing.scores == "softmax"
        scores = jax.nn.softmax(logits, axis=-1) if is_softmax else jax.nn.sigmoid(logits)
        best, chosen = lax.top_k(
            self._preference(scores), min(config.experts_per_token + 1, config.num_experts)
        )
        chosen = chosen[..., : config.experts_per_token]
        if "routing" in aux:
            chosen = jnp.take(aux["routing"], context.layer, axis=2)
        gap = best[..., config.experts_per_token - 1] - best[..., -1]
        is_near = (gap < _NEAR) & (config.experts_per_token < config.num_experts)
        shares = jnp.take_along_axis(scores, chosen, axis=-1)
        if config.routing.norm_topk:
            shares = shares / (jnp.sum(shares, axis=-1, keepdims=True) + _TINY)
        routing = Routing(chosen.astype(jnp.int32), shares * config.routing.scale)
        flags = {"near_ties": is_near}
        if config.routing.capacity_factor and context.training:
            kept = self._kept(chosen, aux, context)
            # No device has the expert after the last one.
            experts = jnp.where(kept, routing.experts, config.num_experts)
            routing = Routing(experts, jnp.where(kept, routing.shares, 0.0))
            flags["dropped"] = 1 - jnp.mean(kept, axis=-1)
        is_batch = "weights" in aux
        return routing, self._sums(logits, scores, chosen, flags, aux, context) if is_batch else {}

    def _kept(self, chosen: Array, aux: dict[str, Any], context: Context) -> Array:
        """Return bool [batch, seq_shard, choices]: the expert accepts this token of the row."""
        config, index, real = self.config, aux["index"], aux["real"][..., None] > 0
        own = jnp.where(real, chosen, config.num_experts)
        row = _complete_rows(own, index, context, "seq_shard").astype(jnp.int32)
        is_chosen = jax.nn.one_hot(row, config.num_experts, dtype=jnp.int32).sum(-2)
        before = (jnp.cumsum(is_chosen, axis=1) - is_chosen)[:, index]
        mean = config.experts_per_token * row.shape[1] / config.num_experts
        capacity = math.ceil(round(config.routing.capacity_factor * mean, 6))
        return (jnp.take_along_axis(before, chosen, axis=-1) < capacity) & real

    def _preference(self, scores: Array) -> Array:
        """Return the values [batch, seq_shard, experts] of which the highest are chosen."""
        config = self.config
        if config.routing.bias:
            scores = scores + self.selection_bias[...]
        if config.routing.groups == 1:
            return scores
        groups = scores.reshape(*scores.shape[:-1], config.routing.groups, -1)
        best = jnp.sum(lax.top_k(groups, 2)[0], axis=-1)
        chosen = lax.top_k(best, config.routing.groups_per_token)[1]
        is_chosen = jax.nn.one_hot(chosen, config.routing.groups, dtype=jnp.float32).sum(-2) > 0
        return jnp.where(is_chosen[..., None], groups, -jnp.inf).reshape(scores.shape)

    def __call__(self, x: Array, routing: Routing, context: Context) -> tuple[Array, Array | None]:
        """Return partial sums [batch, seq, d_model], and a number of further exchanges or None."""

        def run(x: Array, routing: Routing, up: Any, down: Any) -> tuple[Array, Array | None]:
            kernels = up.astype(x.dtype), down.astype(x.dtype)
            return context.experts(x, routing, *kernels, self._activate, *biases)

        biases: tuple[Array, ...] = ()
        if "mlp" in self.config.bias:
            biases = self.up_bias[...], layers.once(self.down_bias[...], context)
        weights: tuple[Any, Any] = (self.up[...], self.down[...])
        if any(isinstance(w, CompositeWeight) for w in weights):
            run = jax.checkpoint(run)  # backward saves only the stored arrays
        return run(x, routing, *weights)

    def _activate(self, up: Array) -> Array:
        """Return the activation [rows, mlp] of the experts' products [rows, ways, mlp]."""
        hidden = layers.activation(self.config, [up[:, way] for way in range(up.shape[1])])
        return checkpoint_name(hidden, "mlp_hidden")

    def _sums(
        self,
        logits: Array,
        scores: Array,
        chosen: Array,
        flags: dict[str, Array],
        aux: Any,
        context: Context,
    ) -> Sums:
        """Return the router's losses and metrics; logits are [batch, seq_shard, experts].

        `flags` are other metrics of tokens, [batch, seq_shard] each: `near_ties`, if the last
        chosen expert nearly ties with the next, and `dropped`, the share of rejected choices.
        """
        config, count = self.config, self.config.num_experts
        probabilities = scores
        if config.routing.scores == "sigmoid":
            probabilities = scores / (jnp.sum(scores, axis=-1, keepdims=True) + _TINY)
        by_batch = config.routing.balance_scope == "batch"
        add = lambda values: jnp.sum(values, axis=(0, 1) if by_batch else 1)
        real, weights = aux["real"], aux["weights"]
        is_chosen = jax.nn.one_hot(chosen, count, dtype=jnp.float32).sum(-2) * real[..., None]
        sums = {STEP_SUMS[0]: add(is_chosen), STEP_SUMS[1]: add(weights)}
        if by_batch and STEP_SUMS[0] in aux:
            counts, trained = (aux[name][context.layer] for name in STEP_SUMS)
        else:
            counts, trained = context.sum(tuple(sums.values()), "seq_shard")
            if by_batch:
                counts, trained = context.sum((counts, trained), "batch")
        assigned = jnp.maximum(jnp.sum(counts, -1, keepdims=True), 1.0)
        load = counts / assigned
        # Complete values times sums over local tokens: devices that share rows add up.
        mean = add(probabilities * real[..., None]) * (config.experts_per_token / assigned)
        balance = count * jnp.sum(trained[..., None] * load * mean)
        z = jnp.square(jax.nn.logsumexp(logits, axis=-1))
        entropy = -jnp.sum(probabilities * jnp.log(probabilities + _TINY), -1)
        largest = jnp.sum(weights, axis=1) * count * jnp.max(load, -1)
        loss = config.routing.balance_loss * balance + config.routing.z_loss * jnp.sum(z * weights)
        metrics = {
            "balance": balance,
            "router_entropy": jnp.sum(entropy * weights),
            "largest_load": jnp.sum(largest),
            **{name: jnp.sum(flag * weights) for name, flag in flags.items()},
        }
        if not by_batch:
            sums = {name: jnp.sum(value, axis=0) for name, value in sums.items()}
        layer_sums = self._of_layer(sums, context) if context.training else {}
        return {"aux_loss": loss, **self._metrics(metrics, context), **layer_sums}

    def rounds_sums(self, rounds: Array, aux: dict[str, Any], context: Context) -> Sums:
        """Return the metric of `rounds`, int32 []: exchanges of tokens after the first."""
        value = rounds.astype(jnp.float32) * jnp.sum(aux["weights"])
        return self._metrics({"further_rounds": value}, context)

    def _metrics(self, values: Sums, context: Context) -> Sums:
        """Return a layer's scalar sums, divided to add up to means; in training also [layers]."""
        values = lax.stop_gradient(values)
        # The largest load of a layer follows from its counts.
        own = {f"{LAYER_SUM}{name}": x for name, x in values.items() if name != "largest_load"}
        means = {name: x / self._num_layers for name, x in values.items()}
        return means | (self._of_layer(own, context) if context.training else {})

    def _of_layer(self, values: Sums, context: Context) -> Sums:
        """Return arrays [...] as [layers with experts, ...], which are 0 for other layers."""
        own = (jnp.arange(self._num_layers) == context.layer).astype(jnp.float32)
        return jax.tree.map(lambda value: own.reshape(-1, *(1,) * value.ndim) * value, values)

    @property
    def _num_layers(self) -> int:
        return self.config.num_layers - len(self.config.dense_layers)


def routing_aux(config: DecoderConfig, batch: Batch, context: Context) -> dict[str, Array]:
    """Return `weights` and `real` (0 = padding of packed rows), float32 [batch, seq_shard] each.

    The sum of the weights is that of the objective. If it counts complete rows, a row's tokens have
    equal weights up to the last one that the objective uses; later ones are not `real`.
    If the batch has them, also the totals of `STEP_SUMS`, float32 [layers with experts, ...], and
    recorded choices `routing`, int32 [batch, seq_shard, layers with experts, experts_per_token].
    """
    weights = batch["weights"].astype(jnp.float32)
    real = (batch["segments"] > 0) if "segments" in batch else jnp.ones_like(weights, bool)
    totals = {name: batch[name][0] for name in STEP_SUMS if name in batch}
    if ROW_SHARE in batch:
        # A score is computed at the token with a weight, and the target is the token after it.
        index = context.position_ids(weights.shape[1])
        row = _complete_rows(weights > 0, index, context, "seq")
        after = 1 if config.num_labels else 2
        last = jnp.max(jnp.where(row > 0, jnp.arange(row.shape[1]), -after), axis=1, keepdims=True)
        count = jnp.minimum(last + after, row.shape[1])
        real = index < count
        weights = real * batch[ROW_SHARE][:, None] / jnp.maximum(count, 1)
    real = real.astype(jnp.float32)
    if "routing" in batch:
        shape = (config.num_layers - len(config.dense_layers), config.experts_per_token)
        if batch["routing"].shape[2:] != shape:
            raise ConfigError(
                f"routing of a batch is {list(batch['routing'].shape)}: it must be [batch, seq, "
                f"{shape[0]} layers with experts, {shape[1]} experts per token]. Record it with "
                "jaxdist.core.routing.record_routing on a model of this size."
            )
        totals["routing"] = context.split(batch["routing"])
    return {"weights": context.split(weights), "real": context.split(real), **totals}


def _complete_rows(
    own: Array, index: Array, context: Context, over: Literal["seq", "seq_shard"]
) -> Array:
    """Return complete rows, float32 [batch, seq, ...], of a device's positions `index`, [n].

    `own` are their values, [batch, n, ...]. Devices that share rows over `over` add theirs.
    """
    own = own.astype(jnp.float32)
    shape = (own.shape[0], own.shape[1] * context.sum(1, over), *own.shape[2:])
    zeros = collectives.vary(jnp.zeros(shape), tuple(collectives.varying_axes(own)))
    return context.sum(zeros.at[:, index].set(own), over)


def join_layers(kinds: Sequence[tuple[Any, Params, Any]]) -> tuple[Any, Params, Any]:
    """Return (init, axes, bind) of the block of layers that repeats: of one layer, or `_Layers`."""
    if len(kinds) == 1:
        return kinds[0]
    named = {str(i): kind for i, kind in enumerate(kinds)}

    def init(key: Array) -> Params:
        """Return the parameters of one block of layers, each [*dims]."""
        return {n: kind[0](jax.random.fold_in(key, int(n))) for n, kind in named.items()}

    bind = lambda params: _Layers([kind[2](params[n]) for n, kind in named.items()])
    return init, {n: kind[1] for n, kind in named.items()}, bind


class _Layers:
    """Layers with and without experts that run as one block."""

    def __init__(self, blocks: Sequence[Any]):
        self.blocks = blocks

    def __call__(self, x: Array, aux: dict[str, Any], context: Context) -> tuple[Array, Sums]:
        """Return the residual stream [batch, seq_shard, d_model] after the layers, and `Sums`."""
        sparse = [isinstance(block.mlp, Experts) for block in self.blocks]
        total: Sums = {}
        for i, block in enumerate(self.blocks):
            key = context.dropout_key
            own = dataclasses.replace(
                context,
                layer=context.layer * sum(sparse) + sum(sparse[:i]),  # among those with experts
                dropout_key=None if key is None else jax.random.fold_in(key, _FIRST_SITE + i),
            )
            x, sums = block(x, aux, own)
            total = add_sums(total, sums)
        return x, total

    def decode(
        self, x: Array, cache: dict[str, Array], aux: dict[str, Any], context: Context
    ) -> tuple[Array, dict[str, Array]]:
        """Run `decode` of each layer; cache leaves are [layers, batch, max_len, ...]."""
        caches = []
        for i, block in enumerate(self.blocks):
            own = {name: leaf[i] for name, leaf in cache.items()}
            x, own = block.decode(x, own, aux, context)
            caches.append(own)
        return x, jax.tree.map(lambda *leaves: jnp.stack(leaves), *caches)
