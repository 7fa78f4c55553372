"""Layers of models: weights with named dims, norms, rotary positions, dropout, convolutions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxdist.core import collectives
from jaxdist.core.types import (
    BATCH_STATISTICS,
    Array,
    AttentionMask,
    Batch,
    Context,
    Dims,
    Params,
    Sums,
)
from jaxdist.core.weights import Parameter
from jaxdist.models.adapted_weights import TokenRows
from jaxdist.models.configs import KERNEL_SIZE, ROPE_SCALING, DecoderConfig


class RunningAverage(nnx.Variable):
    """A running average that training updates from batch statistics and evaluation reads."""


_STORED = nnx.Any(nnx.Param, RunningAverage)


def functional(
    make: Callable[[nnx.Rngs], nnx.Module],
) -> tuple[Callable[[Array], Params], Params, Callable[[Params], Any]]:
    """Convert an NNX module to plain functions.

    `make` maps rngs to a module. Its `nnx.Param`s and `RunningAverage`s need `dims=Dims(...)` or a
    `Parameter` in their metadata (`weight` and `filled` do so; Flax's layers take
    `kernel_metadata`); without either, an array is replicated. Raises `ValueError` if the module
    has other state, such as Flax's BatchNorm.

    Returns:
        init: PRNG key [] -> plain nested dict of arrays, with the module's shapes.
        axes: the same tree with a `Dims` at each leaf.
        bind: params (of any shape) -> the module with these params, to call its methods.
    """
    module = nnx.eval_shape(lambda: make(nnx.Rngs(0)))
    split: Any = nnx.split(module, _STORED, ...)
    graph, abstract, others = split
    if kinds := sorted({type(v).__name__ for v in jax.tree.leaves(others, is_leaf=_is_variable)}):
        raise ValueError(
            f"{type(module).__name__} has {', '.join(kinds)} besides nnx.Param: models are "
            "pure functions of their parameters. Use layers without such state "
            "(jaxdist.models.layers.BatchNorm for Flax's, Context.dropout_key for Dropout's own "
            "keys)."
        )

    def init(key: Array) -> Params:
        return nnx.to_pure_dict(nnx.state(make(nnx.Rngs(params=key)), _STORED))

    def bind(params: Params) -> Any:
        state = jax.tree.map(lambda x: x, abstract)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state, others)

    def dims_of(param: nnx.Variable) -> Any:
        dims = param.get_metadata().get("dims", Dims((None,) * len(param.shape)))
        is_average = isinstance(param, RunningAverage)
        return param.replace(Parameter(dims, update="statistic") if is_average else dims)

    axes = jax.tree.map(dims_of, abstract, is_leaf=_is_variable)
    return init, nnx.to_pure_dict(axes), bind


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, nnx.Variable)


def weight(rngs: nnx.Rngs, shape: tuple[int, ...], std: float, *dims: str | None) -> nnx.Param:
    """Return a float32 weight from a normal distribution, with named dims."""
    value = jax.random.normal(rngs.params(), shape, jnp.float32) * std
    return nnx.Param(value, dims=Dims(dims))


def uniform(rngs: nnx.Rngs, shape: tuple[int, ...], bound: float, *dims: str | None) -> nnx.Param:
    """Return a float32 weight from U(-bound, bound), with named dims."""
    value = jax.random.uniform(rngs.params(), shape, jnp.float32, -bound, bound)
    return nnx.Param(value, dims=Dims(dims))


def filled(value: float, shape: tuple[int, ...], *dims: str | None) -> nnx.Param:
    """Return a constant float32 array (norm scale, bias), with named dims."""
    return nnx.Param(jnp.full(shape, value, jnp.float32), dims=Dims(dims))


class BatchNorm(nnx.Module):
    """Batch norm over all dims but the last, in float32 (Ioffe and Szegedy 2015, algorithm 1).

    Training uses statistics of the global (micro)batch: one all-reduce of [2, size] float32 forward
    and one backward. As in PyTorch, the unbiased variance is averaged. A head with such layers adds
    `batch_statistics(module, context)` to its `Sums`.
    """

    def __init__(self, size: int, dim: str | None, eps: float = 1e-5):
        self.scale = filled(1.0, (size,), dim)
        self.bias = filled(0.0, (size,), dim)
        self.mean = RunningAverage(jnp.zeros(size, jnp.float32), dims=Dims((dim,)))
        self.variance = RunningAverage(jnp.ones(size, jnp.float32), dims=Dims((dim,)))
        self.eps = eps

    def __call__(self, x: Array, context: Context) -> Array:
        """Normalize [batch, ..., size]; returns the dtype of x."""
        wide = x.astype(jnp.float32)
        mean, variance = self.mean[...], self.variance[...]
        if context.training:
            dims = tuple(range(x.ndim - 1))
            sums = jnp.stack([jnp.sum(wide, dims), jnp.sum(jnp.square(wide), dims)])
            count = x.size // x.shape[-1] * context.sum(1, "batch")
            mean, square = context.sum(sums, "batch") / count
            variance = jnp.maximum(square - jnp.square(mean), 0.0)
            self.mean[...] = lax.stop_gradient(mean)
            unbiased = variance * (count / max(count - 1, 1))
            self.variance[...] = lax.stop_gradient(unbiased)
        scale = lax.rsqrt(variance + self.eps) * self.scale[...].astype(jnp.float32)
        return ((wide - mean) * scale + self.bias[...].astype(jnp.float32)).astype(x.dtype)


def batch_statistics(module: nnx.Module, context: Context) -> Sums:
    """Return a module's batch statistics for a head's sums; {} without any or in evaluation."""
    if not context.training:
        return {}
    averages: Any = nnx.to_pure_dict(nnx.state(module, RunningAverage))
    return {BATCH_STATISTICS: averages} if averages else {}


class RMSNorm(nnx.Module):
    """RMS norm over the last dim in float32, times `center` + scale (Zhang & Sennrich 2019)."""

    def __init__(self, size: int, eps: float, dim: str, center: float = 0.0):
        self.scale = filled(1.0 - center, (size,), dim)
        self.eps = eps
        self.center = center

    def __call__(self, x: Array) -> Array:
        """Normalize [..., size]; returns the dtype of x."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + self.eps)
        scale = self.scale[...].astype(jnp.float32)
        return (wide * (scale + self.center if self.center else scale)).astype(x.dtype)


