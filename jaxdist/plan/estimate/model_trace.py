"""Costs and structure of a model, read from the trace of its own functions.

The block, the head and the loss are traced with shapes only. FLOPs are those of matrix products and
convolutions. Saved bytes are the residuals of `jax.vjp` that grow with the number of rows: an upper
bound, because compilers fuse some away. For decoders, `model_costs` has more precise formulas.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxdist.core import attention, losses
from jaxdist.core.forward import ForwardPass
from jaxdist.core.step.layer_scan import remat_policy
from jaxdist.core.token_logps import make_token_logps
from jaxdist.core.types import (
    Array,
    AttentionCall,
    AttentionMask,
    Batch,
    Context,
    Model,
    Params,
    Routing,
    Sums,
    TokenHead,
)
from jaxdist.core.weights import gathered_dtypes
from jaxdist.models.adapters import without_adapters


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of a row on one device: forward FLOPs, saved bytes, elements summed over `tensor`."""

    flops: float = 0.0
    kept_bytes: float = 0.0
    reduced: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """Costs of one row: in one block, and outside. `stream`: elements of a block's input."""

    layer: Cost
    rest: Cost
    stream: int


@functools.lru_cache(maxsize=256)
def trace(model: Model, seq_len: int, dtype: str, remat: str) -> Trace:
    """Return a model's costs for one row of `seq_len`, by tracing with remat policy `remat`."""
    rest = _outside_layers(model, seq_len, dtype)
    if model.block is None:
        return Trace(layer=Cost(), rest=rest, stream=0)
    x, _ = _stream(model, seq_len, dtype, rows=1)
    layer = _difference(lambda rows: _block(model, seq_len, dtype, remat, rows))
    return Trace(layer=layer, rest=rest, stream=math.prod(x.shape))


@functools.lru_cache(maxsize=64)
def _outside_layers(model: Model, seq_len: int, dtype: str) -> Cost:
    return _difference(lambda rows: _loss(model, seq_len, dtype, rows))


class _Block(NamedTuple):
    """Trace of one block on one row, with each call of attention replaced by a `name` equation.

    `calls` has each call and its shapes of queries and keys, `experts_per_token` the number of
    experts that process a token in each call of experts.
    """

    experts_per_token: list[int]
    calls: list[tuple[AttentionCall, tuple[int, ...], tuple[int, ...]]]
    jaxpr: Any
    x: Any


_ATTEND = "attend"


@functools.lru_cache(maxsize=64)
def _trace_block(model: Model, seq_len: int) -> _Block | None:
    if model.block is None:
        return None
    calls: list[tuple[AttentionCall, tuple[int, ...], tuple[int, ...]]] = []

    def attend(
        query: Array, key: Array, value: Array, mask: AttentionMask, **options: Any
    ) -> Array:
        """Record the call; return the query [batch, seq, heads, head_dim] as its result."""
        dropout = options.get("dropout")
        call = AttentionCall(
            sliding_window=mask.sliding_window,
            full_every=mask.full_every,
            kernel=options.get("kernel", "auto"),
            dropout=0.0 if dropout is None else dropout.rate,
            softcap=options.get("softcap", 0.0),
            sinks=options.get("sink") is not None,
        )
        calls.append((call, query.shape, key.shape))
        return checkpoint_name(query, _ATTEND)

    def run(weights: Params, x: Array, aux: Any, key: Array) -> Any:
        assert model.block is not None
        return model.block(weights, x, aux, dataclasses.replace(context, dropout_key=key))

    per_token: list[int] = []

    def experts(x: Array, routing: Routing, *weights: Any) -> tuple[Array, None]:
        """Record the number of experts of a token; return [batch, seq, d_model]."""
        per_token.append(routing.experts.shape[-1])
        return _used_experts(x, routing, *weights)

    context = dataclasses.replace(_context("float32", []), attend=attend, experts=experts)
    x, aux = _stream(model, seq_len, "float32", rows=1)
    jaxpr = jax.make_jaxpr(run)(_one_layer(model, "float32"), x, aux, _key())
    return _Block(per_token, calls, jaxpr, x)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderShape:
    """Sizes of a head, and of blocks of layers, each one attention and one MLP; means over a block.

    Attributes:
        layers, sparse_layers: number of layers in a block, and of those with experts.
        up: output width of the MLP's first product, with the gate; of all experts of a token.
        hidden: input width of the MLP's last product; of all experts of a token.
        columns: outputs of the head; `vocab` unless they are scores of complete rows.
        num_norms: norms of the residual stream per layer.
        num_layer_norms: how many of these norms subtract the mean.
        norms_mlp_output: a norm follows the MLP's last product.
    """

    layers: int
    sparse_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    up: int
    hidden: int
    num_experts: int
    experts_per_token: int
    vocab: int
    columns: int
    vocab_dim: str
    num_norms: int
    num_layer_norms: int
    norms_mlp_output: bool
    marks: frozenset[str]
    call: AttentionCall


