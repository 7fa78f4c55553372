"""What a model computes and keeps, read off its own functions: for models without formulas here.

The block and the loss are traced with shapes alone; nothing is computed and no device is started.
FLOPs are those of matrix products and convolutions. What backward needs is what `jax.vjp` would
keep, in bytes that grow with the number of rows, so weights and constants do not count. A compiler
fuses some of it away: the figure is an upper bound and rough.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

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
    Sums,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """What one row costs on one device that holds all of the model.

    Attributes:
        flops: of matrix products and convolutions, forward.
        kept_bytes: what is kept from forward to backward.
        reduced: elements whose sum over `tensor` the model asks for, forward and backward.
    """

    flops: float = 0.0
    kept_bytes: float = 0.0
    reduced: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """A model's cost of one row.

    Attributes:
        layer: one block; nothing where the model has no stacked layers.
        rest: everything else: embedding, head and loss.
        stream: elements of the block's input; 0 without stacked layers.
    """

    layer: Cost
    rest: Cost
    stream: int


@functools.lru_cache(maxsize=256)
def trace(model: Model, seq_len: int, dtype: str, remat: str) -> Trace:
    """Trace a model's block and loss on rows of `seq_len`, with remat as in `train.remat`."""
    rest = _outside_layers(model, seq_len, dtype)
    if model.block is None:
        return Trace(layer=Cost(), rest=rest, stream=0)
    x, _ = _stream(model, seq_len, dtype, rows=1)
    layer = _difference(lambda rows: _block(model, seq_len, dtype, remat, rows))
    return Trace(layer=layer, rest=rest, stream=math.prod(x.shape))


@functools.lru_cache(maxsize=64)
def _outside_layers(model: Model, seq_len: int, dtype: str) -> Cost:
    return _difference(lambda rows: _loss(model, seq_len, dtype, rows))


@functools.lru_cache(maxsize=64)
def attention_of(model: Model, seq_len: int) -> AttentionCall | None:
    """How a model's block attends; None where it does not, or more than once."""
    if model.block is None:
        return None
    calls: list[AttentionCall] = []

    def attend(query: Array, key: Array, value: Array, mask: AttentionMask, **asked: Any) -> Array:
        """Note what is asked. The result, like the query [...], only has the right shape."""
        dropout = asked.get("dropout")
        calls.append(
            AttentionCall(
                sliding_window=mask.sliding_window,
                full_every=mask.full_every,
                kernel=asked.get("kernel", "auto"),
                dropout=0.0 if dropout is None else dropout.rate,
                softcap=asked.get("softcap", 0.0),
            )
        )
        return query

    def run(weights: Params, x: Array, aux: Any, key: Array) -> Any:
        assert model.block is not None
        return model.block(weights, x, aux, dataclasses.replace(context, dropout_key=key))

    context = dataclasses.replace(_context("float32", []), attend=attend)
    x, aux = _stream(model, seq_len, "float32", rows=1)
    jax.eval_shape(run, _one_layer(model, "float32"), x, aux, _key())
    return calls[0] if len(calls) == 1 else None


def row_of(model: Model, seq_len: int) -> dict[str, jax.ShapeDtypeStruct]:
    """One row of a batch: what the model says it reads, or text."""
    ids = jax.ShapeDtypeStruct((seq_len,), jnp.int32)
    weights = jax.ShapeDtypeStruct((seq_len,), jnp.float32)
    return dict(model.row) or {"tokens": ids, "targets": ids, "weights": weights}


def _difference(cost_of: Callable[[int], Cost]) -> Cost:
    """What the second row adds to the first."""
    one, two = cost_of(1), cost_of(2)
    fields = [field.name for field in dataclasses.fields(Cost)]
    return Cost(**{name: getattr(two, name) - getattr(one, name) for name in fields})