class HeadsRMSNorm(nnx.Module):
    """RMS norm over all heads of a token, also if the tensor axis splits the heads (OLMo 2)."""

    def __init__(self, heads: int, head_dim: int, eps: float, dim: str):
        self.scale = filled(1.0, (heads, head_dim), dim, "head_dim")
        self.size = heads * head_dim
        self.eps = eps

    def __call__(self, x: Array, context: Context) -> Array:
        """Normalize this device's [batch, seq, heads, head_dim]; same shape and dtype."""
        wide = x.astype(jnp.float32)
        squares = context.sum(jnp.sum(jnp.square(wide), (-2, -1), keepdims=True), "tensor")
        wide = wide * jax.lax.rsqrt(squares / self.size + self.eps)
        return (wide * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Layer norm with bias over the last dim, in float32 (Ba et al. 2016)."""

    def __init__(self, size: int, eps: float, dim: str):
        self.scale = filled(1.0, (size,), dim)
        self.bias = filled(0.0, (size,), dim)
        self.eps = eps

    def __call__(self, x: Array) -> Array:
        """Normalize [..., size]; returns the dtype of x."""
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, -1, keepdims=True)
        wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + self.eps)
        wide = wide * self.scale[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)
        return wide.astype(x.dtype)


def rotary_angles(
    positions: Array,
    head_dim: int,
    theta: float,
    stretch: Callable[[Array], Array] | None = None,
    length: float = 1.0,
) -> tuple[Array, Array]:
    """Return `length` × (cosines, sines) of positions [..., seq]: [..., seq, head_dim / 2] float32.

    Source: Su et al. 2021, "RoFormer", section 3.4; halves paired as in transformers.
    """
    exponents = jnp.arange(head_dim // 2, dtype=jnp.float32) / (head_dim // 2)
    frequencies = theta**-exponents
    if stretch is not None:
        frequencies = stretch(frequencies)
    angles = positions[..., None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return (cos, sin) if length == 1.0 else (cos * length, sin * length)


def computed_once(tables: Any) -> Any:
    """Return the arrays [..., size, width] unchanged, and force XLA:CPU to compute them only once.

    Otherwise XLA would fuse their computation into every consumer. It does not fuse across loops,
    so each array with an even width passes through a loop in two halves.
    """

    def halves(x: Array) -> Array:
        """Pass x [..., width] through a loop of two iterations."""
        parts = jnp.stack(jnp.split(x, 2, -1))
        return jnp.concatenate(list(lax.map(lax.optimization_barrier, parts)), -1)

    return jax.tree.map(lambda x: x if x.shape[-1] % 2 else halves(x), tables)


def rope_stretch(
    scaling: Mapping[str, Any], head_dim: int, theta: float
) -> tuple[Callable[[Array], Array], float]:
    """Return `rope_scaling` as a map of frequencies [head_dim / 2], and its factor of cos, sin."""
    values = {**ROPE_SCALING[scaling["type"]], **scaling}
    factor = values["factor"]
    if values["type"] == "linear":
        return (lambda frequencies: frequencies / factor), 1.0
    original = values["original_max_position_embeddings"]
    if values["type"] == "llama3":
        low, high = values["low_freq_factor"], values["high_freq_factor"]
        return llama3_stretch(factor, low, high, original), 1.0
    dims = [_dim_of_turns(values[n], original, head_dim, theta) for n in ("beta_fast", "beta_slow")]
    if values["truncate"]:
        dims = [math.floor(dims[0]), math.ceil(dims[1])]
    first, last = max(dims[0], 0), min(dims[1], head_dim - 1)
    length = values["attention_factor"] or 0.1 * math.log(max(factor, 1.0)) + 1.0
    return yarn_stretch(factor, first, last), length


def llama3_stretch(
    factor: float, low: float, high: float, original_len: int
) -> Callable[[Array], Array]:
    """Make Llama 3.1's function of frequencies [head_dim / 2]: low ones are divided by `factor`.

    From `low` to `high` turns in `original_len` positions there is a linear ramp. Source: the Llama
    3.1 model card's rope scaling (Grattafiori et al. 2024, section 3.4.2).
    """

    def stretch(frequencies: Array) -> Array:
        turns = original_len * frequencies / (2 * math.pi)
        kept = jnp.clip((turns - low) / (high - low), 0.0, 1.0)
        return frequencies * (kept + (1 - kept) / factor)

    return stretch


def yarn_stretch(factor: float, first: float, last: float) -> Callable[[Array], Array]:
    """Make YaRN's function of frequencies [head_dim / 2]: divided by `factor` from index `last` on.

    Between the indices `first` and `last` there is a linear ramp. Source: Peng et al. 2023, "YaRN",
    section 3.2 (NTK-by-parts); its code rounds both indices outwards.
    """

    def stretch(frequencies: Array) -> Array:
        index = jnp.arange(frequencies.shape[0], dtype=jnp.float32)
        ramp = jnp.clip((index - first) / max(last - first, 0.001), 0.0, 1.0)
        return frequencies * (1 - ramp) + frequencies / factor * ramp

    return stretch


def _dim_of_turns(turns: float, length: float, head_dim: int, theta: float) -> float:
    return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate x [batch, seq, heads, head_dim] by angles [batch or 1, seq, head_dim / 2]."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned, -1).astype(x.dtype)


def look_up(table: Array, index: Array, dtype: Any) -> Array:
    """Return rows of a table [rows, width] at int32 `index` [...]: [..., width] in `dtype`.

    Gradients of a row are summed in float32 or wider and rounded once: bfloat16 has 256 + 1 = 256.
    """
    axes = tuple(collectives.varying_axes(table) | collectives.varying_axes(index))
    table, index = collectives.vary((table.astype(dtype), index), axes)
    return _rows(table.shape[0], table, index)


def look_up_tokens(table: Any, tokens: Array, context: Context) -> Array:
    """Return rows [batch, seq, d_model] of a shard [vocab, d_model]; 0 for tokens outside of it."""
    base = table.base if isinstance(table, TokenRows) else table
    local = tokens - context.tensor_index() * base.shape[0]
    here = (local >= 0) & (local < base.shape[0])
    rows = look_up(base, jnp.clip(local, 0, base.shape[0] - 1), context.dtype)
    if isinstance(table, TokenRows):
        is_own = tokens[..., None] == jnp.asarray(table.ids, tokens.dtype)
        own = look_up(table.rows, jnp.argmax(is_own, -1), context.dtype)
        rows = jnp.where(jnp.any(is_own, -1, keepdims=True), own, rows)
    return jnp.where(here[..., None], rows, jnp.zeros_like(rows))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rows(num_rows: int, table: Array, index: Array) -> Array:
    """Return rows of a table [num_rows, width] at `index` [...]: [..., width]."""
    return table[index]


_SUM_BYTES = 256 << 20
"""Bytes in the wide dtype above which a table's gradient is summed in blocks of columns."""


def _rows_backward(num_rows: int, index: Array, cotangent: Array) -> tuple[Array, None]:
    """Return the gradient of table [num_rows, width] from [..., width]; large ones by columns."""
    dtype, width = cotangent.dtype, cotangent.shape[-1]
    wide = jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)
    parts = 1
    too_large = lambda: num_rows * width * wide.itemsize > parts * _SUM_BYTES
    while dtype != wide and too_large() and width % (2 * parts) == 0:
        parts *= 2
    columns = width // parts

    def sum_columns(part: Array | int) -> Array:
        """Return block number `part` of the gradient's columns, [num_rows, columns]."""
        own = lax.dynamic_slice_in_dim(cotangent, part * columns, columns, -1)
        sums = jnp.zeros((num_rows, columns), wide)
        return sums.at[index].add(own.astype(wide)).astype(dtype)

    if parts == 1:
        return sum_columns(0), None
    axes = tuple(collectives.varying_axes(cotangent))
    empty = collectives.vary(jnp.zeros((num_rows, width), dtype), axes)
    put = lambda part, sums: lax.dynamic_update_slice_in_dim(
        sums, sum_columns(part), part * columns, -1
    )
    return lax.fori_loop(0, parts, put, empty), None


