"""Measure the cost of long rows: attention on one device, memory of the step, partial reads.

    python scripts/bench/context.py attention     # dense and block by block: time and memory
    python scripts/bench/context.py long          # the same of one head, up to 131,072 keys; 14 GiB
    python scripts/bench/context.py memory        # compiled steps; none is run
    python scripts/bench/context.py reading       # a process's part of a batch of long rows

Attention is one layer's forward and backward of one row, 8 query and 4 key/value heads of 64,
float32, causal; the shortest of three runs. Memory is what XLA's buffer assignment says of one
device's temporaries, of a decoder with 2 layers, d_model 256 and the same heads.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

DEVICES = 8
ROW, NUM_ROWS = 131_072, 8
HEADS, KV_HEADS, WIDTH = 8, 4, 64
LENGTHS = (512, 1024, 2048, 4096, 8192)
LONGEST_DENSE = 4096  # 8192 keys take 8 GiB
LONG = {"xla": 32_768, "blockwise": 131_072}  # keys of the longest row that is run


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=["attention", "long", "memory", "reading"])
    table = parser.parse_args().table
    jax.config.update("jax_num_cpu_devices", DEVICES if table == "memory" else 1)
    print(f"jax {jax.__version__}, load average before {os.getloadavg()[0]:.1f}\n")
    {"attention": attention, "long": long, "memory": memory, "reading": reading}[table]()


def attention() -> None:
    """Measure time and memory of both kernels by row length."""
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
        for kernel in ("xla", "blockwise")[length > LONGEST_DENSE :]:

            def loss(x, kernel=kernel, cotangent=cotangent):
                return jnp.sum(kernels._attend(*x, AttentionMask(), kernel, 0.0) * cotangent)

            compiled = jax.jit(jax.grad(loss)).lower(arrays).compile()
            temporary = compiled.memory_analysis().temp_size_in_bytes / 2**20
            times = []
            for _ in range(4):
                start = time.perf_counter()
                jax.block_until_ready(compiled(arrays))
                times.append(time.perf_counter() - start)
            best = 1e3 * min(times[1:])
            print(f"| {length} | {kernel} | {temporary:.1f} | {best:.0f} |", flush=True)


def long() -> None:
    """Measure memory of both kernels for rows of 8k, 32k and 128k, and CPU time if they fit."""
    from jaxdist.core.attention import kernels
    from jaxdist.core.types import AttentionMask

    print("| keys | kernel | temporaries, MiB | processor time, s |\n|---:|---|---:|---:|")
    for length in (8_192, 32_768, 131_072):
        arrays = [jax.random.normal(jax.random.key(i), (1, length, 1, WIDTH)) for i in range(3)]
        for kernel, longest in LONG.items():

            def loss(x, kernel=kernel):
                return jnp.sum(kernels._attend(*x, AttentionMask(), kernel, 0.0))

            compiled = jax.jit(jax.grad(loss)).lower(arrays).compile()
            temporary = compiled.memory_analysis().temp_size_in_bytes / 2**20
            start = time.process_time()
            if length <= longest:
                jax.block_until_ready(compiled(arrays))
            spent = f"{time.process_time() - start:.1f}" if length <= longest else "not run"
            print(f"| {length:,} | {kernel} | {temporary:,.1f} | {spent} |", flush=True)


def memory() -> None:
    """Measure temporaries of one device for a row that grows with cp and for a fixed row."""
    print("| row | cp | exchange | row / cp | temporaries, MiB |\n|---|---|---|---|---|")
    for exchange in ("ring", "all_to_all", "all_gather"):
        for length, size in ((2048, 1), (4096, 2), (8192, 4), (16384, 8), (16384, 4), (16384, 2)):
            measured = temporaries(length, size, exchange) / 2**20
            row = f"| {length} | {size} | {exchange} | {length // size} | {measured:.1f} |"
            print(row, flush=True)


def temporaries(length: int, size: int, exchange: str) -> int:
    """Return the temporary bytes of one device in a compiled train step of one row."""
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
    lowered = parts.step.train.lower(parts.step_state(), parts.abstract_batch(), limit)
    return lowered.compile().memory_analysis().temp_size_in_bytes


def reading() -> None:
    """Time building a process's part of a batch: from complete rows, and directly."""
    from jaxdist.core.parallel.context import device_order
    from jaxdist.data import DataConfig, open_datasets
    from jaxdist.data.packing import cut

    chunk, order = ROW // (2 * DEVICES), device_order(ROW, DEVICES)
    spans = tuple((int(first), int(first) + chunk) for first in order[::chunk][:2])
    rng = np.random.default_rng(0)
    print("| packing | whole rows, then cut, ms | the part alone, ms |\n|---|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["JAXDIST_CACHE"] = folder
        source = Path(folder) / "documents.jsonl"
        lengths = rng.geometric(1 / 2_000, 4 * NUM_ROWS * ROW // 2_000)
        source.write_text("\n".join(json.dumps({"text": "a" * int(n)}) for n in lengths))
        for packing in ("stream", "documents", "best_fit"):
            config = DataConfig(sources=[str(source)], packing=packing, eval_fraction=0.0)
            rows, _ = open_datasets(config, seq_len=ROW)
            complete, part = [], []
            for first in range(0, rows.num_rows - NUM_ROWS + 1, NUM_ROWS):
                numbers = np.arange(first, first + NUM_ROWS)
                start = time.perf_counter()
                one = cut(rows.rows(numbers), spans)
                middle = time.perf_counter()
                other = rows.rows(numbers, spans)
                complete.append(middle - start)
                part.append(time.perf_counter() - middle)
                assert all(np.array_equal(one[name], other[name]) for name in one)
            print(f"| {packing} | {1e3 * min(complete):.1f} | {1e3 * min(part):.1f} |", flush=True)


if __name__ == "__main__":
    main()
