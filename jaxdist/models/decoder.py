"""The decoder: Llama, Mistral, Qwen, OLMo, Gemma, GPT-2, gpt-oss, ... from one configurable block.

Query, key and value use one fused weight, [d_model, kv_heads, heads/kv_heads + 2, head_dim]: the
queries of a group, its key, its value. Gate and up are fused too, [d_model, 2, mlp].
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxdist.core.softcap import soft_cap
from jaxdist.core.types import (
    Array,
    AttentionDropout,
    Batch,
    Context,
    Decoding,
    Dims,
    Model,
    Params,
    Routing,
    Sums,
    TokenHead,
)
from jaxdist.models import layers
from jaxdist.models.adapted_weights import complete
from jaxdist.models.configs import DecoderConfig
from jaxdist.models.experts import (
    STEP_SUMS,
    Experts,
    bias_increments,
    join_layers,
    routing_aux,
)
from jaxdist.models.layers import (
    angles_of_layer,
    decoding_aux,
    mask_of_layer,
    positions_of,
    prepare,
)
from jaxdist.models.weights import weights_of
from jaxdist.objectives import TextClassification, cross_entropy

Bind = Callable[[Params], Any]
"""Map the parameters of a part of the model to a module that uses them."""

# Dropout sites, folded into the key so that each site has its own random bits.
_ATTENTION_SITE, _PROBS_SITE, _MLP_SITE = range(3)


def build_decoder(config: DecoderConfig, *, seq_len: int) -> Model:
    """Return the `Model` of a decoder; `seq_len` is the training length, for FLOPs."""
    init_embed, embed_axes, bind_embed = layers.functional(lambda rngs: Embedding(config, rngs))
    num_dense, pattern = config.stack
    make = {
        True: lambda rngs: Block(config, rngs),
        False: lambda rngs: Block(config.dense, rngs, "dense_mlp"),
    }
    kinds = {kind: layers.functional(make[kind]) for kind in {*pattern, num_dense == 0}}
    init_block, block_axes, bind_block = join_layers([kinds[kind] for kind in pattern])
    init_dense, dense_axes, bind_dense = kinds.get(False, kinds[True])
    init_head, head_axes, bind_head = layers.functional(lambda rngs: Head(config, rngs))
    stacked_axes = jax.tree.map(lambda dims: dims.renamed(("layers", *dims)), block_axes)

    def init(key: Array) -> Params:
        """Return float32 parameters; stacked leaves are [layers, ...]."""
        embed_key, head_key, layers_key = jax.random.split(key, 3)
        return {
            "embed": init_embed(embed_key),
            "layers": jax.vmap(init_block)(jax.random.split(layers_key, config.dims["layers"])),
            "head": init_head(head_key),
        } | first_layers(lambda i: init_dense(jax.random.fold_in(layers_key, i)))

    def first_layers(value: Callable[[int], Any]) -> Params:
        """Return the tree of `value(i)` for each dense layer i before the stacked ones, or {}."""
        dense = {str(i): value(i) for i in range(num_dense)}
        return {"first_layers": dense} if dense else {}

    def prepare_aux(batch: Batch, context: Context) -> dict[str, Any]:
        aux = prepare(config, batch, context)
        return aux | (routing_aux(config, batch, context) if config.num_experts else {})

    def embed(params: Params, batch: Batch, context: Context) -> Array:
        """Return x [batch, seq_shard, d_model] after the embedding and the dense first layers."""
        x = bind_embed(params["embed"])(batch, context)
        key, aux = context.dropout_key, prepare_aux(batch, context) if num_dense else {}
        for i in range(num_dense):
            # The embedding uses the index num_layers.
            own = None if key is None else jax.random.fold_in(key, config.num_layers + 1 + i)
            layer_context = dataclasses.replace(context, dropout_key=own, layer=i)
            run = lambda weights, x, used=layer_context: bind_dense(weights)(x, aux, used)[0]
            x = jax.checkpoint(run)(params["first_layers"][str(i)], x)
        return x

    def block(
        params: Params, x: Array, aux: dict[str, Any], context: Context
    ) -> tuple[Array, Sums]:
        return bind_block(params)(x, aux, context)

    def head(params: Params, x: Array, batch: Batch, context: Context) -> tuple[Any, Sums]:
        """Return (`TokenHead` or scores [batch, labels]; {}) of x [batch, seq_shard, d_model]."""
        x = bind_head(params["head"]).norm(x)
        if config.num_labels:
            return _scores(x, params["head"]["score"], batch["weights"], context), {}
        x = context.enter(x)
        kernel = _head_kernel(config, params, context).astype(x.dtype)
        return TokenHead(x, kernel, config.vocab_size, config.logit_softcap), {}

    has_bias = config.num_experts and config.routing.bias
    by_batch = config.num_experts and config.routing.balance_scope == "batch"
    model = Model(
        name="decoder",
        init=init,
        axes={"embed": embed_axes, "layers": stacked_axes, "head": head_axes}
        | first_layers(lambda i: dense_axes),
        dims=config.dims,
        rules=config.rules,
        embed=embed,
        prepare=prepare_aux,
        block=block,
        head=head,
        objective=TextClassification() if config.num_labels else cross_entropy,
        num_layers=config.dims["layers"],
        increments=partial(bias_increments, config) if has_bias else None,
        step_sums=STEP_SUMS if by_batch else (),
        sequence=True,
        context_parallel=config.context_parallel,
        vocab_size=config.vocab_size,
        attention_call=config.attention_call,
        experts_call=config.experts_call,
        decoding=None
        if config.num_labels
        else _make_decoding(config, bind_embed, bind_dense, bind_block, bind_head),
    )
    return dataclasses.replace(model, flops_per_token=_flops_per_token(model, config, seq_len))


def _scores(x: Array, kernel: Array, weights: Array, context: Context) -> Array:
    """Return the scores of the last token of each row, float32 [batch, num_labels].

    x is [batch, seq_shard, d_model], and `weights` [batch, seq] are 0 except at that token.
    """
    is_last = context.split(weights) > 0
    last = jnp.sum(jnp.where(is_last[..., None], x, jnp.zeros_like(x)), axis=1)
    scores = jnp.dot(last, kernel.astype(x.dtype), preferred_element_type=jnp.float32)
    return context.sum(scores, "seq_shard")


def _head_kernel(config: DecoderConfig, params: Params, context: Context) -> Array:
    """Return this device's output kernel [d_model, vocab]; if tied, from the embedding table."""
    if config.tie_embeddings:
        return complete(params["embed"]["table"], context).T
    return complete(params["head"]["kernel"], context)


