"""Custom models whose products use `Context.dot`: with layers and hooks, and without both."""

import math

import jax
import jax.numpy as jnp

from jaxdist.core.types import Dims, Model, TokenHead
from jaxdist.objectives import cross_entropy

WIDTH, FFN, HEADS, SIZE, LAYERS = 16, 32, 4, 8, 4
LAYER = {
    "query": ("width", "heads", "head_dim"),
    "out": ("heads", "head_dim", "width"),
    "up": ("width", "ffn"),
    "down": ("ffn", "width"),
}


def build(*, seq_len: int, vocab: int = 320, stacked: bool = True, skip_dot: bool = False) -> Model:
    """Return residual blocks of two position-wise MLPs; `skip_dot` multiplies `up` with `@`."""
    dims = {"width": WIDTH, "ffn": FFN, "heads": HEADS, "head_dim": SIZE, "vocab": vocab}
    dims |= {"entries": vocab}  # the table, complete on every device
    dims |= {"layers": LAYERS} if stacked else {}
    tables = {"table": ("entries", "width"), "kernel": ("width", "vocab")}
    layers = {n: Dims((*["layers"] * stacked, *names)) for n, names in LAYER.items()}
    body = "layers" if stacked else "body"  # the step gathers layers one by one

    def init(key):
        def leaf(path, names):
            own = jax.random.fold_in(key, len(jax.tree_util.keystr(path)) + len(names))
            shape = tuple(dims[name] for name in names)
            return jax.random.normal(own, shape) / math.sqrt(WIDTH)

        return jax.tree_util.tree_map_with_path(leaf, axes)

    def embed(params, batch, context):
        rows = jnp.take(params["table"], batch["tokens"], axis=0).astype(context.dtype)
        return context.split(rows)

    def block(params, x, batch, context):
        h = context.enter(x)
        h = context.dot("b s width, width heads k -> b s heads k", h, params["query"])
        h = context.dot("b s heads k, heads k width -> b s width", jax.nn.silu(h), params["out"])
        x = x + context.leave(h)
        h = context.enter(x)
        up = params["up"]
        h = h @ up if skip_dot else context.dot("b s width, width ffn -> b s ffn", h, up)
        h = context.dot("b s ffn, ffn width -> b s width", jax.nn.silu(h), params["down"])
        return x + context.leave(h), {}

    def head(params, x, batch, context):
        if not stacked:
            x = jnp.take(params["table"], batch["tokens"], axis=0).astype(context.dtype)
            x, _ = block(params[body], x, batch, context)
        return TokenHead(context.enter(x), params["kernel"].astype(x.dtype), vocab), {}

    axes = {**{name: Dims(names) for name, names in tables.items()}, body: layers}
    run = {"embed": embed, "block": block, "num_layers": LAYERS, "sequence": True}
    return Model(
        name="custom", init=init, axes=axes, dims=dims, rules={"width": "fsdp", "ffn": "tensor"},
        head=head, objective=cross_entropy, vocab_size=vocab, context_parallel=True,
        tensor="manual" if stacked else "auto", flops_per_token={"causal": 1e6, "full": 1e6},
        **run if stacked else {},
    )  # fmt: skip
