"""What long rows cost: attention on one device, and the step's memory on devices that share rows.

    python scripts/bench/context.py attention     # dense and block by block: time and memory
    python scripts/bench/context.py memory        # compiled steps; none is run

Attention is one layer's forward and backward of one row, 8 query and 4 key/value heads of 64,
float32, causal; the shortest of three runs. Memory is what XLA's buffer assignment says of one
device's temporaries, of a decoder with 2 layers, d_model 256 and the same heads.
"""

from __future__ import annotations

import argparse
import os
import time

import jax
import jax.numpy as jnp

DEVICES = 8
HEADS, KV_HEADS, WIDTH = 8, 4, 64
LENGTHS = (512, 1024, 2048, 4096, 8192)


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=["attention", "memory"])
    table = parser.parse_args().table
    jax.config.update("jax_num_cpu_devices", DEVICES if table == "memory" else 1)
    print(f"jax {jax.__version__}, load average before {os.getloadavg()[0]:.1f}\n")
    attention() if table == "attention" else memory()


def attention() -> None:
    """Time and memory of both kernels by row length."""
    from jaxdist.core.attention import kernels
    from jaxdist.core.types import AttentionMask

    print("| keys | kernel | temporaries, MiB | forward and backward, ms |\n|---|---|---|---|")
    for length in LENGTHS:
        keys = jax.random.split(jax.random.key(0), 4)
        heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
        *arrays, cotangent = (
            jax.random.normal(key, (1, length, n, WIDTH))
            for key, n in zip(keys, heads, strict=True)
        )
        for kernel in ("xla", "blockwise"):

            def loss(x, kernel=kernel, cotangent=cotangent):
                return jnp.sum(kernels._attend(*x, AttentionMask(), kernel) * cotangent)

            compiled = jax.jit(jax.grad(loss)).lower(arrays).compile()
            temporary = compiled.memory_analysis().temp_size_in_bytes / 2**20
            times = []
            for _ in range(4):
                start = time.perf_counter()
                jax.block_until_ready(compiled(arrays))
                times.append(time.perf_counter() - start)
            best = 1e3 * min(times[1:])
            print(f"| {length} | {kernel} | {temporary:.1f} | {best:.0f} |", flush=True)


def memory() -> None:
    """Temporaries of one device: a row that grows with cp, and one that does not."""
    print("| row | cp | exchange | row / cp | temporaries, MiB |\n|---|---|---|---|---|")
    for exchange in ("ring", "all_to_all", "all_gather"):
        for length, size in ((2048, 1), (4096, 2), (8192, 4), (16384, 8), (16384, 4), (16384, 2)):
            found = temporaries(length, size, exchange) / 2**20
            row = f"| {length} | {size} | {exchange} | {length // size} | {found:.1f} |"
            print(row, flush=True)


def temporaries(length: int, size: int, exchange: str) -> int:
    """Bytes of temporaries of one device in a compiled train step of one row."""
    from jaxdist.config import read_run
    from jaxdist.run.setup import assemble

    config = read_run(
        [
            *(f"--mesh=cp={size}", f"--mesh.context_attention={exchange}"),
            *("--model.num_layers=2", "--model.d_model=256", f"--model.head_dim={WIDTH}"),
            *(f"--model.num_heads={HEADS}", f"--model.num_kv_heads={KV_HEADS}"),
            *("--model.mlp_dim=1024", f"--train.seq_len={length}", "--train.global_batch_size=1"),
            *("--train.remat=full", "--eval.global_batch_size=1"),
        ],
        command="bench.context",
    )
    parts = assemble(config, jax.devices()[:size])
    limit = jax.ShapeDtypeStruct((), jnp.float32)
    lowered = parts.step.train.lower(parts.abstract_state(), parts.abstract_batch(), limit)
    return lowered.compile().memory_analysis().temp_size_in_bytes


if __name__ == "__main__":
    main()