def _make_decoding(
    config: DecoderConfig, bind_embed: Bind, bind_dense: Bind, bind_block: Bind, bind_head: Bind
) -> Decoding:
    def step(
        params: Params, cache: Any, tokens: Array, positions: Array, context: Context
    ) -> tuple[Array, Any]:
        """Return (logits float32 [batch, n, vocab_size], cache); see `Decoding.step`."""
        embedding = bind_embed(params["embed"])
        real = jnp.maximum(positions, 0)
        x = context.leave(embedding.lookup(tokens, context))
        if config.positions == "learned":
            x = x + embedding.learned(real, context)
        aux = decoding_aux(config, positions, max_len=cache["key"].shape[2])

        def layer(x: Array, one: tuple[Params, Any, Array]) -> tuple[Array, Any]:
            layer_params, layer_cache, index = one
            layer_context = dataclasses.replace(context, layer=index)
            return bind_block(layer_params).decode(x, layer_cache, aux, layer_context)

        (count, pattern), first = config.stack, []
        for i in range(count):
            dense = bind_dense(params["first_layers"][str(i)])
            own = jax.tree.map(lambda c, i=i: c[i], cache)
            x, own = dense.decode(x, own, aux, dataclasses.replace(context, layer=i))
            first.append(jax.tree.map(lambda c: c[None], own))
        each = (len(pattern),) if len(pattern) > 1 else ()
        rest = jax.tree.map(lambda c: c[count:].reshape(-1, *each, *c.shape[1:]), cache)
        indices = jnp.arange(config.dims["layers"])
        x, rest = jax.lax.scan(layer, x, (params["layers"], rest, indices))
        rest = jax.tree.map(lambda r, c: r.reshape(-1, *c.shape[1:]), rest, cache)
        cache = jax.tree.map(lambda *parts: jnp.concatenate(parts), *first, rest) if count else rest
        x = bind_head(params["head"]).norm(x)
        logits = context.dot(
            "batch seq d_model, d_model vocab -> batch seq vocab",
            x,
            _head_kernel(config, params, context),
            out_dtype=jnp.float32,
        )
        return soft_cap(logits[..., : config.vocab_size], config.logit_softcap), cache

    def init_cache(batch: int, max_len: int, dtype: Any) -> dict[str, Array]:
        shape = (config.num_layers, batch, max_len, config.kv_heads, config.head_width)
        return {"key": jnp.zeros(shape, dtype), "value": jnp.zeros(shape, dtype)}

    cache_dims = Dims(("layers", "batch", "cache", "kv_heads", "head_dim"))
    unlimited = config.positions == "rotary"
    return Decoding(
        init_cache=init_cache,
        cache_dims={"key": cache_dims, "value": cache_dims},
        step=step,
        max_len=2**30 if unlimited else config.max_seq_len,
    )