@functools.lru_cache(maxsize=64)
def decoder_of(model: Model, seq_len: int) -> DecoderShape | None:
    """Return the sizes of a decoder, recognized by its trace; None for any other structure.

    All calls of attention in the block, one per layer, must be equal. Its products must have the
    outputs and FLOPs of query, key, value, output and an MLP, in any split into arrays. The head
    must be a `TokenHead` or the scores of a row. Adapters are left out.
    """
    model = without_adapters(model)
    block = _trace_block(model, seq_len)
    if block is None or block.x.ndim != 3 or block.x.shape[1] != seq_len:
        return None
    if not block.calls or any(call != block.calls[0] for call in block.calls):
        return None
    layers, sparse = len(block.calls), len(block.experts_per_token)
    call, query, key = block.calls[0]
    d_model, num_heads, head_dim, num_kv_heads = block.x.shape[-1], query[2], query[3], key[2]
    products, outputs = 0.0, 0.0
    sums, marks = 0, set()
    stage, norms = "before", Counter[str]()
    for equation, times in _equations(block.jaxpr):
        name, out = equation.primitive.name, equation.outvars[0].aval
        if flops := times * _flops_of(equation):
            if flops > 2 * times * out.size:  # an outer product has no weight
                products, outputs = products + flops, outputs + times * out.size
                stage, norms["last"] = ("heads" if stage == "before" else stage), 0
        elif name == "name":
            marks.add(equation.params["name"])
            stage = "after" if equation.params["name"] == _ATTEND else stage
        elif out.size == seq_len and stage != "heads":  # one scalar per token
            sums += name == "reduce_sum"
            norms.update(dict.fromkeys(("all", "last"), name in ("rsqrt", "sqrt")))
    queries, keys = num_heads * head_dim, num_kv_heads * head_dim
    num_experts = model.dims.get("experts", 0)  # the router's product has an output for each
    others = num_experts * sparse
    if "shared_mlp" in model.dims:  # its last product, and one output for its gate
        gates = sum(dims[-2:] == ("d_model", None) for dims in jax.tree.leaves(model.axes)) - sparse
        outputs, others = outputs - seq_len * d_model * sparse, others + gates
    outputs, products = outputs - seq_len * others, products - 2 * seq_len * d_model * others
    up = outputs / (seq_len * layers) - queries - 2 * keys - 2 * d_model
    hidden = products / (2 * seq_len * d_model * layers) - 2 * queries - 2 * keys - up
    up, hidden = round(up, 3), round(hidden, 3)
    head = _head(model, seq_len)
    scores = 0 if isinstance(head, TokenHead) else _num_scores(model, head)
    if (
        up <= 0
        or min(abs(hidden - up), abs(2 * hidden - up)) > 0.01
        or not (scores or isinstance(head, TokenHead))
    ):
        return None
    vocab = model.dims["vocab"] if scores else head.kernel.shape[1]
    dims = {dim for leaf in jax.tree.leaves(model.axes) for dim in leaf if dim}
    return DecoderShape(
        layers=layers,
        sparse_layers=sparse,
        d_model=d_model,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        up=int(up),
        hidden=int(hidden),
        num_experts=num_experts,
        experts_per_token=max(block.experts_per_token, default=0),
        vocab=vocab,
        columns=scores or vocab,
        vocab_dim=max(dims, key=lambda dim: (model.dims.get(dim) == vocab, dim == "vocab", dim)),
        num_norms=norms["all"] // layers,
        # A router sums over its experts as a layer norm does over its inputs.
        num_layer_norms=norms["all"] // layers if sums > norms["all"] and not num_experts else 0,
        norms_mlp_output=norms["last"] > 0,
        marks=frozenset(marks - {_ATTEND} | {"attention"}),
        call=call,
    )


