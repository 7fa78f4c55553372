"""Whether cuDNN's kernel computes here what the reference does, where its operations are bound.

Packed documents and the parts of a ring need jax's private operations, which depend on the versions
of cuDNN and of the driver, and cannot be tried without a GPU. So a run that would use them compares
them first with the block-wise kernel in float32; what is refused is multiplied block by block.

Compared are two rows of the run's length and heads (one, where a microbatch has one): packed ones
under each window of the model, with documents of their own making; round a ring those of two
groups, packed or not, whose steps one device takes one after the other.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.core.attention import blockwise, cudnn, zigzag
from jaxdist.core.attention.blockwise import Rule, Span
from jaxdist.core.attention.parts import Keys, OverAll, Queries
from jaxdist.core.types import Array

TOLERANCE = 0.02
"""Largest difference, relative to the reference's largest number. Rounding to bfloat16 takes less
than half of it."""

Use: TypeAlias = Literal["packed", "ring", "packed_ring"]
"""What the kernel is compared for: documents of whole rows, parts round a ring, documents there."""

_NAMES = ("output", "query gradient", "key gradient", "value gradient")
_ROWS = 2
_LONGEST_PART = 8192  # of a ring; the reference's float32 arrays of a longer one might not fit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """What attention is asked for on one device.

    Attributes:
        rows: rows of a microbatch.
        seq_len: positions of a row; round a ring those of a group of devices.
        heads, kv_heads: of this device.
        head_dim: width of a head.
        windows: newest keys that a query sees, itself included, of each kind of layer; 0 = all.
        dtype: compute dtype.
    """

    rows: int
    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int, ...]
    dtype: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Admission:
    """What the comparison found.

    Attributes:
        errors: output and gradients -> largest difference, relative to the reference's peak. {}
            where the kernel failed, or other processes alone compared it.
        obstacle: why the kernel is not used; "" = it is.
        use: what the kernel was compared for.
    """

    errors: dict[str, float]
    obstacle: str
    use: Use = "packed"

    def describe(self) -> str:
        """One line for the log."""
        what = f"{self.use.replace('_', ' ')} attention"
        if self.obstacle:
            return f"{what}: {self.obstacle}; block by block instead"
        if not self.errors:
            return f"{what}: cuDNN's kernel, which other processes compared"
        worst = max(self.errors, key=lambda name: self.errors[name])
        return (
            f"{what}: cuDNN's kernel differs from the float32 reference by at most "
            f"{self.errors[worst]:.1e} of its peak ({worst}), {TOLERANCE} are allowed"
        )


def compare_packed(shapes: Shapes, device: jax.Device) -> Admission:
    """Run cuDNN's packed kernel and the reference on this device, forward and backward."""
    segments = sample_segments(min(shapes.rows, _ROWS), shapes.seq_len)

    def errors_of(window: int) -> list[float]:
        found = jax.device_get(_packed(shapes, segments, window))
        return _errors(found, jax.device_get(_reference(shapes, segments, window)))

    return _judged(lambda: [errors_of(window) for window in shapes.windows], device, "packed")


def compare_ring(shapes: Shapes, device: jax.Device) -> Admission:
    """Take every kind of a ring's steps by cuDNN's kernel on this device, and the reference.

    Rows are those of two groups, of no more than `_LONGEST_PART` positions each, and of one
    document.
    """
    length = 2 * min(shapes.seq_len, _LONGEST_PART)
    segments = np.ones((min(shapes.rows, _ROWS), length), np.int32)
    return _compare_ring(shapes, segments, device, "ring")


def compare_packed_ring(shapes: Shapes, device: jax.Device) -> Admission:
    """The same of rows that hold several documents, some of which lie over cuts between parts."""
    length = 2 * min(shapes.seq_len, _LONGEST_PART)
    segments = sample_segments(min(shapes.rows, _ROWS), length)
    return _compare_ring(shapes, segments, device, "packed_ring")


def _compare_ring(shapes: Shapes, segments: np.ndarray, device: jax.Device, use: Use) -> Admission:
    """Compare the steps of a ring on rows with these documents, int32 [rows, 2 · length]."""

    def compare() -> list[list[float]]:
        found = _round_a_ring(shapes, segments, is_packed=use == "packed_ring")
        return [_errors(jax.device_get(found), jax.device_get(_reference(shapes, segments, 0)))]

    return _judged(compare, device, use)


def _judged(compare: Callable[[], list[list[float]]], device: jax.Device, use: Use) -> Admission:
    """What follows from the errors of each comparison, in the order of `_NAMES`."""
    try:
        with jax.default_device(device):
            compared = compare()
    # Whatever it is that cuDNN, the compiler or jax cannot do here.
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        return Admission(errors={}, obstacle=f"cuDNN's kernel failed ({reason[:200]})", use=use)
    worst = np.max(compared, axis=0)  # NaN where any is
    errors = {name: float(e) for name, e in zip(_NAMES, worst, strict=True)}
    wrong = [f"{name} by {e:.2g}" for name, e in errors.items() if not e <= TOLERANCE]
    obstacle = f"cuDNN's kernel differs from the float32 reference: {', '.join(wrong)} of its peak"
    return Admission(errors=errors, obstacle=obstacle if wrong else "", use=use)


def _errors(found: Any, expected: Any) -> list[float]:
    """Largest differences in the order of `_NAMES`, relative to the reference's peak."""
    return [
        float(np.max(np.abs(np.asarray(a, np.float32) - b)) / np.max(np.abs(b)))
        for a, b in zip(found, expected, strict=True)
    ]