def _flops_per_token(model: Model, config: DecoderConfig, seq_len: int) -> dict[str, float]:
    """Return forward and backward FLOPs per token: 6 per active matrix weight, plus attention.

    "causal" counts S²/2 of attention, "full" S², both less with a window (Chowdhery et al. 2022,
    "PaLM", appendix B). Logits are included, tied or not, without padding.
    """
    used = lambda w: w.size * (config.active_experts if "experts" in w.dims else 1.0)
    in_layers = lambda w: w.is_stacked or w.name.startswith("first_layers")
    products = sum(used(w) for w in weights_of(model) if in_layers(w) and w.is_matrix)
    products += 0 if config.num_labels else config.vocab_size * config.d_model
    keys = [min(seq_len, window or seq_len) for window in config.windows]
    attention = 12.0 * config.num_heads * config.head_width
    # Mean number of keys per query with causal mask and window; S/2 without a window.
    causal = [seen - seen * seen / (2 * seq_len) for seen in keys]
    return {
        "causal": 6.0 * products + attention * sum(causal),
        "full": 6.0 * products + attention * sum(keys),
    }


class Embedding(nnx.Module):
    """Token table, and a position table if positions are learned."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        size = (config.padded_vocab, config.d_model)
        self.table = layers.weight(rngs, size, config.init_std, "vocab", "d_model")
        if config.positions == "learned":
            size = (config.max_seq_len, config.d_model)
            self.positions = layers.weight(rngs, size, config.init_std, "positions", "d_model")
        self.config = config

    def __call__(self, batch: Batch, context: Context) -> Array:
        """Map tokens [batch, seq] to x [batch, seq_shard, d_model]."""
        x = context.leave(self.lookup(batch["tokens"], context))
        if self.config.positions == "learned":
            x = x + self.learned(context.split(positions_of(batch, context)), context)
        if not self.config.dropout or context.dropout_key is None:
            return x
        # Layers use the indices below num_layers, so this key is unique.
        key = jax.random.fold_in(context.dropout_key, self.config.num_layers)
        index = context.split(context.position_ids(batch["tokens"].shape[1])[None])[0]
        return layers.dropout(x, self.config.dropout, key, batch["rows"], index)

    def lookup(self, tokens: Array, context: Context) -> Array:
        """Return partial sums [batch, seq, d_model]; 0 for tokens [batch, seq] of other shards."""
        rows = layers.look_up_tokens(self.table[...], tokens, context)
        if self.config.scale_embeddings:  # the factor is rounded, as in Gemma's code
            rows = rows * jnp.asarray(math.sqrt(self.config.d_model), rows.dtype)
        return rows

    def learned(self, positions: Array, context: Context) -> Array:
        """Return the learned vectors of positions [batch or 1, seq_shard]."""
        return layers.look_up(self.positions[...], positions, context.dtype)


class Block(nnx.Module):
    """Attention and MLP, normed as `norm_placement` states and added to the residual stream."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dim: str = "mlp"):
        if config.norm_placement != "post":
            self.attention_norm, self.mlp_norm = _norm(config), _norm(config)
        if config.norm_placement != "pre":
            self.attention_out_norm, self.mlp_out_norm = _norm(config), _norm(config)
        self.attention = Attention(config, rngs)
        self.mlp = Experts(config, rngs) if config.num_experts else Mlp(config, rngs, dim)
        if width := config.shared_expert_dim:
            self.shared = Mlp(dataclasses.replace(config, mlp_dim=width), rngs, "shared_mlp")
        if config.shared_expert_gate:
            self.shared_gate = layers.weight(
                rngs, (config.d_model, 1), config.init_std, "d_model", None
            )
        self.config = config

    def __call__(self, x: Array, aux: dict[str, Any], context: Context) -> tuple[Array, Sums]:
        """Return the residual stream [batch, seq_shard, d_model] after the layer, and `Sums`."""
        with jax.named_scope("attention"):
            branch = self.attention(context.enter(self._normed("attention_norm", x)), aux, context)
            # Name it after `leave`: the saved value is this device's shard, already reduced.
            branch = checkpoint_name(context.leave(branch), "attention_out")
            branch = self._normed("attention_out_norm", branch)
            x = x + self._drop(branch, _ATTENTION_SITE, aux, context)
        with jax.named_scope("mlp"):
            branch, sums = self._mlp(self._normed("mlp_norm", x), aux, context)
            branch = checkpoint_name(branch, "mlp_out")
            branch = self._normed("mlp_out_norm", branch)
            return x + self._drop(branch, _MLP_SITE, aux, context), sums

    def decode(
        self, x: Array, cache: dict[str, Array], aux: dict[str, Any], context: Context
    ) -> tuple[Array, dict[str, Array]]:
        """Return the residual stream [batch, n, d_model] and the layer's updated cache."""
        before = self._normed("attention_norm", x)
        branch, cache = self.attention.decode(before, cache, aux, context)
        x = x + self._normed("attention_out_norm", context.leave(branch))
        branch, _ = self._mlp(self._normed("mlp_norm", x), aux, context)
        return x + self._normed("mlp_out_norm", branch), cache

    def _mlp(self, x: Array, aux: dict[str, Any], context: Context) -> tuple[Array, Sums]:
        """Return the output of MLP or experts, like x [batch, seq_shard, d_model], and `Sums`."""
        if not isinstance(self.mlp, Experts):
            return context.leave(self.mlp(context.enter(x), context)), {}
        # Route before `enter`, after which sums over tokens would count once per tensor device.
        routing, sums = self.mlp.route(x, aux, context)
        routing, x = Routing(*map(context.enter, routing)), context.enter(x)
        out, rounds = self.mlp(x, routing, context)
        if sums and rounds is not None:
            sums |= self.mlp.rounds_sums(rounds, aux, context)
        if self.config.shared_expert_dim:
            shared = self.shared(x, context)
            if self.config.shared_expert_gate:
                dims = "batch seq d_model, d_model one -> batch seq one"
                shared = shared * jax.nn.sigmoid(context.dot(dims, x, self.shared_gate[...]))
            out = out + shared
        return context.leave(out), sums

    def _normed(self, name: str, x: Array) -> Array:
        """Apply the norm `name` to x [batch, seq_shard, d_model] if the block has it."""
        norm = getattr(self, name, None)
        return x if norm is None else norm(x)

    def _drop(self, x: Array, site: int, aux: dict[str, Any], context: Context) -> Array:
        """Apply dropout to x [batch, seq_shard, d_model] in training."""
        if not self.config.dropout or context.dropout_key is None:
            return x
        key = jax.random.fold_in(context.dropout_key, site)
        return layers.dropout(x, self.config.dropout, key, aux["rows"], aux["index"])