def _num_scores(model: Model, head: Any) -> int:
    """Return num_labels if the head returns scores [batch, num_labels]; else 0."""
    is_scores = isinstance(head, jax.ShapeDtypeStruct) and head.ndim == 2 and "vocab" in model.dims
    return head.shape[1] if is_scores else 0


def _head(model: Model, seq_len: int) -> Any:
    x, _ = _stream(model, seq_len, "float32", rows=1)
    run = lambda params, x, batch: model.head(params, x, batch, _context("float32", []))[0]
    return jax.eval_shape(run, _params(model, "float32"), x, _batch(model, seq_len, 1))


def row_of(model: Model, seq_len: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return name -> shape and dtype of one row: `model.row`, or by default a row of text."""
    ids = jax.ShapeDtypeStruct((seq_len,), jnp.int32)
    weights = jax.ShapeDtypeStruct((seq_len,), jnp.float32)
    return dict(model.row) or {"tokens": ids, "targets": ids, "weights": weights}


def _difference(cost_of: Callable[[int], Cost]) -> Cost:
    one, two = cost_of(1), cost_of(2)
    fields = [field.name for field in dataclasses.fields(Cost)]
    return Cost(**{name: getattr(two, name) - getattr(one, name) for name in fields})


def _loss(model: Model, seq_len: int, dtype: str, rows: int) -> Cost:
    reduced: list[int] = []
    skip: Any = lambda block, layers, x, aux, context: (x, {})
    context, forward = _context(dtype, reduced), ForwardPass(model, run_layers=skip)

    def loss(params: Params, batch: Batch) -> Array:
        return forward.loss(params, batch, context)["loss"]

    batch = _batch(model, seq_len, rows)
    return _cost(loss, reduced, (_params(model, dtype),), (batch,))


def _block(model: Model, seq_len: int, dtype: str, remat: str, rows: int) -> Cost:
    reduced: list[int] = []
    context, block = _context(dtype, reduced), model.block
    assert block is not None
    one = _one_layer(model, dtype)
    x, aux = _stream(model, seq_len, dtype, rows)

    def run(weights: Params, x: Array, aux: Any) -> tuple[Array, Sums]:
        return block(weights, x, aux, context)

    if remat != "none":
        run = jax.checkpoint(run, policy=remat_policy(remat))
    return _cost(run, reduced, (one, x), (aux,))


def _cost(
    function: Callable[..., Any],
    reduced: list[int],
    differentiated: tuple[Any, ...],
    others: tuple[Any, ...],
) -> Cost:
    """Return a function's FLOPs and bytes saved for its gradient; tracing it fills `reduced`."""
    jaxpr = jax.make_jaxpr(function)(*differentiated, *others)
    summed = sum(reduced)

    def residuals(differentiated: Any, others: Any) -> Any:
        return jax.vjp(lambda *leaves: function(*leaves, *others), *differentiated)[1]

    kept = jax.tree.leaves(jax.eval_shape(residuals, differentiated, others))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in kept)
    return Cost(flops=_flops(jaxpr), kept_bytes=size, reduced=summed)


