"""cuDNN's fused attention through private operations of jax, and its use for packed documents.

`jax.nn.dot_product_attention` does not support documents, and its gradient omits the contribution
of the log-sum-exp. XLA cannot shard these operations: call them inside `shard_map`.

One call handles at most `DOCUMENTS` documents per row, because scratch memory grows with them.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Bool, Float, Float32, Int

from jaxdist.core import collectives
from jaxdist.core.attention.blockwise import KV, Lse, Q, Rule, Segments, declare_alike
from jaxdist.core.types import Array
from jaxdist.settings import ConfigError

try:
    from jax._src.cudnn import fused_attention_stablehlo as operations
except (ImportError, AttributeError):  # a private module of jax, which may be moved
    operations = None  # type: ignore[assignment]

DOCUMENTS = 4
"""Documents per row and call. We assume that cuDNN allocates the scratch memory of a complete row
for each: 8 would need 4 GiB for an 8B model with two rows of 8,192."""

Stats: TypeAlias = Float32[Array, "sequences heads queries"]
"""cuDNN's log-sum-exp by position in each sequence; a sequence is a row or a document."""


class Sequences(NamedTuple):
    """Sequences of each row of a batch; empty ones have length 0."""

    starts: Int[Array, "batch number"]
    lengths: Int[Array, "batch number"]


class Documents(NamedTuple):
    """Documents of packed rows: for each position, the index of its document in the row."""

    number: Segments

    @classmethod
    def of(cls, segments: Segments) -> Documents:
        """Return the documents of each row, numbered by counting changes of the segment id."""
        changes = segments[:, 1:] != segments[:, :-1]
        first = jnp.zeros_like(segments[:, :1])
        return cls(jnp.concatenate([first, jnp.cumsum(changes, 1, dtype=jnp.int32)], 1))

    @property
    def num_calls(self) -> Int[Array, ""]:
        """Number of kernel calls that the row with the most documents needs."""
        return jnp.max(self.number) // DOCUMENTS + 1

    def sequences(self, call: Int[Array, ""]) -> Sequences:
        """Return the documents that a call handles; calls count from 0."""
        documents = call * DOCUMENTS + jnp.arange(DOCUMENTS, dtype=jnp.int32)
        number, documents = self.number[:, None, :], documents[None, :, None]
        count = lambda mask: jnp.sum(mask, -1, dtype=jnp.int32)
        return Sequences(count(number < documents), count(number == documents))

    def taken(self, call: Int[Array, ""]) -> Bool[Array, "batch seq"]:
        """Return the mask of positions whose documents a call handles."""
        return self.number // DOCUMENTS == call

    def lse_of(self, stats: Stats, call: Int[Array, ""], starts: Int[Array, "batch number"]) -> Lse:
        """Return the log-sum-exp of the positions that a call handles; undefined elsewhere."""
        batch, seq = self.number.shape
        slot = jnp.clip(self.number - call * DOCUMENTS, 0, DOCUMENTS - 1)
        inside = jnp.arange(seq) - jnp.take_along_axis(starts, slot, axis=1)
        stats = stats.reshape(batch, DOCUMENTS, -1, seq)
        row = jnp.arange(batch)[:, None]
        return stats[row, slot, :, jnp.clip(inside, 0, seq - 1)]


def stats_of(lse: Lse, starts: Int[Array, "batch number"]) -> Stats:
    """Return the log-sum-exp in cuDNN's layout: the inverse of `Documents.lse_of`."""
    batch, seq, heads = lse.shape
    positions = jnp.clip(starts[:, :, None] + jnp.arange(seq), 0, seq - 1)
    stats = lse[jnp.arange(batch)[:, None, None], positions]  # [batch, DOCUMENTS, seq, heads]
    return jnp.moveaxis(stats, -1, 2).reshape(-1, heads, seq)