class Attention(nnx.Module):
    """Grouped-query causal attention of this device's heads."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        d, kv, width = config.d_model, config.kv_heads, config.head_width
        group = config.num_heads // kv
        std, out_std = config.init_std, config.init_std / math.sqrt(2 * config.num_layers)
        names = ("kv_heads", None, "head_dim")
        self.qkv = layers.weight(rngs, (d, kv, group + 2, width), std, "d_model", *names)
        self.out = layers.weight(
            rngs, (kv * group, width, d), out_std, "heads", "head_dim", "d_model"
        )
        if "qkv" in config.bias:
            self.qkv_bias = layers.filled(0.0, (kv, group + 2, width), *names)
        if "out" in config.bias:
            self.out_bias = layers.filled(0.0, (d,), "d_model")
        if config.attention_sinks:
            self.sinks = layers.filled(0.0, (config.num_heads,), "heads")
        if config.qk_norm != "none":
            self.query_norm = _heads_norm(config, config.num_heads, "heads")
            self.key_norm = _heads_norm(config, kv, "kv_heads")
        self.config = config

    def __call__(self, x: Array, aux: dict[str, Any], context: Context) -> Array:
        """Map [batch, seq, d_model] to this device's partial sums of the same shape."""
        config = self.config
        mask = mask_of_layer(config, context, segments=aux["segments"])
        dropout = None
        if config.attention_dropout and context.dropout_key is not None:
            key = jax.random.fold_in(context.dropout_key, _PROBS_SITE)
            dropout = AttentionDropout(rate=config.attention_dropout, key=key, rows=aux["rows"])
        heads = self.project(x, aux, context)
        mixed = context.attend(
            *heads,
            mask,
            kernel=config.attention,
            dropout=dropout,
            softcap=config.attention_softcap,
            **self._sink,
        )
        return self.project_out(mixed, context)

    @property
    def _sink(self) -> dict[str, Array]:
        """Return the argument of `Context.attend` with the sinks [heads]; {} without."""
        return {"sink": self.sinks[...]} if self.config.attention_sinks else {}

    def project(
        self, x: Array, aux: dict[str, Any], context: Context
    ) -> tuple[Array, Array, Array]:
        """Map [batch, seq, d_model] to queries, keys and values of this device's heads.

        Queries are [batch, seq, heads, head_dim], keys and values [batch, seq, kv_heads, head_dim].
        """
        qkv = context.dot(
            "batch seq d_model, d_model kv_heads group head_dim"
            " -> batch seq kv_heads group head_dim",
            x,
            self.qkv[...],
        )
        if "qkv" in self.config.bias:
            qkv = qkv + self.qkv_bias[...].astype(x.dtype)
        qkv = checkpoint_name(qkv, "qkv")
        query, key, value = _split_heads(qkv)
        if self.config.qk_norm != "none":
            over = (context,) if self.config.qk_norm == "all" else ()
            query, key = self.query_norm(query, *over), self.key_norm(key, *over)
        if self.config.positions == "rotary":
            angles = angles_of_layer(self.config, aux, context)
            query, key = layers.rotate(query, *angles), layers.rotate(key, *angles)
        if self.config.query_pre_attn_scalar:  # kernels divide by sqrt(head_dim)
            share = self.config.head_width / self.config.query_pre_attn_scalar
            # Bfloat16 would round the factor itself, by up to 0.4 %.
            wide = query.dtype if query.dtype.itemsize > 4 else jnp.float32
            query = (query.astype(wide) * jnp.asarray(math.sqrt(share), wide)).astype(query.dtype)
        return query, key, value

    def project_out(self, mixed: Array, context: Context) -> Array:
        """Map [batch, seq, heads, head_dim] to partial sums [batch, seq, d_model]."""
        dims = "batch seq heads head_dim, heads head_dim d_model -> batch seq d_model"
        out = context.dot(dims, mixed, self.out[...])
        if "out" in self.config.bias:
            out = out + layers.once(self.out_bias[...].astype(mixed.dtype), context)
        return out

    def decode(
        self, x: Array, cache: dict[str, Array], aux: dict[str, Any], context: Context
    ) -> tuple[Array, dict[str, Array]]:
        """Write keys and values of x [batch, n, d_model] to the cache, then attend to the cache.

        Cache leaves are [batch, max_len, kv_heads, head_dim]. Returns partial sums and the cache.
        """
        query, key, value = self.project(x, aux, context)
        rows = jnp.arange(x.shape[0])[:, None]
        write = lambda old, new: old.at[rows, aux["slots"]].set(new.astype(old.dtype), mode="drop")
        cache = {"key": write(cache["key"], key), "value": write(cache["value"], value)}
        mask = mask_of_layer(self.config, context, query_positions=aux["positions"])
        keys = (cache[name].astype(query.dtype) for name in ("key", "value"))
        cap = self.config.attention_softcap
        mixed = context.attend(query, *keys, mask, kernel="xla", softcap=cap, **self._sink)
        return self.project_out(mixed, context), cache


