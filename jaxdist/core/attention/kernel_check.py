"""Numeric check of cuDNN's kernel on the user's device.

Its results depend on the versions of cuDNN and of the driver; packed documents and ring hops also
need private operations of jax. So a run first compares its call with the block-wise kernel in
float32, on at most two rows with its heads. If they differ, the run does not use cuDNN.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from jaxdist.core.attention import blockwise, cudnn, zigzag
from jaxdist.core.attention.blockwise import KV, Q, Rule, Span
from jaxdist.core.attention.zigzag import GlobalAttention, Keys, Queries
from jaxdist.core.types import Array

TOLERANCE = 0.02
"""Maximum error relative to the reference's peak; bfloat16 rounding is less than half of it."""

Use: TypeAlias = Literal["plain", "packed", "ring", "packed_ring", "grouped"]
"""Calls to check: complete rows, documents of complete rows, ring hops, documents on a ring; and
the products of experts (`matmul/grouped_check.py`)."""

_NAMES = ("output", "query gradient", "key gradient", "value gradient")
_ROWS = 2
_MAX_RING_LEN = 8192  # float32 arrays of the reference might not fit for longer chunks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """Shapes of one device's attention.

    Attributes:
        seq_len: positions per row; on a ring, positions per group of devices.
        heads, kv_heads: heads of this device.
        windows: attention windows of the layers; 0 = no window.
    """

    rows: int
    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int, ...]
    dtype: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCheck:
    """Result of the comparison with the reference.

    Attributes:
        errors: output or gradient -> largest error relative to the reference's peak; {} if the
            kernel failed, if only another process rejects it, or if only others compared it.
        rejection_reason: why the kernel must not be used; "" = it may.
    """

    errors: dict[str, float]
    rejection_reason: str
    use: Use = "packed"

    def describe(self) -> str:
        """Format a log line: the kernel, and its largest error or the rejection reason."""
        name = f"{self.use.replace('_', ' ')} attention"
        name = "products of experts" if self.use == "grouped" else name
        if self.rejection_reason:
            return f"{name}: {self.rejection_reason}; plain JAX instead"
        kernel = kernel_of(self.use)
        if not self.errors:
            return f"{name}: {kernel}, which other processes compared"
        worst = max(self.errors, key=lambda name: self.errors[name])
        return (
            f"{name}: {kernel} differs from the float32 reference by at most "
            f"{self.errors[worst]:.1e} of its peak ({worst}), {TOLERANCE} are allowed"
        )


def kernel_of(use: Use) -> str:
    """Return the name of the kernel that computes a call."""
    return "jax's Mosaic kernel" if use == "grouped" else "cuDNN's kernel"


def validate_kernel(use: Use, shapes: Shapes, device: jax.Device) -> KernelCheck:
    """Return the result of comparing cuDNN's kernel with the reference on a device.

    It compares forward and backward: on a ring, all kinds of hops between two groups of at most
    `_MAX_RING_LEN` positions; else complete rows with each window of the model.
    """
    # NaN if any error is NaN
    worst = lambda: dict(zip(_NAMES, np.max(_compare(use, shapes), axis=0), strict=True))
    return judge(use, device, worst)


def judge(use: Use, device: jax.Device, compare: Callable[[], dict[str, float]]) -> KernelCheck:
    """Return the `KernelCheck` from `compare`, which returns name -> error / peak, on a device."""
    kernel = kernel_of(use)
    try:
        with jax.default_device(device):
            errors = {name: float(error) for name, error in compare().items()}
    except Exception as error:  # any failure of the kernel, the compiler or jax
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        rejection = f"{kernel} failed ({reason[:200]})"
        return KernelCheck(errors={}, rejection_reason=rejection, use=use)
    wrong = [f"{name} by {e:.2g}" for name, e in errors.items() if not e <= TOLERANCE]
    rejection = f"{kernel} differs from the float32 reference: {', '.join(wrong)} of its peak"
    return KernelCheck(errors=errors, rejection_reason=rejection if wrong else "", use=use)


def _compare(use: Use, shapes: Shapes) -> list[list[float]]:
    """Return the largest errors of each comparison, in the order of `_NAMES`."""
    rows = min(shapes.rows, _ROWS)
    on_ring, is_packed = use in ("ring", "packed_ring"), use in ("packed", "packed_ring")
    length = 2 * min(shapes.seq_len, _MAX_RING_LEN) if on_ring else shapes.seq_len
    segments = sample_segments(rows, length) if is_packed else np.ones((rows, length), np.int32)
    inputs = _sample_inputs(shapes, segments)
    if not on_ring:
        call = _packed if is_packed else _plain
        pairs = [
            (call(inputs, segments, window), _reference(inputs, segments, window))
            for window in shapes.windows
        ]
    else:
        results = _round_a_ring(inputs, segments if is_packed else None)
        pairs = [(results, _reference(inputs, segments, 0))]
    return [[_error(*both) for both in zip(*pair, strict=True)] for pair in pairs]


def _error(a: Any, b: Any) -> float:
    a, b = np.asarray(a, np.float32), np.asarray(b)
    return float(np.max(np.abs(a - b)) / np.max(np.abs(b)))


def sample_segments(rows: int, seq_len: int) -> Int[np.ndarray, "rows seq_len"]:
    """Return document ids: row 0 has short documents, a long one and padding; others have one."""
    segments = np.ones((rows, seq_len), np.int32)
    if seq_len < 4:
        return segments
    rng = np.random.default_rng(0)
    ends = rng.choice(np.arange(1, seq_len // 2), min(seq_len // 2 - 1, 12), replace=False)
    segments[0] += np.isin(np.arange(seq_len), [*ends, ends[0] + 1]).cumsum(dtype=np.int32)
    segments[0, seq_len - seq_len // 16 :] = 0
    return segments


def _sample_inputs(shapes: Shapes, segments: Int[np.ndarray, "rows seq"]) -> list[Array]:
    """Sample query, key, value and a cotangent, [rows, seq, heads or kv_heads, head_dim]."""
    heads = (shapes.heads, shapes.kv_heads, shapes.kv_heads, shapes.heads)
    keys = jax.random.split(jax.random.key(0), 4)
    return [
        jax.random.normal(key, (*segments.shape, n, shapes.head_dim), shapes.dtype)
        for key, n in zip(keys, heads, strict=True)
    ]


def _packed(inputs: list[Array], segments: Int[np.ndarray, "rows seq"], window: int) -> Any:
    """Return output and gradients [rows, seq, ...] of cuDNN's packed kernel."""
    documents, rule = jnp.asarray(segments), Rule(True, window)
    attend = lambda q, k, v: cudnn.attend_packed(q, k, v, documents, rule)
    return _vjp(attend, inputs)


