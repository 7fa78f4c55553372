"""cuDNN's fused attention by its operations, and with them attention to packed documents.

`jax.nn.dot_product_attention` knows no documents, and its gradient leaves out what flows into the
log-sum-exp. So `forward` and `backward` bind the operations of jax's own module, inside
`shard_map` alone: nothing here tells XLA how to split them.

A call takes at most `DOCUMENTS` documents of a row, since its scratch grows with them. A row that
holds more takes further calls, so that it is never wrong, and only it is slower.

Shapes: query [batch, queries, heads, head_dim]; key and value [batch, keys, kv_heads, head_dim];
log-sum-exp float32 [batch, queries, heads]; all of this device.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxdist.core import collectives
from jaxdist.core.attention.blockwise import Rule, declare_alike
from jaxdist.core.types import Array
from jaxdist.settings import ConfigError

try:
    from jax._src.cudnn import fused_attention_stablehlo as operations
except (ImportError, AttributeError):  # jax may move what is private
    operations = None  # type: ignore[assignment]

DOCUMENTS = 4
"""Documents of a row that one call takes. cuDNN is taken to give each the scratch of a whole row:
8B in rows of 8,192, two at a time, would need 4 GiB for 8."""


class Sequences(NamedTuple):
    """Parts of the rows of a batch: of queries, or of the keys that they attend to.

    Attributes:
        starts: int32 [batch, number], place of the first position of each in its row; the row's
            length where there is none.
        lengths: int32 [batch, number], positions; 0 where there is none.
    """

    starts: Array
    lengths: Array


class Documents(NamedTuple):
    """Documents of packed rows, counted along the row.

    Attributes:
        number: int32 [batch, seq], of the document of each position: 0, 1, ...
    """

    number: Array

    @classmethod
    def of(cls, segments: Array) -> Documents:
        """From int32 [batch, seq] that changes where the next document (or padding) begins."""
        changes = segments[:, 1:] != segments[:, :-1]
        first = jnp.zeros_like(segments[:, :1])
        return cls(jnp.concatenate([first, jnp.cumsum(changes, 1, dtype=jnp.int32)], 1))

    @property
    def num_calls(self) -> Array:
        """Calls that the fullest row needs, int32 []."""
        return jnp.max(self.number) // DOCUMENTS + 1

    def sequences(self, call: Array) -> Sequences:
        """Those of the call numbered `call`, int32 [], from 0 on."""
        wanted = call * DOCUMENTS + jnp.arange(DOCUMENTS, dtype=jnp.int32)
        number, wanted = self.number[:, None, :], wanted[None, :, None]
        count = lambda those: jnp.sum(those, -1, dtype=jnp.int32)
        return Sequences(count(number < wanted), count(number == wanted))

    def taken(self, call: Array) -> Array:
        """Positions whose document that call takes, bool [batch, seq]."""
        return self.number // DOCUMENTS == call

    def lse_of(self, stats: Array, call: Array, starts: Array) -> Array:
        """Log-sum-exp [batch, seq, heads] of that call's positions; anything elsewhere.

        `stats` float32 [batch · DOCUMENTS, heads, seq] is cuDNN's, by the place in the document.
        """
        batch, seq = self.number.shape
        slot = jnp.clip(self.number - call * DOCUMENTS, 0, DOCUMENTS - 1)
        place = jnp.arange(seq) - jnp.take_along_axis(starts, slot, axis=1)
        stats = stats.reshape(batch, DOCUMENTS, -1, seq)
        row = jnp.arange(batch)[:, None]
        return stats[row, slot, :, jnp.clip(place, 0, seq - 1)]


def stats_of(lse: Array, starts: Array) -> Array:
    """The way back of `Documents.lse_of`: float32 [batch · DOCUMENTS, heads, seq]."""
    batch, seq, heads = lse.shape
    places = jnp.clip(starts[:, :, None] + jnp.arange(seq), 0, seq - 1)
    stats = lse[jnp.arange(batch)[:, None, None], places]  # [batch, DOCUMENTS, seq, heads]
    return jnp.moveaxis(stats, -1, 2).reshape(-1, heads, seq)


def attend_packed(query: Array, key: Array, value: Array, segments: Array, rule: Rule) -> Array:
    """Attention [batch, seq, heads, head_dim] of every document to itself, in the query's dtype.

    `segments` int32 [batch, seq] is the same within a document and changes at its end; padding is
    a document of its own. Places are counted within documents, so that `rule` means the same.

    Raises:
        ConfigError: the batch has more elements than cuDNN can count.
    """
    if obstacle := too_large(query.shape):
        raise ConfigError(f"{obstacle}. Use model.attention='xla', or smaller microbatches.")
    return _attend_packed(*declare_alike(query, key, value, segments), rule)


def too_large(shape: tuple[int, ...]) -> str:
    """Why cuDNN cannot count the elements of packed queries of this shape; "" where it can."""
    if math.prod(shape) < 2**31:
        return ""
    return f"cuDNN counts the elements of packed queries in 32 bits, these are {shape}"


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _attend_packed(query: Array, key: Array, value: Array, segments: Array, rule: Rule) -> Array:
    """`attend_packed` of inputs that vary alike: [batch, seq, heads, head_dim]."""
    return _packed_forward(query, key, value, segments, rule)[0]


def _packed_forward(
    query: Array, key: Array, value: Array, segments: Array, rule: Rule
) -> tuple[Array, Any]:
    """`_attend_packed` [batch, seq, heads, head_dim], and what its backward reads."""
    out, lse = forward_packed(query, key, value, segments, rule)
    out, lse = checkpoint_name(out, "attention"), checkpoint_name(lse, "attention")
    return out, (query, key, value, out, lse, segments)


def _packed_backward(rule: Rule, saved: Any, cotangent: Array) -> Any:
    """Gradients of query, key and value in their shapes and dtypes; segments have none.

    `cotangent` [batch, seq, heads, head_dim] is that of the output.
    """
    query, key, value, out, lse, segments = saved
    inputs = (query, key, value, out, lse, cotangent)
    return *backward_packed(*inputs, segments=segments, rule=rule), None


_attend_packed.defvjp(_packed_forward, _packed_backward)


def forward_packed(
    query: Array, key: Array, value: Array, segments: Array, rule: Rule
) -> tuple[Array, Array]:
    """`attend_packed` of inputs that vary alike, not differentiable, and its log-sum-exp.

    [batch, seq, heads, head_dim] in the query's dtype, float32 [batch, seq, heads].
    """
    documents = Documents.of(segments)

    def look(call: Array, own: Sequences) -> tuple[Array, Array]:
        out, stats = forward(query, key, value, rule, sequences=(own, own))
        return out, documents.lse_of(stats, call, own.starts)

    lse = jnp.zeros_like(query[..., 0], jnp.float32)
    return _in_calls(documents, look, (jnp.zeros_like(query), lse))


def backward_packed(
    query: Array,
    key: Array,
    value: Array,
    out: Array,
    lse: Array,
    cotangent: Array,
    *,
    segments: Array,
    rule: Rule,
) -> tuple[Array, Array, Array]:
    """Gradients of query, key and value, in their shapes and dtypes.

    `out` and its cotangent [batch, seq, heads, head_dim] and `lse` [batch, seq, heads] may be those
    of more keys, as in `backward`.
    """

    def look(call: Array, own: Sequences) -> tuple[Array, Array, Array]:
        stats = stats_of(lse, own.starts)
        return backward(query, key, value, out, stats, cotangent, rule, sequences=(own, own))

    zeros = tuple(jnp.zeros_like(x) for x in (query, key, value))
    return _in_calls(Documents.of(segments), look, zeros)


def _in_calls(documents: Documents, look: Callable[..., Any], totals: Any) -> Any:
    """What `look(call, sequences)` finds of every document: a tuple of [batch, seq, ...].

    cuDNN leaves what belongs to no document of the call undefined, so it is never added.
    """

    def again(carry: tuple[Array, Any]) -> Array:
        return carry[0] < num_calls

    def turn(carry: tuple[Array, Any]) -> tuple[Array, Any]:
        """One call, int32 [], into the totals [batch, seq, ...] of the documents that it takes."""
        call, totals = carry
        taken = documents.taken(call)
        spread = lambda x: jnp.expand_dims(taken, tuple(range(2, x.ndim)))
        found = look(call, documents.sequences(call))
        totals = jax.tree.map(lambda new, old: jnp.where(spread(new), new, old), found, totals)
        return call + 1, totals

    num_calls = documents.num_calls
    first = collectives.vary(jnp.int32(0), tuple(collectives.varying_axes(num_calls)))
    return lax.while_loop(again, turn, (first, totals))[1]


# --- the operations -------------------------------------------------------------------------------


def forward(
    query: Array,
    key: Array,
    value: Array,
    rule: Rule,
    *,
    sequences: tuple[Sequences, Sequences] | None = None,
) -> tuple[Array, Array]:
    """One call: the output in the query's dtype and shape, and the log-sum-exp.

    `sequences` are of the queries and of the keys, as many of both and more than one of a row.

    The log-sum-exp is float32 [batch, heads, queries], or with sequences [batch · number, heads,
    queries], by the place in the sequence. Not differentiable.
    """
    operands = (query, key, value, *_others(query, key, sequences))
    settings = _settings(query, rule, sequences)
    primitive = operations._dot_product_attention_fwd_p
    out, stats = primitive.bind(*operands, is_training=True, **settings)
    return out, stats


def backward(
    query: Array,
    key: Array,
    value: Array,
    out: Array,
    stats: Array,
    cotangent: Array,
    rule: Rule,
    *,
    sequences: tuple[Sequences, Sequences] | None = None,
) -> tuple[Array, Array, Array]:
    """One call: gradients of query, key and value, in their shapes and dtypes.

    `out` and its cotangent, [batch, queries, heads, head_dim], and `stats` (as `forward` gives
    them) may be those of more keys than these: the gradients are then these keys' part.
    """
    operands = (query, key, value, *_others(query, key, sequences), stats, out, cotangent)
    primitive = operations._dot_product_attention_bwd_p
    dq, dk, dv = primitive.bind(*operands, **_settings(query, rule, sequences))
    return dq, dk, dv


def _others(
    query: Array, key: Array, sequences: tuple[Sequences, Sequences] | None
) -> tuple[Array, ...]:
    """Bias, lengths and first elements of query and key sequences, page tables, as jax asks.

    Of query and key [batch, positions, heads, head_dim]. What is not used is [0] of its dtype.
    """
    unused = jnp.zeros(0, query.dtype)
    if sequences is None:
        return (unused,) * 7
    # Not by jax's own helper, which in 0.10 takes the query's heads for the key's too.
    mine, others = sequences
    firsts = _first_elements(mine, query), _first_elements(others, key)
    return (unused, mine.lengths, others.lengths, *firsts, unused, unused)


def _first_elements(sequences: Sequences, x: Array) -> Array:
    """Where each sequence begins in x [batch, seq, heads, head_dim], counted in elements.

    int32 [batch, number + 1], read as one list of which the rest stands at the array's end.
    """
    batch, seq = x.shape[:2]
    rows = jnp.arange(batch, dtype=jnp.int32)[:, None] * seq
    starts = (sequences.starts + rows).reshape(-1)
    rest = jnp.full(batch, batch * seq, jnp.int32)
    return jnp.concatenate([starts, rest]).reshape(batch, -1) * math.prod(x.shape[2:])


def _settings(query: Array, rule: Rule, sequences: Any) -> dict[str, Any]:
    """Attributes of either operation, for a query [batch, queries, heads, head_dim]."""
    kinds = operations.MaskType
    mask = kinds.CAUSAL if rule.causal else kinds.NO_MASK
    if sequences is not None:
        mask = kinds.PADDING_CAUSAL if rule.causal else kinds.PADDING
    settings = {
        "scale": 1 / math.sqrt(query.shape[-1]),
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),  # no bias, no gradient of one
        "mask_type": mask,
        "layout": operations.AttentionLayout.BTNH.value,
        "sliding_window_length": rule.window or None,
    }
    lowering = operations._dot_product_attention_bwd_cuda_lowering
    newer = {"score_mod_name", "score_mod_jaxpr"} & inspect.signature(lowering).parameters.keys()
    return settings | dict.fromkeys(newer)


_OPERANDS = (
    *("query", "key", "value", "bias", "q_seqlen", "kv_seqlen", "q_offsets", "kv_offsets"),
    *("page_table_k", "page_table_v"),
)
_KNOWN = {
    *("scale", "seed", "dropout_rate", "variadic_args", "mask_type", "layout"),
    *("sliding_window_length", "score_mod_name", "score_mod_jaxpr", "score_mod_args"),
    *("is_training", "activation", "fwd_output", "grad_output", "ctx"),
}


def missing() -> str:
    """Why jax's operations cannot be bound from here; "" where they can."""
    if operations is None:
        return f"jax {jax.__version__} keeps cuDNN's operations elsewhere"
    names = ("_dot_product_attention_fwd", "_dot_product_attention_bwd")
    for name in names:
        lowering = getattr(operations, f"{name}_cuda_lowering", None)
        if lowering is None or not hasattr(operations, f"{name}_p"):
            return f"jax {jax.__version__} has no operation {name}_p"
        asked = list(inspect.signature(lowering).parameters)
        if tuple(asked[1:11]) != _OPERANDS or set(asked[11:]) - _KNOWN:
            return f"jax {jax.__version__} asks {name}_p for other operands"
    return ""