def attend_packed(query: Q, key: KV, value: KV, segments: Segments, rule: Rule) -> Q:
    """Return attention within each document of the rows; padding counts as one document."""
    if reason := too_large(query.shape):
        raise ConfigError(f"{reason}. Use model.attention='xla', or smaller microbatches.")
    return _attend_packed(*declare_alike(query, key, value, segments), rule)


def too_large(shape: tuple[int, ...]) -> str:
    """Return why cuDNN cannot index packed queries of this shape; "" = it can."""
    if math.prod(shape) < 2**31:
        return ""
    return f"cuDNN counts the elements of packed queries in 32 bits, these are {shape}"


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend_packed(query: Q, key: KV, value: KV, segments: Segments, rule: Rule) -> Q:
    return _packed_forward(query, key, value, segments, rule)[0]


def _packed_forward(query: Q, key: KV, value: KV, segments: Segments, rule: Rule) -> tuple[Q, Any]:
    out, lse = forward_packed(query, key, value, segments, rule)
    out, lse = checkpoint_name(out, "attention"), checkpoint_name(lse, "attention")
    return out, (query, key, value, out, lse, segments)


def _packed_backward(rule: Rule, saved: Any, cotangent: Q) -> Any:
    query, key, value, out, lse, segments = saved
    inputs = (query, key, value, out, lse, cotangent)
    return *backward_packed(*inputs, segments=segments, rule=rule), None


_attend_packed.defvjp(_packed_forward, _packed_backward)


def forward_packed(query: Q, key: KV, value: KV, segments: Segments, rule: Rule) -> tuple[Q, Lse]:
    """Return the attention within each document and its float32 log-sum-exp; no gradient."""
    documents = Documents.of(segments)

    def attend(call: Array, own: Sequences) -> tuple[Array, Array]:
        out, stats = forward(query, key, value, rule, sequences=(own, own))
        return out, documents.lse_of(stats, call, own.starts)

    lse = jnp.zeros_like(query[..., 0], jnp.float32)
    return _in_calls(documents, attend, (jnp.zeros_like(query), lse))


def backward_packed(
    query: Q, key: KV, value: KV, out: Q, lse: Lse, cotangent: Q, *, segments: Segments, rule: Rule
) -> tuple[Q, KV, KV]:
    """Return gradients in the inputs' dtypes; `out` and `lse` are over all keys of the queries."""

    def pull_back(call: Array, own: Sequences) -> tuple[Array, Array, Array]:
        stats = stats_of(lse, own.starts)
        return backward(query, key, value, out, stats, cotangent, rule, sequences=(own, own))

    zeros = tuple(jnp.zeros_like(x) for x in (query, key, value))
    return _in_calls(Documents.of(segments), pull_back, zeros)


def _in_calls(documents: Documents, run: Callable[..., Any], totals: Any) -> Any:
    """Run `run(call, sequences)` for each call; select results [batch, seq, ...] by document."""

    def step(carry: tuple[Array, Any]) -> tuple[Array, Any]:
        """Write the results of call carry[0], int32 [], to the positions of its documents."""
        call, totals = carry
        taken = documents.taken(call)
        mask = lambda x: jnp.expand_dims(taken, tuple(range(2, x.ndim)))
        results = run(call, documents.sequences(call))
        totals = jax.tree.map(lambda new, old: jnp.where(mask(new), new, old), results, totals)
        return call + 1, totals

    num_calls = documents.num_calls
    first = collectives.vary(jnp.int32(0), tuple(collectives.varying_axes(num_calls)))
    return lax.while_loop(lambda carry: carry[0] < num_calls, step, (first, totals))[1]


def forward(
    query: Q,
    key: KV,
    value: KV,
    rule: Rule,
    *,
    sequences: tuple[Sequences, Sequences] | None = None,
) -> tuple[Q, Stats]:
    """Call the kernel once; return its output and log-sum-exp. Not differentiable.

    `sequences` are those of the queries and of the keys, the same number (> 1) in every row.
    """
    operands = (query, key, value, *_others(query, key, sequences))
    settings = _settings(query, rule, sequences)
    primitive = operations._dot_product_attention_fwd_p
    out, stats = primitive.bind(*operands, is_training=True, **settings)
    return out, stats


