"""A ring's steps on cuDNN's kernel against one call of it for the whole row, on one GPU.

    python scripts/bench/ring_kernel.py --seq-len 16384 --groups 4 --json OUT.json

The GPU runs the forward and backward steps of every group of a ring in turn and merges the partial
results: all work of the ring except its permutes. It is compared with
`jax.nn.dot_product_attention` on the same row. First both are checked against a float32 reference.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxdist.core.attention import blockwise, zigzag
from jaxdist.core.attention.kernel_check import Shapes, validate_kernel
from jaxdist.core.attention.zigzag import GlobalAttention, Keys, Queries
from jaxdist.core.types import Array

REPEATS = 20


def main() -> int:
    """Check and time both, then print and write the numbers."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seq-len", type=int, default=16384, help="positions of the row")
    parser.add_argument("--groups", type=int, default=4, help="groups of devices on the ring")
    parser.add_argument("--json", type=Path, help="file for the numbers")
    args = parser.parse_args()
    sizes = dict(heads=32, kv_heads=8, head_dim=128)
    shapes = Shapes(rows=1, seq_len=args.seq_len // 2, windows=(0,), dtype=jnp.bfloat16, **sizes)
    check = validate_kernel("ring", shapes, jax.devices()[0])
    heads = (sizes["heads"], sizes["kv_heads"], sizes["kv_heads"], sizes["heads"])
    query, key, value, cotangent = (
        jax.random.normal(k, (1, args.seq_len, n, sizes["head_dim"]), jnp.bfloat16)
        for k, n in zip(jax.random.split(jax.random.key(0), 4), heads, strict=True)
    )
    groups = args.groups
    ring = jax.jit(lambda *x: round_the_ring(*x, groups))
    measured = {
        "seq_len": args.seq_len,
        "groups": groups,
        "device": jax.devices()[0].device_kind,
        "compared": check.describe(),
        "ring_ms": 1e3 * seconds(ring, query, key, value, cotangent),
        "one_call_ms": 1e3 * seconds(jax.jit(one_call), query, key, value, cotangent),
    }
    print(json.dumps(measured, indent=1))
    if args.json:
        args.json.write_text(json.dumps(measured, indent=1) + "\n")
    return 0


def one_call(query: Array, key: Array, value: Array, cotangent: Array) -> tuple[Array, ...]:
    """Return output [1, seq, heads, head_dim] and gradients of the row by one call per pass."""
    attend = lambda *x: jax.nn.dot_product_attention(*x, is_causal=True, implementation="cudnn")
    out, back = jax.vjp(attend, query, key, value)
    return out, *back(cotangent)


def round_the_ring(
    query: Array, key: Array, value: Array, cotangent: Array, groups: int
) -> list[tuple[Array, ...]]:
    """Return output and gradients [1, seq / groups, ...] of every group, computed step by step.

    Group i holds chunks i and 2n−1−i of the row, which is split into 2n chunks.
    """
    parts = [jnp.split(x, 2 * groups, axis=1) for x in (query, key, value, cotangent)]
    held = lambda i: [jnp.concatenate([x[i], x[-1 - i]], axis=1) for x in parts]
    rows = [held(i) for i in range(groups)]
    keys = [Keys(key, value, None) for _, key, value, _ in rows]
    out, grads = [], [[jnp.zeros((), jnp.float32)] * 3 for _ in range(groups)]
    for i, (own, _, _, pull) in enumerate(rows):
        # As in the ring: a bool that is only available at run time.
        others = [(j, jnp.bool_(j < i)) for j in range(groups) if j != i]
        mine = Queries(own, None)
        merged = zigzag.forward(mine, keys[i], True, None)
        for j, earlier in others:
            merged = blockwise.merge(merged, zigzag.forward(mine, keys[j], True, earlier))
        out.append(merged.out.astype(own.dtype))
        over_all = GlobalAttention(out[i], pull, merged.lse)
        for j, e, half in ((j, e, n) for j, e in [(i, None), *others] for n in (0, 1)):
            part = zigzag.backward(mine, keys[j], over_all, True, e, half)
            dq, dk, dv = zigzag.scatter_to_positions(part, True, e, half)
            grads[i][0] = grads[i][0] + dq
            grads[j][1], grads[j][2] = grads[j][1] + dk, grads[j][2] + dv
    return [(x, *each) for x, each in zip(out, grads, strict=True)]


def seconds(run: Callable[..., object], *inputs: Array) -> float:
    """Return the median time of one run, after a run that compiles."""
    times = []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        jax.block_until_ready(run(*inputs))
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


if __name__ == "__main__":
    sys.exit(main())