def sample_segments(rows: int, seq_len: int) -> np.ndarray:
    """Documents int32 [rows, seq_len]: short ones for more than one call, a long one, padding.

    Row 1 holds one document and no padding, and so does row 0 where it is too short for more.
    """
    segments = np.ones((rows, seq_len), np.int32)
    if seq_len < 4:
        return segments
    rng = np.random.default_rng(0)
    ends = rng.choice(np.arange(1, seq_len // 2), min(seq_len // 2 - 1, 12), replace=False)
    segments[0] += np.isin(np.arange(seq_len), [*ends, ends[0] + 1]).cumsum(dtype=np.int32)
    segments[0, seq_len - seq_len // 16 :] = 0
    return segments


def _inputs(shapes: Shapes, segments: np.ndarray) -> list[Array]:
    """Query, key, value and a cotangent, [rows, seq_len, heads, head_dim], in the compute dtype.

    Key and value have `kv_heads`; `segments` int32 [rows, seq_len] gives the first two sizes.
    """
    rows, seq_len = segments.shape
    heads = (shapes.heads, shapes.kv_heads, shapes.kv_heads, shapes.heads)
    keys = jax.random.split(jax.random.key(0), 4)
    return [
        jax.random.normal(key, (rows, seq_len, n, shapes.head_dim), shapes.dtype)
        for key, n in zip(keys, heads, strict=True)
    ]


def _packed(shapes: Shapes, segments: np.ndarray, window: int) -> Any:
    """Output and gradients of the inputs, shaped as these, of cuDNN's kernel: compute dtype.

    `segments` int32 [rows, seq_len]; `window` newest keys are seen, 0 = all.
    """
    rule = Rule(True, window)

    def attend(query: Array, key: Array, value: Array) -> Array:
        return cudnn.attend_packed(query, key, value, jnp.asarray(segments), rule)

    return _pulled(attend, _inputs(shapes, segments))


def _round_a_ring(shapes: Shapes, segments: np.ndarray, *, is_packed: bool) -> Any:
    """The same of rows that two groups share, which this device stands for one after the other.

    `segments` int32 [rows, 2 · length] are told to the kernel where rows are packed.
    """
    documents = _groups_of(jnp.asarray(segments)) if is_packed else (None, None)

    def both(*inputs: Array) -> tuple[Array, ...]:
        """Output and gradients, [rows, 2 · length, heads or kv_heads, head_dim] each."""
        query, key, value, cotangent = (_groups_of(x) for x in inputs)
        own = [Keys(*held) for held in zip(key, value, documents, strict=True)]
        out, dq, dk, dv = ([jnp.zeros(()), jnp.zeros(())] for _ in range(4))
        for mine in range(2):
            # Another group's keys are an earlier one's for the second group.
            steps: list[tuple[int, Any]] = [(mine, None), (1 - mine, jnp.bool_(mine == 1))]
            queries = Queries(query[mine], documents[mine])
            parts = [zigzag.forward(queries, own[k], True, e) for k, e in steps]
            joined = blockwise.merge(*parts)
            out[mine] = joined.out.astype(query[mine].dtype)
            found = OverAll(out[mine], cotangent[mine], joined.lse)
            for k, e, half in ((k, e, n) for k, e in steps for n in (0, 1)):
                part = zigzag.backward(queries, own[k], found, True, e, half)
                grads = zigzag.spread(part, True, e, half)
                dq[mine], dk[k], dv[k] = (
                    total + part
                    for total, part in zip((dq[mine], dk[k], dv[k]), grads, strict=True)
                )
        return tuple(_row_of(*groups) for groups in (out, dq, dk, dv))

    return jax.jit(both)(*_inputs(shapes, segments))


def _groups_of(x: Array) -> tuple[Array, Array]:
    """[rows, 2 · length, ...] -> what each of two groups holds of it, [rows, length, ...]."""
    first, second, third, last = jnp.split(x, 4, axis=1)
    return jnp.concatenate([first, last], axis=1), jnp.concatenate([second, third], axis=1)


def _row_of(outer: Array, inner: Array) -> Array:
    """The way back of `_groups_of`, [rows, 2 · length, ...]."""
    (first, last), (second, third) = (jnp.split(x, 2, axis=1) for x in (outer, inner))
    return jnp.concatenate([first, second, third, last], axis=1)


def _reference(shapes: Shapes, segments: np.ndarray, window: int) -> Any:
    """The same in float32, of the same rounded inputs; `segments` int32 [rows, seq_len]."""
    rule = Rule(True, window)
    span = Span(jnp.arange(segments.shape[1], dtype=jnp.int32)[None], jnp.asarray(segments))

    def attend(query: Array, key: Array, value: Array) -> Array:
        return blockwise.attend(query, key, value, span, span, rule)

    with jax.default_matmul_precision("highest"):
        return _pulled(attend, [x.astype(jnp.float32) for x in _inputs(shapes, segments)])


def _pulled(attend: Any, inputs: list[Array]) -> Any:
    """(output, gradients of query, key and value), [rows, seq_len, heads, head_dim] each.

    `inputs` as `_inputs` gives them, or wider.
    """

    def both(query: Array, key: Array, value: Array, cotangent: Array) -> Any:
        out, back = jax.vjp(attend, query, key, value)
        return out, *back(cotangent)

    return jax.jit(both)(*inputs)
