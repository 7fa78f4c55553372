"""A hand-written train step for one device: the baseline that jaxdist is compared with.

It has no mesh, modules or config: a decoder (RMSNorm, rotary, grouped-query attention, SwiGLU,
untied head) over a list of layers, float32 master weights, explicit AdamW, one donated `jit`. For
CPU it uses the fastest known form: fused query/key/value and gate/up products, unrolled layers,
heads folded into the batch, and rotary tables as constants. Attention is tiled over queries, skips
keys above the diagonal, and recomputes probabilities in backward. Weight gradients transpose the
narrower input. With a large vocabulary the head and its gradients are computed in chunks of tokens.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

CHUNK = 256  # tokens


class Shape(NamedTuple):
    """Sizes of the decoder and of the rows of a batch."""

    vocab: int
    d_model: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    mlp: int
    seq: int


def init(shape: Shape, key):
    """Return float32 parameters with a list of layers."""
    head_dim = shape.d_model // shape.num_heads
    qkv = (shape.num_heads + 2 * shape.num_kv_heads) * head_dim
    keys = iter(jax.random.split(key, 4 * shape.num_layers + 2))
    draw = lambda *size: 0.02 * jax.random.normal(next(keys), size, jnp.float32)
    layers = [
        {
            "norm1": jnp.ones(shape.d_model),
            "qkv": draw(shape.d_model, qkv),
            "out": draw(shape.num_heads * head_dim, shape.d_model),
            "norm2": jnp.ones(shape.d_model),
            "up": draw(shape.d_model, 2 * shape.mlp),
            "down": draw(shape.mlp, shape.d_model),
        }
        for _ in range(shape.num_layers)
    ]
    return {
        "embed": draw(shape.vocab, shape.d_model),
        "layers": layers,
        "norm": jnp.ones(shape.d_model),
        "head": draw(shape.d_model, shape.vocab),
    }


def _norm(x, scale):
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)
    return (wide * scale).astype(x.dtype)


def _turn(x, cos, sin):
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


TILE = 128  # queries per tile; a tile uses the keys up to its last query


def _scores(q, k, start):
    """Return masked scores of the query tile at `start`: [n, group, queries, visible keys]."""
    stop = min(start + TILE, q.shape[2])
    scores = _product("ngqd,nkd->ngqk", q[:, :, start:stop], k[:, :stop])
    seen = np.arange(start, stop)[:, None] >= np.arange(stop)
    return jnp.where(seen, scores / math.sqrt(q.shape[-1]), -jnp.inf), slice(start, stop)


_product = partial(jnp.einsum, preferred_element_type=jnp.float32)


@jax.custom_vjp
def _tiled(q, k, v):
    """Compute causal attention of q [n, group, seq, head_dim] to k and v [n, seq, head_dim]."""
    return _tiled_forward(q, k, v)[0]


def _tiled_forward(q, k, v):
    outs, lses = [], []
    for start in range(0, q.shape[2], TILE):
        scores, tile = _scores(q, k, start)
        top = jnp.max(scores, -1, keepdims=True)
        probs = jnp.exp(scores - top)
        weight = jnp.sum(probs, -1, keepdims=True)
        outs.append(_product("ngqk,nkd->ngqd", probs.astype(v.dtype), v[:, : tile.stop]) / weight)
        lses.append(top + jnp.log(weight))
    out = jnp.concatenate(outs, 2).astype(q.dtype)
    return out, (q, k, v, out, jnp.concatenate(lses, 2))


def _tiled_backward(saved, cotangent):
    """Compute with scores as [n, keys, group, queries], so that no product transposes them."""
    q, k, v, out, lse = saved
    delta = jnp.sum(out.astype(jnp.float32) * cotangent, -1)
    dq, dk, dv = [], 0.0, 0.0
    for start in range(0, q.shape[2], TILE):
        stop = min(start + TILE, q.shape[2])
        mine = lambda x, a=start, b=stop: x[:, :, a:b]
        scores = _product("nkd,ngqd->nkgq", k[:, :stop], mine(q)) / math.sqrt(q.shape[-1])
        seen = (np.arange(start, stop) >= np.arange(stop)[:, None])[:, None]
        below = jnp.where(seen, scores - mine(lse)[..., 0][:, None], -jnp.inf)
        probs = jnp.exp(below)
        dprobs = _product("nkd,ngqd->nkgq", v[:, :stop], mine(cotangent))
        dscores = probs * (dprobs - mine(delta)[:, None]) / math.sqrt(q.shape[-1])
        dscores, probs = dscores.astype(q.dtype), probs.astype(q.dtype)
        dq.append(jnp.moveaxis(_product("nkd,nkgq->ndgq", k[:, :stop], dscores), 1, 3))
        grow = lambda x, new, old=start: new + jnp.pad(x, ((0, 0), (0, new.shape[1] - old), (0, 0)))
        part_k = _product("nkgq,ngqd->nkd", dscores, mine(q))
        part_v = _product("nkgq,ngqd->nkd", probs, mine(cotangent))
        dk, dv = (grow(dk, part_k), grow(dv, part_v)) if start else (part_k, part_v)
    return jnp.concatenate(dq, 2).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


_tiled.defvjp(_tiled_forward, _tiled_backward)


def _attend_in_tiles(q, k, v):
    """Compute causal attention; q is [batch, seq, heads, head_dim], k and v have kv heads."""
    batch, seq, heads, head_dim = q.shape
    fold = lambda x: jnp.swapaxes(x, 1, 2).reshape(batch * k.shape[2], -1, seq, head_dim)
    mixed = _tiled(fold(q), fold(k)[:, 0], fold(v)[:, 0])
    return jnp.swapaxes(mixed.reshape(batch, heads, seq, head_dim), 1, 2)


@jax.custom_vjp
def _linear(x, w):
    """Multiply [batch, seq, inner] by [inner, outer], with a backward that is fast on CPUs."""
    return x @ w


def _linear_backward(saved, g):
    x, w = saved
    rows, pulled = x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1])
    if w.shape[0] <= w.shape[1]:
        dw = jax.lax.optimization_barrier(rows.T) @ pulled
    else:
        dw = jax.lax.optimization_barrier(pulled.T @ rows).T
    return g @ w.T, dw


_linear.defvjp(lambda x, w: (x @ w, (x, w)), _linear_backward)


def _layer(p, x, shape, cos, sin, kernel):
    batch, seq, d = x.shape
    multiply = _linear if kernel == "xla" else jnp.matmul
    head_dim = d // shape.num_heads
    heads, kv = shape.num_heads, shape.num_kv_heads
    qkv = multiply(_norm(x, p["norm1"]), p["qkv"].astype(x.dtype))
    q, k, v = jnp.split(qkv, [heads * head_dim, (heads + kv) * head_dim], -1)
    q = _turn(q.reshape(batch, seq, heads, head_dim), cos, sin)
    k = _turn(k.reshape(batch, seq, kv, head_dim), cos, sin)
    v = v.reshape(batch, seq, kv, head_dim)
    if kernel == "xla":
        mixed = _attend_in_tiles(q, k, v)
    else:
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=kernel)
    x = x + multiply(mixed.reshape(batch, seq, -1), p["out"].astype(x.dtype))
    gate, up = jnp.split(multiply(_norm(x, p["norm2"]), p["up"].astype(x.dtype)), 2, -1)
    return x + multiply(jax.nn.silu(gate) * up, p["down"].astype(x.dtype))


@jax.custom_vjp
def _chunked_head(x, head, targets):
    return _chunked_head_forward(x, head, targets)[0]


def _chunked_head_forward(x, head, targets):
    """Return the mean cross-entropy and its gradients: no product is computed twice."""
    chunks = x.reshape(-1, CHUNK, x.shape[-1]), targets.reshape(-1, CHUNK)

    def step(carry, chunk):
        total, grad_head = carry
        rows, labels = chunk
        logits = rows @ head
        top = jnp.max(logits, -1, keepdims=True)
        weights = jnp.exp(logits - top)
        normalizer = jnp.sum(weights, -1, keepdims=True)
        picked = jnp.take_along_axis(logits, labels[:, None], -1)
        total += jnp.sum(jnp.log(normalizer) + top - picked)
        grad = weights / normalizer - jax.nn.one_hot(labels, head.shape[1])
        return (total, grad_head + rows.T @ grad), grad @ head.T

    carry = jnp.zeros(()), jnp.zeros_like(head)
    (total, grad_head), grad_x = jax.lax.scan(step, carry, chunks)
    return total / targets.size, (grad_x.reshape(x.shape), grad_head, targets)


def _chunked_head_backward(saved, cotangent):
    grad_x, grad_head, targets = saved
    scale = cotangent / targets.size
    return grad_x * scale, grad_head * scale, None


_chunked_head.defvjp(_chunked_head_forward, _chunked_head_backward)


def loss(params, tokens, targets, shape, dtype, kernel):
    """Return the mean cross-entropy over all tokens."""
    half = shape.d_model // shape.num_heads // 2
    angles = np.arange(shape.seq)[:, None] * 10000.0 ** (-np.arange(half) / half)
    cos, sin = (f(angles).astype(np.float32)[None, :, None] for f in (np.cos, np.sin))
    x = params["embed"].astype(dtype)[tokens]
    for p in params["layers"]:
        x = _layer(p, x, shape, cos, sin, kernel)
    head = params["head"].astype(dtype)
    if kernel == "xla" and shape.vocab >= 8192:
        return _chunked_head(_norm(x, params["norm"]), head, targets)
    logits = jnp.einsum(
        "bsd,dv->bsv", _norm(x, params["norm"]), head, preferred_element_type=jnp.float32
    )
    picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - picked)


def _averages(first, second, grads):
    return (
        jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads),
        jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, second, grads),
    )


def _after(tree, marks):
    """Return the tree unchanged, after the first element of each mark is computed."""
    made = True
    for x in [mark.reshape(-1)[0] for mark in marks]:
        made &= (x < 0) | (x >= 0) | (x != x)
    return jax.tree.map(lambda leaf: jnp.where(made, leaf, leaf + 1), tree)


def make_step(shape: Shape, dtype, kernel, peak_lr=1e-3, weight_decay=0.1, clip=1.0):
    """Return a jitted (state, tokens, targets) -> (state, loss, grad norm) that donates state."""

    def step(state, tokens, targets):
        params, first, second, count = state
        value, grads = jax.value_and_grad(loss)(params, tokens, targets, shape, dtype, kernel)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, clip / (norm + 1e-6)), grads)
        count = count + 1
        moments = first, second
        first, second = _averages(*moments, grads)
        fix1, fix2 = 1 - 0.9**count, 1 - 0.95**count

        def move(p, m, v):
            decay = weight_decay * p if p.ndim > 1 else 0.0
            return p - peak_lr * (m / fix1 / (jnp.sqrt(v / fix2) + 1e-8) + decay)

        params = jax.tree.map(move, params, first, second)
        if kernel == "xla":
            # XLA:CPU copies old moments if it might overwrite them before the parameter update.
            first, second = _averages(*_after(moments, jax.tree.leaves(params)), grads)
        return (params, first, second, count), value, norm

    return jax.jit(step, donate_argnums=0)


def init_state(shape: Shape, seed: int = 0):
    """Return parameters, two moments and a step count."""

    def make(key):
        params = init(shape, key)
        zeros = lambda: jax.tree.map(jnp.zeros_like, params)
        return params, zeros(), zeros(), jnp.zeros((), jnp.float32)

    return jax.jit(make)(jax.random.key(seed))