_rows.defvjp(lambda num_rows, table, index: (table[index], index), _rows_backward)


def dropout(x: Array, rate: float, key: Array | None, rows: Array, index: Array) -> Array:
    """Return x [batch, seq_shard, d_model] with dropped features; rate 0 or no key drops nothing.

    The random bits depend on the key, used once, into which callers fold layer and dropout site; on
    `rows` int32 [batch], indices in the global batch; on `index` int32 [seq_shard], in the row.
    """
    if key is None or rate == 0:
        return x
    row_keys = jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)
    token_keys = jax.vmap(lambda k: jax.vmap(lambda i: jax.random.fold_in(k, i))(index))(row_keys)
    draw = lambda k: jax.random.bernoulli(k, 1 - rate, x.shape[2:])
    kept = jax.vmap(jax.vmap(draw))(token_keys)
    return jnp.where(kept, x / (1 - rate), jnp.zeros_like(x))


def once(bias: Array, context: Context) -> Array:
    """Return the bias [..., d_model] on tensor index 0, else zeros: `leave` adds it once."""
    index = context.tensor_index()
    return bias if isinstance(index, int) else jnp.where(index == 0, bias, jnp.zeros_like(bias))


_LIMIT, _SLOPE = 7.0, 1.702  # of gpt-oss


