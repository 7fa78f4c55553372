"""Stand-ins for cuDNN's attention operations in plain JAX, for machines without a GPU.

Their formats are cuDNN's: sequences by first element and length, the log-sum-exp by the position
in the sequence. They return NaN wherever cuDNN leaves memory unwritten.
"""

import jax.numpy as jnp
import numpy as np

from jaxdist.core.attention import cudnn

CAUSAL = ("CAUSAL", "PADDING_CAUSAL")


class Operation:
    """Replacement of one of jax's primitives; `late` plants a fault: the mask is one key late."""

    def __init__(self, run, late: bool):
        self.run, self.late, self.calls = run, late, []

    def bind(self, *operands, **settings):
        self.calls.append(settings["mask_type"].name)
        return self.run(*operands, late=self.late, **settings)


def install(monkeypatch, *, late: bool = False) -> tuple[list[str], list[str]]:
    """Replace the operations; return the masks of the traced forward and backward calls."""
    operations = Operation(forward, late), Operation(backward, late)
    for name, operation in zip(("fwd", "bwd"), operations, strict=True):
        monkeypatch.setattr(cudnn.operations, f"_dot_product_attention_{name}_p", operation)
    return operations[0].calls, operations[1].calls


def forward(query, key, value, bias, *others, late, scale, mask_type, sliding_window_length, **_):
    seq = sequences_of(query, key, *others[:4])
    scores, _, _ = scored(query, key, value, seq, late, scale, mask_type, sliding_window_length)
    lse = jnp.log(jnp.sum(jnp.exp(scores), -1))  # [batch, heads, queries]
    out = jnp.einsum("bhqk,bkhd->bqhd", jnp.exp(scores - lse[..., None]), spread(value, query))
    if seq is None:
        return out.astype(query.dtype), lse
    mine, _ = seq
    out = jnp.where(mine.inside[..., None, None], out, jnp.nan).astype(query.dtype)
    return out, mine.by_position(lse)


def backward(query, key, value, bias, *others, late, scale, mask_type, sliding_window_length, **_):
    seq, (stats, out, cotangent) = sequences_of(query, key, *others[:4]), others[6:]
    scores, k, v = scored(query, key, value, seq, late, scale, mask_type, sliding_window_length)
    lse = stats if seq is None else seq[0].in_row(stats)
    wide = lambda x: x.astype(jnp.float32)
    probs = jnp.where(jnp.isfinite(scores), jnp.exp(scores - lse[..., None]), 0)
    delta = jnp.sum(wide(out) * wide(cotangent), -1)
    if seq is not None:
        delta = jnp.where(seq[0].inside[..., None], delta, 0)
    dprobs = jnp.einsum("bqhd,bkhd->bhqk", wide(cotangent), v)
    dscores = probs * (dprobs - jnp.moveaxis(delta, 1, 2)[..., None]) * scale
    dq = jnp.einsum("bhqk,bkhd->bqhd", dscores, k)
    dk = jnp.einsum("bhqk,bqhd->bkhd", dscores, wide(query))
    dv = jnp.einsum("bhqk,bqhd->bkhd", probs, wide(cotangent))
    gather = lambda g: g.reshape(*key.shape[:3], -1, key.shape[3]).sum(3)
    grads = dq, gather(dk), gather(dv)
    if seq is not None:
        sequences = (seq[0], seq[1], seq[1])
        pairs = zip(grads, sequences, strict=True)
        grads = [jnp.where(x.inside[..., None, None], g, jnp.nan) for g, x in pairs]
    return [g.astype(x.dtype) for g, x in zip(grads, (query, key, value), strict=True)]


def scored(query, key, value, seq, late, scale, mask_type, window):
    """Return masked scores [batch, heads, queries, keys], keys and values per head, in float32."""
    k, v = spread(key, query), spread(value, query)
    behind = jnp.arange(query.shape[1])[:, None] - jnp.arange(key.shape[1])
    if seq is not None:  # then positions are counted in each sequence
        mine, others = (x.position for x in seq)
        behind = (mine[:, :, None] - others[:, None, :])[:, None]
    allowed = behind >= int(late) if mask_type.name in CAUSAL else behind == behind
    allowed &= behind < window if window else True
    if seq is not None:
        mine, others = seq
        allowed &= mine.owner[:, None, :, None] == others.owner[:, None, None, :]
        allowed &= mine.inside[:, None, :, None]
    scores = jnp.einsum("bqhd,bkhd->bhqk", query.astype(jnp.float32), k) * scale
    return jnp.where(allowed, scores, -jnp.inf), k, v


def spread(x, query):
    """Repeat heads of x [batch, keys, kv_heads, head_dim] to the query's number; float32."""
    return jnp.repeat(x.astype(jnp.float32), query.shape[2] // x.shape[2], axis=2)


def sequences_of(query, key, q_lengths, k_lengths, q_firsts, k_firsts):
    if q_firsts.ndim < 2:
        return None
    assert q_lengths.dtype == k_lengths.dtype == q_firsts.dtype == k_firsts.dtype == jnp.int32
    assert q_firsts.shape == k_firsts.shape and q_lengths.shape[1] > 1  # jax treats 1 as not packed
    return Sequences(query, q_lengths, q_firsts), Sequences(key, k_lengths, k_firsts)


class Sequences:
    """The sequence that each position [batch, seq] of x belongs to."""

    def __init__(self, x, lengths, firsts):
        self.batch, self.seq, *each = x.shape
        self.num = lengths.shape[1]
        used = lengths.size
        first = firsts.reshape(-1)[:used] // np.prod(each)  # in the batch as one long row
        self.starts = first - jnp.arange(used) // self.num * self.seq
        self.lengths = lengths.reshape(-1)
        position = jnp.arange(self.batch * self.seq)[:, None]
        here = (position >= first) & (position < first + self.lengths)
        owner = jnp.where(here.any(1), jnp.argmax(here, 1), -1)
        self.owner = owner.reshape(self.batch, self.seq)

    @property
    def inside(self):
        """Return a mask of the positions in any sequence, bool [batch, seq]."""
        return self.owner >= 0

    @property
    def position(self):
        """Return the position in its sequence, int32 [batch, seq]; arbitrary outside sequences."""
        return jnp.arange(self.seq) - self.starts[jnp.clip(self.owner, 0)]

    def by_position(self, lse):
        """Rearrange rows to sequences: [batch, heads, seq] -> [batch · num, heads, seq]."""
        rows = jnp.repeat(lse, self.num, axis=0)
        positions = jnp.clip(self.starts[:, None] + jnp.arange(self.seq), 0, self.seq - 1)
        values = jnp.take_along_axis(rows, positions[:, None], axis=2)
        return jnp.where(jnp.arange(self.seq) < self.lengths[:, None, None], values, jnp.nan)

    def in_row(self, stats):
        row, position = jnp.clip(self.owner, 0), jnp.clip(self.position, 0, self.seq - 1)
        return jnp.moveaxis(stats[row, :, position], -1, 1)
