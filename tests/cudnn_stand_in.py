"""What cuDNN's attention operations do, densely in plain JAX, for machines without a GPU.

They take and leave what cuDNN does: sequences by first element and length, the log-sum-exp by the
place in the sequence, NaN wherever cuDNN leaves memory as it was.
"""

import jax.numpy as jnp
import numpy as np

from jaxdist.core.attention import cudnn

CAUSAL = ("CAUSAL", "PADDING_CAUSAL")


class Operation:
    """In the place of one of jax's primitives; `late` is a fault: the mask is late by a key."""

    def __init__(self, run, late: bool):
        self.run, self.late, self.calls = run, late, []

    def bind(self, *operands, **settings):
        """The primitive's results, and a note of the mask it was called with."""
        self.calls.append(settings["mask_type"].name)
        return self.run(*operands, late=self.late, **settings)


def install(monkeypatch, *, late: bool = False) -> tuple[list[str], list[str]]:
    """Replace the operations; returns the masks of the forward and backward calls traced."""
    operations = Operation(forward, late), Operation(backward, late)
    for name, operation in zip(("fwd", "bwd"), operations, strict=True):
        monkeypatch.setattr(cudnn.operations, f"_dot_product_attention_{name}_p", operation)
    return operations[0].calls, operations[1].calls


def forward(query, key, value, bias, *others, late, scale, mask_type, sliding_window_length, **_):
    """(output, log-sum-exp)."""
    seq = sequences_of(query, key, *others[:4])
    scores, _, _ = scored(query, key, value, seq, late, scale, mask_type, sliding_window_length)
    lse = jnp.log(jnp.sum(jnp.exp(scores), -1))  # [batch, heads, queries]
    out = jnp.einsum("bhqk,bkhd->bqhd", jnp.exp(scores - lse[..., None]), spread(value, query))
    if seq is None:
        return out.astype(query.dtype), lse
    mine, _ = seq
    out = jnp.where(mine.inside[..., None, None], out, jnp.nan).astype(query.dtype)
    return out, mine.by_place(lse)


def backward(query, key, value, bias, *others, late, scale, mask_type, sliding_window_length, **_):
    """Gradients of query, key and value."""
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
    found = dq, gather(dk), gather(dv)
    if seq is not None:
        places = (seq[0], seq[1], seq[1])
        pairs = zip(found, places, strict=True)
        found = [jnp.where(x.inside[..., None, None], g, jnp.nan) for g, x in pairs]
    return [g.astype(x.dtype) for g, x in zip(found, (query, key, value), strict=True)]


def scored(query, key, value, seq, late, scale, mask_type, window):
    """Masked scores [batch, heads, queries, keys], keys and values of every head, in float32."""
    k, v = spread(key, query), spread(value, query)
    behind = jnp.arange(query.shape[1])[:, None] - jnp.arange(key.shape[1])
    if seq is not None:  # then places are counted in each sequence
        mine, others = (x.place for x in seq)
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
    """[batch, keys, kv_heads, head_dim] in float32 with a head for each of the query's."""
    return jnp.repeat(x.astype(jnp.float32), query.shape[2] // x.shape[2], axis=2)


def sequences_of(query, key, q_lengths, k_lengths, q_firsts, k_firsts):
    """The sequences of the queries and those of the keys that they attend to; None without."""
    if q_firsts.ndim < 2:
        return None
    assert q_lengths.dtype == k_lengths.dtype == q_firsts.dtype == k_firsts.dtype == jnp.int32
    assert q_firsts.shape == k_firsts.shape and q_lengths.shape[1] > 1  # 1 is not packed to jax
    return Sequences(query, q_lengths, q_firsts), Sequences(key, k_lengths, k_firsts)


class Sequences:
    """Which sequence each position [batch, seq] of x belongs to."""

    def __init__(self, x, lengths, firsts):
        self.batch, self.seq, *each = x.shape
        self.num = lengths.shape[1]
        used = lengths.size
        first = firsts.reshape(-1)[:used] // np.prod(each)  # in the batch as one long row
        self.starts = first - jnp.arange(used) // self.num * self.seq
        self.lengths = lengths.reshape(-1)
        place = jnp.arange(self.batch * self.seq)[:, None]
        here = (place >= first) & (place < first + self.lengths)
        owner = jnp.where(here.any(1), jnp.argmax(here, 1), -1)
        self.owner = owner.reshape(self.batch, self.seq)

    @property
    def inside(self):
        """Positions of any sequence, bool [batch, seq]."""
        return self.owner >= 0

    @property
    def place(self):
        """Of each position in its sequence, int32 [batch, seq]; anything outside."""
        return jnp.arange(self.seq) - self.starts[jnp.clip(self.owner, 0)]

    def by_place(self, lse):
        """[batch, heads, seq] -> [batch · num, heads, seq]."""
        rows = jnp.repeat(lse, self.num, axis=0)
        places = jnp.clip(self.starts[:, None] + jnp.arange(self.seq), 0, self.seq - 1)
        found = jnp.take_along_axis(rows, places[:, None], axis=2)
        return jnp.where(jnp.arange(self.seq) < self.lengths[:, None, None], found, jnp.nan)

    def in_row(self, stats):
        """The way back."""
        row, place = jnp.clip(self.owner, 0), jnp.clip(self.place, 0, self.seq - 1)
        return jnp.moveaxis(stats[row, :, place], -1, 1)
