"""Types that modules exchange: batches, the `Model` record, its `Context`.

The plain defaults compute on one device. Dims in docstrings of the package:

    batch    rows of a global batch (inside the compiled step: this device's rows of one microbatch)
    seq      positions of a row on this device, all of them unless the context axis splits
             rows; `seq_shard` = seq / tensor if sequence parallelism splits those again
    d_model  width of the residual stream
    heads, kv_heads, head_dim, mlp, vocab, layers   as in the literature
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxdist.settings.declare import ConfigError

Array: TypeAlias = jax.Array
Params: TypeAlias = dict[str, Any]
"""Plain nested dicts of arrays; stacked layers are in `layers` as `[num_layers, ...]`."""

Batch: TypeAlias = dict[str, Array]
"""Named arrays whose first dim is the batch.

Text: `tokens`, `targets` int32 [batch, seq]; `weights` float32 [batch, seq] (0 = not in the loss);
packed rows also `segments` int32 [batch, seq] (document ids in a row, 1, 2, ...; 0 = padding) and
`positions` int32 [batch, seq] (position inside the document).
Images: `images` float32 [batch, height, width, channels]; `labels` int32, `weights` [batch].
The step adds `rows` int32 [batch]: the row's index in the global batch, for random bits."""

REFERENCE, MISMATCHED = "reference_logps", "kl_"
"""Fields of preference tuning: the reference's log-probability of each row, float32 [batch], and
the start of the names of fields with another record's completion, for the baseline of KTO."""

ROW_SHARE = "row_share"
"""Field of objectives of complete rows: part of an example that a row is, float32 [batch]."""

TEACHER_TOKENS, TEACHER_LOGPS = "teacher_tokens", "teacher_logps"
"""Fields of distillation: the teacher's most probable tokens, int32 [batch, seq, outcomes], and
their log-probabilities, float32 [batch, seq, outcomes + 1], the last of any other token."""

Sums: TypeAlias = dict[str, Array]
"""Loss terms and metrics: name -> sum over the rows of a microbatch on a device, mostly float32 [].

The objective returns `loss` (nats) and `weight` (number of tokens or rows), and may add others
(`correct`). Head and blocks may return any sums, or {}. Each name is summed exactly once over
layers, head, microbatches and devices, on every mesh and schedule. Means are sum / weight.

Training differentiates `loss` + `aux_loss` of objective, head and blocks (`trained_loss`).
`aux_loss` is for regularizers, such as a router's balance loss. It is not part of the reported
loss. All other names are metrics.

Over the `tensor` axis, the JAX type of the sum decides. A sum that varies over it is this device's
part (its tokens under sequence parallelism, its heads) and is summed. A sum that does not vary
counts once. So does, over the `context` axis, a sum computed only from `Context.sum` over "seq".
Compute sums from the residual stream, inputs of `Context.enter` or a split product. Outputs of
`enter` vary although they are equal on all devices, so their sums would count several times."""


BATCH_STATISTICS = "batch_statistics"
"""Key in a head's sums for the batch statistics of running averages: float32 arrays, equal on
devices that split rows."""

LAYER_SUM = "layer/"
"""Start of the names of sums with an element for each layer, float32 [num_layers, ...]."""

TRAINED = ("loss", "aux_loss")
"""Names of the sums that training differentiates."""


def trained_loss(sums: Sums) -> Array:
    """Return the sum of the values that training differentiates (`TRAINED`), float32 []."""
    first, *others = (sums[name] for name in TRAINED if name in sums)
    return sum(others, start=first)


def add_sums(left: Sums, right: Sums) -> Sums:
    """Return the sum of two `Sums` by name; a missing name counts as 0."""
    both = {name: left[name] + right[name] for name in left if name in right}
    return {**left, **right, **both}


Storage: TypeAlias = Literal["float32", "bfloat16", "int8", "uint8"]
Update: TypeAlias = Literal["gradient", "statistic", "increment", "none"]

LAYER_INPUT = "layer_input"
"""Name of each layer's input, [batch, seq_shard, d_model], for remat policies that offload."""


def offloaded_names(remat: str) -> tuple[str, ...]:
    """Return the names of the values that a remat policy moves to the host's memory."""
    kind, _, names = remat.partition(":")
    return tuple(names.split(",")) if kind == "offload" else ()