def backward(
    query: Q,
    key: KV,
    value: KV,
    out: Q,
    stats: Stats,
    cotangent: Q,
    rule: Rule,
    *,
    sequences: tuple[Sequences, Sequences] | None = None,
) -> tuple[Q, KV, KV]:
    """Call the kernel once; return gradients through these keys, as `backward_packed` does."""
    operands = (query, key, value, *_others(query, key, sequences), stats, out, cotangent)
    primitive = operations._dot_product_attention_bwd_p
    dq, dk, dv = primitive.bind(*operands, **_settings(query, rule, sequences))
    return dq, dk, dv


def _others(query: Q, key: KV, sequences: tuple[Sequences, Sequences] | None) -> tuple[Array, ...]:
    """Return bias, sequence lengths and offsets, page tables; unused ones are empty, shape [0]."""
    unused = jnp.zeros(0, query.dtype)
    if sequences is None:
        return (unused,) * 7
    # In jax 0.10 its own helper also uses the query's number of heads for the key.
    mine, others = sequences
    firsts = _first_elements(mine, query), _first_elements(others, key)
    return (unused, mine.lengths, others.lengths, *firsts, unused, unused)


def _first_elements(
    sequences: Sequences, x: Float[Array, "batch seq heads head_dim"]
) -> Int[Array, "batch number_plus_1"]:
    """Return each sequence's offset in x in elements, then `batch` times the end of x."""
    batch, seq = x.shape[:2]
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None] * seq
    starts = (sequences.starts + rows).reshape(-1)
    rest = jnp.full(batch, batch * seq, jnp.int32)
    return jnp.concatenate([starts, rest]).reshape(batch, -1) * math.prod(x.shape[2:])


def _settings(query: Q, rule: Rule, sequences: Any) -> dict[str, Any]:
    kinds = operations.MaskType
    mask = kinds.CAUSAL if rule.causal else kinds.NO_MASK
    if sequences is not None:
        mask = kinds.PADDING_CAUSAL if rule.causal else kinds.PADDING
    settings = {
        "scale": 1 / math.sqrt(query.shape[-1]),
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),  # no bias and no bias gradient
        "mask_type": mask,
        "layout": operations.AttentionLayout.BTNH.value,
        "sliding_window_length": rule.window or None,
    }
    lowering = operations._dot_product_attention_bwd_cuda_lowering
    newer = {"score_mod_name", "score_mod_jaxpr"} & inspect.signature(lowering).parameters.keys()
    return settings | dict.fromkeys(newer)


def missing() -> str:
    """Return why jax's operations are unavailable; "" = they are available."""
    names = ("_dot_product_attention_fwd_p", "_dot_product_attention_bwd_p")
    if all(hasattr(operations, name) for name in names):
        return ""
    return f"jax {jax.__version__} has moved cuDNN's operations"


def keeps_attention(primitive: Any, *avals: Any, **params: Any) -> bool:
    """Return True for outputs and log-sum-exps of attention, for remat policies."""
    if primitive.name == "name":
        return params["name"] == "attention"
    return primitive.name == "dot_product_attention_fwd_wrapper"


def emulate_gpu(compute_capability: str, version: tuple[int, int, int]) -> None:
    """Make jax's checks before cuDNN attention use a described GPU, not the local backend."""
    numbers = lambda text: tuple(int(number) for number in text.split("."))
    capability, (major, minor, patch) = numbers(compute_capability), version
    answers = {
        "check_cudnn_version": lambda: major * 10_000 + minor * 100 + patch,
        "check_compute_capability": lambda least: capability >= numbers(least),
        "is_cuda_compute_capability_equal": lambda other: capability == numbers(other),
    }
    for name, answer in answers.items():
        if not hasattr(operations, name):
            raise RuntimeError(f"jax {jax.__version__} has no {name} before cuDNN attention")
        setattr(operations, name, answer)