def _loss(model: Model, seq_len: int, dtype: str, rows: int) -> Cost:
    """The whole loss, its layers left out."""
    reduced: list[int] = []
    skip: Any = lambda block, layers, x, aux, context: (x, {})
    context, forward = _context(dtype, reduced), ForwardPass(model, run_layers=skip)

    def loss(params: Params, batch: Batch) -> Array:
        return forward.loss(params, batch, context)["loss"]

    batch = _batch(model, seq_len, rows)
    return _cost(loss, reduced, (_params(model, dtype),), (batch,))


def _block(model: Model, seq_len: int, dtype: str, remat: str, rows: int) -> Cost:
    """One block, with the remat policy that the layer runner would give it."""
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
    """Trace forward for the FLOPs and sums, and the VJP for what it keeps.

    `function` takes all trees of shapes and fills `reduced` while it is traced; those
    `differentiated` have floating point leaves.
    """
    jaxpr = jax.make_jaxpr(function)(*differentiated, *others)
    summed = sum(reduced)

    def residuals(differentiated: Any, others: Any) -> Any:
        return jax.vjp(lambda *given: function(*given, *others), *differentiated)[1]

    kept = jax.tree.leaves(jax.eval_shape(residuals, differentiated, others))
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in kept)
    return Cost(flops=_flops(jaxpr), kept_bytes=size, reduced=summed)


def _params(model: Model, dtype: str) -> Params:
    """The parameters as the step hands them to the model: whole, in the compute dtype."""
    shapes = jax.eval_shape(model.init, _key())
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), shapes)


def _one_layer(model: Model, dtype: str) -> Params:
    layers = _params(model, dtype)["layers"]
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), layers)


def _key() -> Any:
    """The shape of a key only: a real one would start a device."""
    return jax.eval_shape(lambda: jax.random.key(0))


def _batch(model: Model, seq_len: int, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch as the step hands it to the model, the rows' numbers added."""
    fields = {**row_of(model, seq_len), "rows": jax.ShapeDtypeStruct((), jnp.int32)}
    return {
        name: jax.ShapeDtypeStruct((rows, *leaf.shape), leaf.dtype) for name, leaf in fields.items()
    }


def _stream(model: Model, seq_len: int, dtype: str, rows: int) -> tuple[Any, Any]:
    """Shapes of the block's input and of what else it needs."""
    context = _context(dtype, [])

    def start(params: Params, batch: Batch) -> tuple[Array, Any]:
        assert model.embed is not None
        aux = model.prepare(batch, context) if model.prepare is not None else batch
        return model.embed(params, batch, context), aux

    return jax.eval_shape(start, _params(model, dtype), _batch(model, seq_len, rows))


def _context(dtype: str, reduced: list[int]) -> Context:
    """One device, counting what `enter` and `leave` would sum over `tensor`."""

    def counted(x: Array) -> Array:
        reduced.append(x.size)
        return x

    return Context(
        dtype=jnp.dtype(dtype),
        enter=counted,
        leave=counted,
        # Of no platform: a kernel of the CPU's own would leave out keys that are counted here.
        attend=attention.make_attend(attention.AttentionPlan("none")),
        token_loss=losses.make_token_loss(),
        token_logps=make_token_logps(),
    )


# --- FLOPs of a jaxpr -----------------------------------------------------------------------------


def _flops(jaxpr: Any) -> float:
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
            total += 2.0 * math.prod(out) * math.prod(left[dim] for dim in contracted)
        elif equation.primitive.name == "conv_general_dilated":
            kernel, out = equation.invars[1].aval.shape, equation.outvars[0].aval.shape
            features = equation.params["dimension_numbers"].rhs_spec[0]
            total += 2.0 * math.prod(out) * math.prod(kernel) / kernel[features]
        else:
            inner = [_flops(one) for one in _inner(equation.params)]
            if equation.primitive.name == "cond":
                total += max(inner, default=0.0)
            else:
                total += sum(inner) * equation.params.get("length", 1)
    return total


def _inner(params: Any) -> Iterator[Any]:
    """Programs inside an equation: of a loop, a branch, a function."""
    for value in params.values():
        for one in value if isinstance(value, list | tuple) else [value]:
            if hasattr(one, "eqns"):
                yield one