def _plain(inputs: list[Array], segments: Int[np.ndarray, "rows seq"], window: int) -> Any:
    """Return output and gradients [rows, seq, ...] of cuDNN's kernel; a row is one document."""
    near = (window - 1, 0) if window else None
    attend = partial(
        jax.nn.dot_product_attention,
        is_causal=True,
        local_window_size=near,
        implementation="cudnn",
    )
    return _vjp(attend, inputs)


def _round_a_ring(inputs: list[Array], segments: Int[np.ndarray, "rows seq"] | None) -> Any:
    """Return output and gradients [rows, seq, ...] of a ring of two groups, run on one device."""
    documents = (None, None) if segments is None else _split_by_group(jnp.asarray(segments))

    def run(*inputs: Array) -> tuple[Array, ...]:
        """Return output and gradients, [rows, seq, ...] each."""
        query, key, value, cotangent = (_split_by_group(x) for x in inputs)
        own = [Keys(*chunk) for chunk in zip(key, value, documents, strict=True)]
        out, dq, dk, dv = ([jnp.zeros(()), jnp.zeros(())] for _ in range(4))
        for mine in range(2):
            # The keys of the other group precede the second group.
            hops: list[tuple[int, Any]] = [(mine, None), (1 - mine, jnp.bool_(mine == 1))]
            queries = Queries(query[mine], documents[mine])
            total = blockwise.merge(*(zigzag.forward(queries, own[k], e) for k, e in hops))
            out[mine] = total.out.astype(query[mine].dtype)
            stats = GlobalAttention(out[mine], cotangent[mine], total.lse)
            for k, e, half in ((k, e, n) for k, e in hops for n in (0, 1)):
                part = zigzag.backward(queries, own[k], stats, e, half)
                grads = zigzag.scatter_to_positions(part, e, half)
                dq[mine], dk[k], dv[k] = (
                    total + part
                    for total, part in zip((dq[mine], dk[k], dv[k]), grads, strict=True)
                )
        return tuple(_join_groups(*groups) for groups in (out, dq, dk, dv))

    return jax.jit(run)(*inputs)


def _split_by_group(x: Array) -> tuple[Array, Array]:
    """Split [rows, 2 · length, ...] into the zig-zag chunks [rows, length, ...] of two groups."""
    first, second, third, last = jnp.split(x, 4, axis=1)
    return jnp.concatenate([first, last], axis=1), jnp.concatenate([second, third], axis=1)


def _join_groups(outer: Array, inner: Array) -> Array:
    """Undo `_split_by_group`: [rows, 2 · length, ...]."""
    (first, last), (second, third) = (jnp.split(x, 2, axis=1) for x in (outer, inner))
    return jnp.concatenate([first, second, third, last], axis=1)


def _reference(inputs: list[Array], segments: Int[np.ndarray, "rows seq"], window: int) -> Any:
    """Return output and gradients [rows, seq, ...] of float32 products of the kernel's inputs."""
    span = Span(jnp.arange(segments.shape[1], dtype=jnp.int32)[None], jnp.asarray(segments))
    rule = Rule(True, window)
    attend = lambda q, k, v: blockwise.attend(q, k, v, span, span, rule)
    with jax.default_matmul_precision("highest"):
        return _vjp(attend, [x.astype(jnp.float32) for x in inputs])


def _vjp(attend: Any, inputs: list[Array]) -> Any:
    """Return the output, and gradients of query, key and value, [rows, seq, heads, head_dim]."""

    def run(query: Q, key: KV, value: KV, cotangent: Q) -> Any:
        out, pull_back = jax.vjp(attend, query, key, value)
        return out, *pull_back(cotangent)

    return jax.jit(run)(*inputs)