class Mlp(nnx.Module):
    """Gated (Shazeer 2020) or GELU MLP on this device's shard of the width."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs, dim: str = "mlp"):
        d, hidden = config.d_model, config.mlp_dim
        ways = 1 if config.activation == "gelu" else 2
        std, out_std = config.init_std, config.init_std / math.sqrt(2 * config.num_layers)
        self.up = layers.weight(rngs, (d, ways, hidden), std, "d_model", None, dim)
        self.down = layers.weight(rngs, (hidden, d), out_std, dim, "d_model")
        if "mlp" in config.bias:
            self.up_bias = layers.filled(0.0, (ways, hidden), None, dim)
            self.down_bias = layers.filled(0.0, (d,), "d_model")
        self.config = config

    def __call__(self, x: Array, context: Context) -> Array:
        """Map [batch, seq, d_model] to this device's partial sums of the same shape."""
        dims = "batch seq d_model, d_model ways mlp -> batch seq ways mlp"
        up = context.dot(dims, x, self.up[...])
        if "mlp" in self.config.bias:
            up = up + self.up_bias[...].astype(x.dtype)
        hidden = layers.activation(self.config, _split_ways(up, context.platform))
        hidden = checkpoint_name(hidden, "mlp_hidden")
        dims = "batch seq mlp, mlp d_model -> batch seq d_model"
        out = context.dot(dims, hidden, self.down[...])
        if "mlp" in self.config.bias:
            out = out + layers.once(self.down_bias[...].astype(x.dtype), context)
        return out


