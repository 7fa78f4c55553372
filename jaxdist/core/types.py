"""What rooms exchange: batches, the `Model` record, its `Context`, errors and config fields.

Nothing here computes. Shape vocabulary used in every docstring of the package:

    batch    rows of a global batch (inside the compiled step: this device's rows of one microbatch)
    seq      positions of a row; `seq_shard` = seq / tensor where sequence parallelism splits it
    d_model  width of the residual stream
    heads, kv_heads, head_dim, mlp, vocab, layers   as in the literature
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

Array: TypeAlias = jax.Array
Params: TypeAlias = dict[str, Any]
"""Plain nested dicts of arrays; stacked layers live under `layers` as `[num_layers, ...]`."""

Batch: TypeAlias = dict[str, Array]
"""Named arrays whose first dim is the batch.

Text: `tokens`, `targets` int32 [batch, seq]; `weights` float32 [batch, seq] (0 = not in the loss);
`segments` int32 [batch, seq] (documents of a packed row, 1, 2, ...; 0 = padding; absent when rows
are not packed); `positions` int32 [batch, seq] (position inside the document).
Images: `images` float32 [batch, height, width, channels]; `labels` int32, `weights` [batch].
Inside the step `rows` int32 [batch] is added: the row's index in the global batch, so that random
bits depend on the sample and never on the mesh.
"""

Sums: TypeAlias = dict[str, Array]
"""Float32 scalars summed over samples: always `loss` (nats) and `weight`; a model may add others
(`correct`). Means are formed once, after summing over every device and microbatch."""


class ConfigError(ValueError):
    """What the user asked for breaks rules; `problems` lists all of them, one line each.

    Every line says what was given, what is allowed and the fix. Commands print it and exit 2.
    """

    def __init__(self, problems: list[str]):
        self.problems = list(problems)
        super().__init__("\n".join(self.problems))


class Dims(tuple[str | None, ...]):
    """Logical names of an array's dims, e.g. `Dims(("layers", "d_model", "mlp"))`; a pytree leaf.

    `None` names a dim that no mesh axis may split.
    """

    __slots__ = ()


def setting(default: Any, doc: str) -> Any:
    """A config field: its default and one line of help with its unit (shown by `--help`)."""
    if isinstance(default, list | dict):
        return dataclasses.field(
            default_factory=lambda: type(default)(default), metadata={"doc": doc}
        )
    return dataclasses.field(default=default, metadata={"doc": doc})


def _identity(x: Any) -> Any:
    return x


def _zero() -> int:
    return 0


def _no_loss(*_: Any, **__: Any) -> Sums:
    raise ValueError("this Context has no losses: build it with step.make_context or pass one")


def _no_layers(*_: Any, **__: Any) -> Array:
    raise ValueError("this Context has no run_layers: build it with step.make_context or pass one")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """What a model is told of where it runs. The defaults are one device.

    The three hooks are all that tensor and sequence parallelism ask of a model. Inside the step
    they are collectives over the `tensor` mesh axis; on one device they are identities.

    Attributes:
        dtype: compute dtype of matrix products and of activations between blocks.
        enter: [batch, seq_shard, ...] -> [batch, seq, ...]; before a column-parallel product.
        leave: partial sums [batch, seq, ...] -> [batch, seq_shard, ...]; after a row-parallel one.
        split: [batch, seq, ...] known to all -> this device's [batch, seq_shard, ...].
        tensor_index: index of this device on the `tensor` axis (0 on one device).
        run_layers: (block, layers, x, aux, context) -> x; a scan, or the stage of a pipeline.
        token_loss: (x [batch, seq, d_model], kernel [d_model, vocab_shard], targets, weights,
            vocab_size=...) -> Sums; cross-entropy over a vocabulary that may be split.
        label_loss: (logits [batch, classes], labels, weights) -> Sums; cross-entropy and hits.
        gather: params -> params whose leaves outside the stacked layers are whole, in `dtype`.
        dropout_key: PRNG key for this step and layer, or None when nothing is dropped.
        platform: "cpu" or "gpu", read from the mesh and never from the default backend.
        compute_capability: e.g. "9.0" on an NVIDIA GPU, "" elsewhere.
    """

    dtype: Any = jnp.float32
    enter: Callable[[Array], Array] = _identity
    leave: Callable[[Array], Array] = _identity
    split: Callable[[Array], Array] = _identity
    tensor_index: Callable[[], Any] = _zero
    run_layers: Callable[..., Array] = _no_layers
    token_loss: Callable[..., Sums] = _no_loss
    label_loss: Callable[..., Sums] = _no_loss
    gather: Callable[[Params], Params] = _identity
    dropout_key: Array | None = None
    platform: str = "cpu"
    compute_capability: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
    """How a model generates: pure functions over a key/value cache.

    Attributes:
        init_cache: (batch, max_len, dtype) -> cache, each leaf [layers, batch, max_len, ...].
        cache_dims: logical dims of the cache's leaves.
        step: (params, cache, tokens [batch, n], positions [batch, n], context) ->
            (logits float32 [batch, n, vocab], cache). Position -1 marks padding.
        max_len: longest sequence that positions allow.
    """

    init_cache: Callable[..., Any]
    cache_dims: Any
    step: Callable[..., tuple[Array, Any]]
    max_len: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionInfo:
    """How the blocks of a decoder attend, for estimates of memory and time.

    Attributes:
        sliding_window: keys a query sees, itself included; 0 = all before it.
        kernel: (context, packed) -> "cudnn" or "xla", the kernel that runs there; `packed` says
            whether rows hold several documents.
    """

    sliding_window: int = 0
    kernel: Callable[[Context, bool], str] = lambda context, packed: "xla"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """A model as pure functions over plain parameter dicts, plus the names of its dims.

    With stacked layers: `embed`, then `block` for each layer (`Context.run_layers`), `head_loss`.
    Without (`block` is None): `head_loss(params, None, batch, context)` does all of it.

    Attributes:
        name: for logs and errors.
        init: key -> params, float32. Pure, so that it runs under `jit` with output shardings.
        axes: tree like params with a `Dims` at each leaf.
        dims: size of each logical dim; what the mesh must divide.
        head_loss: (params, x, batch, context) -> Sums over the local batch.
        embed: (params, batch, context) -> x [batch, seq_shard, d_model].
        prepare: (batch, context) -> aux, what every block needs beside x (rotary angles, masks).
        block: (one layer's params, x, aux, context) -> x.
        num_layers: size of the stacked dim; 0 when there is none.
        flops_per_token: floating point operations of forward and backward for one unit of
            `weight` (a token, an image) by convention: "causal" counts half of S² attention,
            "full" all of it.
        unit: what `weight` counts, "tokens" or "images".
        tensor: "manual" when the model calls the hooks; "auto" leaves the tensor axis to XLA's
            partitioner, guided by `axes`.
        sequence: whether `enter`/`leave`/`split` act on a sequence in dim 1 that sequence
            parallelism may split.
        rules: extra logical dim -> mesh axis entries for dims of this model's own.
        decoding: how to generate text, or None.
        vocab_size: tokens of the vocabulary; `dims["vocab"]` holds its padding too. 0 = none.
        row: name -> shape and dtype of one row of a batch; {} = text rows of the training length.
        attention: given where a block is one attention and one MLP, and `dims` has d_model, heads,
            kv_heads, head_dim, mlp and vocab: the planner then uses its formulas for decoders.
            Other models it traces.
        notes: facts worth one log line at start (chosen kernels and why).
    """

    name: str
    init: Callable[[Array], Params]
    axes: Params
    dims: Mapping[str, int]
    head_loss: Callable[..., Sums]
    embed: Callable[..., Array] | None = None
    prepare: Callable[..., Any] | None = None
    block: Callable[..., Array] | None = None
    num_layers: int = 0
    flops_per_token: Mapping[str, float] = dataclasses.field(default_factory=dict)
    unit: Literal["tokens", "images"] = "tokens"
    tensor: Literal["manual", "auto"] = "manual"
    sequence: bool = False
    rules: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    decoding: Decoding | None = None
    vocab_size: int = 0
    row: Mapping[str, jax.ShapeDtypeStruct] = dataclasses.field(default_factory=dict)
    attention: AttentionInfo | None = None
    notes: Callable[[Context], list[str]] | None = None

    def loss(self, params: Params, batch: Batch, context: Context) -> Sums:
        """Summed loss and weight of the local batch: the function that training differentiates."""
        if self.block is None or self.embed is None:
            return self.head_loss(params, None, batch, context)
        x = self.embed(params, batch, context)
        aux = self.prepare(batch, context) if self.prepare is not None else batch
        x = context.run_layers(self.block, params["layers"], x, aux, context)
        return self.head_loss(params, x, batch, context)