class Dims(tuple[str | None, ...]):
    """Logical names of an array's dims, e.g. `Dims(("layers", "d_model", "mlp"))`; a pytree leaf.

    Mesh axes never split a dim named None. The array is float32 and trained; else see `Parameter`.
    """

    storage: Storage = "float32"
    update: Update = "gradient"
    keeps_dtype: bool = False
    num_weights: int = 1

    def renamed(self, names: Iterable[str | None]) -> Dims:
        """Return the same metadata with other names."""
        return type(self)(names, **vars(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionMask:
    """The keys that a query attends to, without the [queries, keys] mask.

    Attributes:
        causal: a query sees the keys up to its own position.
        sliding_window: number of newest keys that a query sees, including its own; 0 = all.
        segments: int32 [batch, seq], documents of packed rows; a query sees its own; None = one.
        query_positions: int32 [batch, queries], index of each query among the keys; None = queries
            and keys have the same positions 0, 1, ...
        full_every: the last layer of each group of this many layers has no window; 0 = none.
        layer: index of the layer in the model, int32 scalar; used if `full_every` is set.
    """

    causal: bool = True
    sliding_window: int = 0
    segments: Array | None = None
    query_positions: Array | None = None
    full_every: int = 0
    layer: Any = 0

    @property
    def has_no_window(self) -> Any:
        """Return True, bool scalar, if this layer has no window."""
        return (self.layer + 1) % self.full_every == 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionDropout:
    """Dropout of attention, equal on every mesh: by `key` and global `rows`, int32 [batch]."""

    rate: float
    key: Array
    rows: Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionCall:
    """The arguments with which a model's layers call `Context.attend` in training.

    Attributes:
        sliding_window: number of newest keys that a query sees, including its own; 0 = all.
        full_every: every layer at this interval has no window; 0 = none.
        softcap: bound of the scores; 0 = none.
        sinks: whether each head has a sink, a score in the softmax without a value.
    """

    sliding_window: int = 0
    full_every: int = 0
    kernel: str = "auto"
    dropout: float = 0.0
    softcap: float = 0.0
    sinks: bool = False

    @property
    def windows(self) -> tuple[int, ...]:
        """Return the distinct attention windows of the layers, in keys; 0 = no window."""
        differ = self.full_every and self.sliding_window
        return (self.sliding_window, 0) if differ else (self.sliding_window,)


@dataclasses.dataclass(frozen=True)
class ExpertsCall:
    """The sizes with which a model's layers call `Context.experts`; 0 = they do not.

    Attributes:
        per_token: number of experts of each token.
        ways: number of products [tokens, mlp] that the activation joins.
    """

    per_token: int = 0
    ways: int = 1


def dot(dims: str, x: Array, w: Array, *, out_dtype: Any = None) -> Array:
    """Multiply activations by a weight, with named dims: the default `Context.dot`.

    `dims` is e.g. "batch seq d_model, d_model mlp -> batch seq mlp"; dims that are not in the
    result are contracted. w is cast to the dtype of x [*first dims named]. The result has
    `out_dtype`; None = the dtype of x.
    """
    inputs, _, output = dims.partition("->")
    names = dict.fromkeys(inputs.replace(",", " ").split())
    letters = {name: chr(ord("a") + i) for i, name in enumerate(names)}
    left, right, out = (
        "".join(letters[name] for name in part.split()) for part in (*inputs.split(","), output)
    )
    return jnp.einsum(
        f"{left},{right}->{out}", x, w.astype(x.dtype), preferred_element_type=out_dtype
    )


class TokenHead(NamedTuple):
    """The factors of the logits, which the objective multiplies chunk by chunk.

    Attributes:
        x: input of the head, [batch, seq, d_model], compute dtype.
        kernel: output kernel, [d_model, vocab_shard], compute dtype.
        vocab_size: real entries of the vocabulary; columns from there on are padding.
    """

    x: Array
    kernel: Array
    vocab_size: int
    softcap: float = 0.0


class TokenLogps(NamedTuple):
    """Predictions of the model for each token.

    Attributes:
        logps: log-probability of the target, float32 [batch, seq]; -inf if top-k or top-p drops it.
            For several targets [batch, seq, outcomes + 1]; the last outcome is any other token.
        entropy: nats, float32 [batch, seq]; for several targets, of these outcomes.
    """

    logps: Array
    entropy: Array


class Routing(NamedTuple):
    """The experts that a router chose for each token.

    Attributes:
        experts: chosen experts, int32 [batch, seq, experts_per_token]; num_experts = dropped.
        shares: factor of each expert's output, float32 [batch, seq, experts_per_token].
    """

    experts: Array
    shares: Array


def _identity(x: Any) -> Any:
    return x


def _missing(*_: Any, **__: Any) -> Any:
    raise ValueError(
        "this Context lacks attend, experts or a loss: build it with step.make_context"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """Execution context of a model: dtypes, collectives, kernels. The defaults are one device.

    Models call the hooks `enter`, `leave` and `split` for tensor and sequence parallelism, `dot`
    for every matrix product with a weight and `attend` for attention.

    Attributes:
        dtype: compute dtype of matrix products and of activations between blocks.
        dot: (dims, x, w, out_dtype=None) -> product of x and w; see `types.dot`.
        attend: (query [batch, queries, heads, head_dim], key [batch, keys, kv_heads, head_dim],
            value like key, AttentionMask, kernel="auto", dropout=None, softcap=0.0, sink=None or
            [heads]) -> like query, with this device's heads. See `attention.make_attend`.
        enter: [batch, seq_shard, ...] -> [batch, seq, ...]; before a column-parallel product.
        leave: partial sums [batch, seq, ...] -> [batch, seq_shard, ...]; after a row-parallel one.
        split: [batch, seq, ...], equal over `tensor` -> this device's [batch, seq_shard, ...].
        experts: (x [batch, seq, d_model], `Routing` of these tokens, up, down, activate, biases
            of both products if any) -> (this device's partial sums [batch, seq, d_model], number
            of further exchanges or None); see `experts.make_experts`.
        sum: (x [...], over) -> the sum of x over the devices that split `over`: "batch" (the
            rows), "seq" (the positions of a row), "seq_shard" (the positions of the residual
            stream) or "tensor" (the products of a layer). The sum of 1 is an int.
        tensor_index: index of this device on the `tensor` axis (0 on one device).
        position_ids: n -> int32 [n], the index in its row of each of this device's n positions.
        token_loss: (TokenHead, targets, weights, regularizers=None, *, by_row=False) -> Sums; the
            cross-entropy, fused with the head's product. See `losses.token_cross_entropy`.
        token_logps: (TokenHead, targets [batch, seq] or [batch, seq, outcomes], temperature=1.0,
            top_k=0, top_p=1.0) -> `TokenLogps`, differentiable. `token_loss` is faster.
        dropout_key: PRNG key of the step, in blocks of the layer; None = evaluation, no dropout.
        layer: index of the current block among the stacked layers, int32 scalar.
        platform: "cpu" or "gpu", of the mesh and not of the default backend.
    """

    dtype: Any = jnp.float32
    dot: Callable[..., Array] = dot
    attend: Callable[..., Array] = _missing
    enter: Callable[[Array], Array] = _identity
    leave: Callable[[Array], Array] = _identity
    split: Callable[[Array], Array] = _identity
    experts: Callable[..., tuple[Array, Any]] = _missing
    sum: Callable[[Any, Literal["batch", "seq", "seq_shard", "tensor"]], Any] = (
        lambda x, over: x  # one device has all terms
    )
    tensor_index: Callable[[], Any] = int
    position_ids: Callable[[int], Array] = jnp.arange
    token_loss: Callable[..., Sums] = _missing
    token_logps: Callable[..., TokenLogps] = _missing
    dropout_key: Array | None = None
    layer: Any = 0
    platform: str = "cpu"

    @property
    def training(self) -> bool:
        """Return True if there is a dropout key: batch norm then uses the batch's statistics."""
        return self.dropout_key is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoding:
    """Text generation of a model: pure functions over a key/value cache.

    Attributes:
        init_cache: (batch, max_len, dtype) -> cache, each leaf [layers, batch, max_len, ...].
        cache_dims: logical dims of the cache's leaves.
        step: (params, cache, tokens [batch, n], positions [batch, n], context) ->
            (logits float32 [batch, n, vocab_size], cache). Position -1 marks padding.
        max_len: longest sequence that positions allow.
    """

    init_cache: Callable[..., Any]
    cache_dims: Any
    step: Callable[..., tuple[Array, Any]]
    max_len: int


Objective: TypeAlias = Callable[[Any, Batch, Context], Sums]
"""(output of the head, this device's rows of one microbatch, context) -> Sums.

Optional attributes: `rows_per_example` is the number of adjacent rows per example, by default 1.
`prepare` is called first: (global batch, logps) -> batch with more fields [rows, ...]. Its `logps`
maps (batch, adapters=True) to the summed log-probability of each row's targets with a weight above
0, float32 [rows]; `extra_forwards` counts its calls. `unit` names what `weight` counts."""


def rows_per_example(objective: Objective | None) -> int:
    """Return how many adjacent rows form one example of the objective; by default 1."""
    size = getattr(objective, "rows_per_example", 1)
    if not isinstance(size, int) or size < 1:
        raise ConfigError(
            f"rows_per_example={size!r} of the objective. Use an integer of 1 or more."
        )
    return size


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """A model as pure functions over plain parameter dicts, plus the names of its dims.

    With stacked layers: `embed`, then `block` for each layer, then `head` (`core/forward.py`).
    Without (`block` is None): `head(params, None, batch, context)` does all of it.

    Attributes:
        name: for logs and errors.
        init: key -> params in their storage formats. It is pure: it runs under `jit`.
        axes: tree like params with a `Dims` at each leaf.
        dims: size of each logical dim.
        head: (params, x, batch, context) -> (output, Sums): a `TokenHead`, logits, or any arrays
            that the objective reads; and sums of the head's own, or {}.
        objective: computes the loss from that output, unless the run has another objective.
        embed: (params, batch, context) -> x [batch, seq_shard, d_model].
        prepare: (batch, context) -> aux, the input of every block in addition to x.
        block: (one layer's params, x [batch, seq_shard, d_model], aux, context) -> (x, Sums). A
            term of the loss is returned as `aux_loss`, any other name is a metric (see `Sums`).
        increments: (sums of layers of the step, [num_layers, ...]) -> tree of the increments of the
            parameters with update="increment", [num_layers, ...]; None if there are none.
        step_sums: names of sums of layers (`LAYER_SUM`) of which the blocks read the total of a
            train step. With several microbatches or pipeline stages, an earlier forward pass
            computes the totals, and `batch[name]` has them, float32 [batch, num_layers, ...].
            Otherwise, and in evaluation, the batch lacks them.
        num_layers: size of the stacked dim; 0 if there is none.
        flops_per_token: floating point operations of forward and backward for one unit of
            `weight` by convention: "causal" counts half of S² attention, "full" all of it.
        unit: unit of `weight`, "tokens" or "images".
        tensor: "manual" if the model calls the hooks; "auto" = XLA shards the axis by `axes`.
        sequence: sequence parallelism may split dim 1 of what `enter`, `leave`, `split` receive.
        context_parallel: the context axis may split rows. The model takes positions from the batch
            or from `Context.position_ids`, and reads other positions through `Context.attend` only.
        rules: extra logical dim -> mesh axis entries for dims of this model's own.
        decoding: how to generate text, or None.
        vocab_size: tokens of the vocabulary; `dims["vocab"]` holds its padding too. 0 = none.
        num_classes: classes that its labels may name; 0 = it has none, or any number.
        attention_call: arguments of its layers to `Context.attend`, for the plan of the step.
        experts_call: sizes of its layers' calls of `Context.experts`, for the same.
        row: name -> shape and dtype of one row of a batch; {} = text rows of the training length.
    """

    name: str
    init: Callable[[Array], Params]
    axes: Params
    dims: Mapping[str, int]
    head: Callable[..., tuple[Any, Sums]] = _missing
    objective: Objective = _missing
    embed: Callable[..., Array] | None = None
    prepare: Callable[..., Any] | None = None
    block: Callable[..., tuple[Array, Sums]] | None = None
    num_layers: int = 0
    increments: Callable[[Sums], Params] | None = None
    step_sums: tuple[str, ...] = ()
    flops_per_token: Mapping[str, float] = dataclasses.field(default_factory=dict)
    unit: Literal["tokens", "images"] = "tokens"
    tensor: Literal["manual", "auto"] = "manual"
    sequence: bool = False
    context_parallel: bool = False
    rules: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    decoding: Decoding | None = None
    vocab_size: int = 0
    num_classes: int = 0
    attention_call: AttentionCall = AttentionCall()
    experts_call: ExpertsCall = ExpertsCall()
    row: Mapping[str, jax.ShapeDtypeStruct] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if _missing in (self.head, self.objective):
            raise ConfigError(
                f"model {self.name!r} has no head or no objective. Use Model(head=..., "
                "objective=...): head(params, x, batch, context) returns (output, {}), where the "
                "output of a language model is TokenHead(x, kernel, vocab_size). objective(output, "
                "batch, context) returns the sums, e.g. jaxdist.objectives.cross_entropy."
            )