class Head(nnx.Module):
    """Final norm, and the kernel of scores, or of logits unless it is the embedding table."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.norm = _norm(config)
        if config.num_labels:
            size = (config.d_model, config.num_labels)
            self.score = layers.weight(rngs, size, config.init_std, "d_model", None)
        elif not config.tie_embeddings:
            size = (config.d_model, config.padded_vocab)
            self.kernel = layers.weight(rngs, size, config.init_std, "d_model", "vocab")


def _norm(config: DecoderConfig) -> nnx.Module:
    if config.norm == "layer":
        return layers.LayerNorm(config.d_model, config.norm_eps, "d_model")
    return _rms_norm(config, config.d_model, "d_model")


def _rms_norm(config: DecoderConfig, size: int, dim: str) -> nnx.Module:
    return layers.RMSNorm(size, config.norm_eps, dim, float(config.norm == "zero_centered_rms"))


def _split_heads(qkv: Array) -> tuple[Array, Array, Array]:
    """Split fused [batch, seq, kv_heads, group + 2, head_dim] into queries, keys and values.

    Queries are [batch, seq, heads, head_dim], keys and values [batch, seq, kv_heads, head_dim]. One
    split has a concatenation as gradient; slices would have a sum of padded arrays.
    """
    *rows, kv_heads, parts, width = qkv.shape
    queries = (parts - 2) * width
    flat = qkv.reshape(*rows, kv_heads, parts * width)
    query, key, value = jnp.split(flat, [queries, queries + width], axis=-1)
    return query.reshape(*rows, -1, width), key, value


def _split_ways(up: Array, platform: str) -> list[Array]:
    """Split fused [batch, seq, ways, mlp] into one [batch, seq, mlp] per way.

    XLA:CPU is faster with one split. On XLA:GPU slices are used: their gradient is fused.
    """
    ways = up.shape[2]
    if platform == "cpu":
        return [part[:, :, 0] for part in jnp.split(up, ways, axis=2)]
    return [up[:, :, way] for way in range(ways)]


def _heads_norm(config: DecoderConfig, count: int, dim: str) -> nnx.Module:
    if config.qk_norm == "head":
        return _rms_norm(config, config.head_width, "head_dim")
    return layers.HeadsRMSNorm(count, config.head_width, config.norm_eps, dim)