def activation(config: DecoderConfig, ways: list[Array]) -> Array:
    """Return the hidden activation [..., mlp] of one product, or of gate and linear part."""
    gate, *linear = ways
    if config.activation == "swiglu":
        return jax.nn.silu(gate) * linear[0]
    if config.activation == "clamped_swiglu":
        gate, up = jnp.minimum(gate, _LIMIT), jnp.clip(linear[0], -_LIMIT, _LIMIT)
        return gate * jax.nn.sigmoid(_SLOPE * gate) * (up + 1)
    hidden = jax.nn.gelu(gate, approximate=True)
    return hidden * linear[0] if config.activation == "geglu" else hidden


def conv(x: Array, kernel: Array, stride: int = 1) -> Array:
    """Convolve x [batch, height, width, in] to [batch, height / stride, width / stride, out]."""
    pad = ((KERNEL_SIZE // 2,) * 2,) * 2  # symmetric for every stride
    dims = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, kernel.astype(x.dtype), (stride, stride), pad, dimension_numbers=dims
    )


def prepare(config: DecoderConfig, batch: Batch, context: Context) -> dict[str, Any]:
    """Return the inputs that all blocks share: rotary angles, documents, and dropout indices.

    `segments` int32 [batch, seq] or None, `rows` int32 [batch] or None, `index` int32 [seq_shard];
    with rotary positions `cos`, `sin` float32 [batch or 1, seq, head_dim / 2], and `local_cos`,
    `local_sin` if layers with a window have other frequencies.
    """
    seq = batch["tokens"].shape[1]
    aux: dict[str, Any] = {
        "segments": batch.get("segments"),
        "rows": batch.get("rows"),
        "index": context.split(context.position_ids(seq)[None])[0],
    }
    if config.positions == "rotary":
        angles = _angles(config, positions_of(batch, context))
        aux |= computed_once(angles) if context.platform == "cpu" else angles
    return aux


def positions_of(batch: Batch, context: Context) -> Array:
    """Return positions [batch or 1, seq]; by default they count from the row's start."""
    if "positions" in batch:
        return batch["positions"]
    return context.position_ids(batch["tokens"].shape[1])[None]


def _angles(config: DecoderConfig, positions: Array) -> dict[str, Array]:
    """Return `cos`, `sin` (and `local_*`) of [batch or 1, seq], float32 [..., head_dim / 2]."""
    width, theta = config.head_width, config.rope_theta
    stretch: tuple[Any, ...] = ()
    if config.rope_scaling:
        stretch = rope_stretch(config.rope_scaling, width, theta)
    angles = rotary_angles(positions, width, theta, *stretch)
    named = dict(zip(("cos", "sin"), angles, strict=True))
    if config.local_rope_theta:
        local = rotary_angles(positions, width, config.local_rope_theta)
        named |= dict(zip(("local_cos", "local_sin"), local, strict=True))
    return named


def angles_of_layer(
    config: DecoderConfig, aux: dict[str, Any], context: Context
) -> tuple[Array, Array]:
    """Return (cos, sin) of the current layer, each float32 [batch or 1, seq, head_dim / 2]."""
    if not config.local_rope_theta:
        return aux["cos"], aux["sin"]
    sees_all = mask_of_layer(config, context).has_no_window
    return (
        jnp.where(sees_all, aux["cos"], aux["local_cos"]),
        jnp.where(sees_all, aux["sin"], aux["local_sin"]),
    )


def mask_of_layer(config: DecoderConfig, context: Context, **fields: Any) -> AttentionMask:
    """Return the mask of the layer `context.layer`; `fields` are other `AttentionMask` fields."""
    every, layer = config.full_attention_every, context.layer
    return AttentionMask(
        sliding_window=config.sliding_window, full_every=every, layer=layer, **fields
    )


def decoding_aux(config: DecoderConfig, positions: Array, *, max_len: int) -> dict[str, Any]:
    """Return the inputs of cached attention for positions int32 [batch, n]; -1 writes nothing.

    `slots`, `positions` int32 [batch, n]; with rotary positions also those of `_angles`.
    """
    real = jnp.maximum(positions, 0)
    aux: dict[str, Any] = {
        # Scatter drops indices beyond the end; a negative index would wrap.
        "slots": jnp.where(positions < 0, max_len, positions),
        "positions": real,
    }
    if config.positions == "rotary":
        aux |= _angles(config, real)
    return aux