def _params(model: Model, dtype: str) -> Params:
    shapes = jax.eval_shape(model.init, _key())
    dtypes = gathered_dtypes(model.axes, dtype)
    return jax.tree.map(lambda leaf, of: jax.ShapeDtypeStruct(leaf.shape, of), shapes, dtypes)


def _one_layer(model: Model, dtype: str) -> Params:
    layers = _params(model, dtype)["layers"]
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), layers)


def _key() -> Any:
    """Return the shape of a PRNG key; a concrete key would start a device."""
    return jax.eval_shape(lambda: jax.random.key(0))


def _batch(model: Model, seq_len: int, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    fields = {**row_of(model, seq_len), "rows": jax.ShapeDtypeStruct((), jnp.int32)}
    return {
        name: jax.ShapeDtypeStruct((rows, *leaf.shape), leaf.dtype) for name, leaf in fields.items()
    }


def _stream(model: Model, seq_len: int, dtype: str, rows: int) -> tuple[Any, Any]:
    context = _context(dtype, [])

    def start(params: Params, batch: Batch) -> tuple[Array, Any]:
        assert model.embed is not None
        aux = model.prepare(batch, context) if model.prepare is not None else batch
        return model.embed(params, batch, context), aux

    return jax.eval_shape(start, _params(model, dtype), _batch(model, seq_len, rows))


def _context(dtype: str, reduced: list[int]) -> Context:
    """Return a one-device context whose `enter` and `leave` append their sizes to `reduced`."""

    def counted(x: Array) -> Array:
        reduced.append(x.size)
        return x

    return Context(
        dtype=jnp.dtype(dtype),
        enter=counted,
        leave=counted,
        # No platform, because the CPU kernel would skip keys that must be counted.
        attend=attention.make_attend(attention.AttentionPlan("none")),
        experts=_used_experts,
        token_loss=losses.make_token_loss(),
        token_logps=make_token_logps(),
    )


def _used_experts(
    x: Array,
    routing: Routing,
    up: Array,
    down: Array,
    activate: Callable[[Array], Array],
    *biases: Array,
) -> tuple[Array, None]:
    """Return a sum [batch, seq, d_model] with the work of `Context.experts`, without biases."""
    del biases
    shares = routing.shares.astype(x.dtype)
    per_token, (_, _, ways, mlp) = shares.shape[-1], up.shape
    products = jnp.einsum("bsd,edwf->bsewf", x, up[:per_token])
    hidden = activate(products.reshape(-1, ways, mlp)).reshape(*shares.shape, mlp)
    return jnp.einsum("bsef,efd->bsd", hidden * shares[..., None], down[:per_token]), None


def _flops(jaxpr: Any) -> float:
    return sum(times * _flops_of(equation) for equation, times in _equations(jaxpr))


def _equations(jaxpr: Any) -> Iterator[tuple[Any, int]]:
    """Yield innermost equations in order and execution counts; of branches only the costliest."""
    for equation in jaxpr.eqns:
        inner = list(_inner(equation.params))
        if equation.primitive.name == "cond":  # count the most expensive branch
            inner = [max(inner, key=_flops)]
        for one in inner:
            length = equation.params.get("length", 1)
            yield from ((each, times * length) for each, times in _equations(one))
        if not inner:
            yield equation, 1


def _flops_of(equation: Any) -> float:
    """Return the FLOPs of one matrix product or convolution; 0 for any other equation."""
    if equation.primitive.name == "dot_general":
        (contracted, _), _ = equation.params["dimension_numbers"]
        left, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
        return 2.0 * math.prod(out) * math.prod(left[dim] for dim in contracted)
    if equation.primitive.name == "conv_general_dilated":
        kernel, out = equation.invars[1].aval.shape, equation.outvars[0].aval.shape
        features = equation.params["dimension_numbers"].rhs_spec[0]
        return 2.0 * math.prod(out) * math.prod(kernel) / kernel[features]
    return 0.0


def _inner(params: Any) -> Iterator[Any]:
    for value in params.values():
        for one in value if isinstance(value, list | tuple) else [value]:
            if hasattr(one, "eqns"):
                yield one
