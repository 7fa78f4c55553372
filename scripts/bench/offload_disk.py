"""Seconds of a step with moments in host memory and on a disk, beside raw reads and writes.

    python scripts/bench/offload_disk.py --directory /nvme
    python scripts/bench/offload_disk.py --directory /nvme --d-model 1024 --layers 16

Each repetition runs, one after the other: a step with moments on the device, one with moments in
host memory, one with moments on the disk, and a raw pass that reads every byte of the moments and
writes as many, both at the same time in two threads (as `dd` does in one: no checksum, `fdatasync`,
no page cache). The medians, the rate of the disk step, for `jaxdist plan --disk-gb-per-s`, and the
load of the machine are printed.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np

from jaxdist.config import RunConfig
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.sharding import MeshConfig
from jaxdist.core.step import TrainConfig
from jaxdist.models import DecoderConfig
from jaxdist.run.setup import Parts, assemble

BLOCK_BYTES = 64 << 20


def main() -> None:
    """Print the medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--d-model", type=int, default=512)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    model = DecoderConfig(
        d_model=arguments.d_model,
        num_layers=arguments.layers,
        num_heads=8,
        mlp_dim=4 * arguments.d_model,
    )
    timed: dict[str, Callable[[], None]] = {}
    moved = 0
    settings = {"device": "none", "host": "host", "disk": f"disk:{arguments.directory}"}
    for name, setting in settings.items():
        train = TrainConfig(global_batch_size=1, seq_len=32, offload_optimizer=setting)
        config = RunConfig(model=model, train=train, mesh=MeshConfig(shape=str(MeshSpec())))
        parts = assemble(config, jax.devices()[:1])
        timed[name] = stepper(parts)
        if parts.moments is not None and not moved:
            moved = 2 * parts.moments.num_bytes
            print(f"{moved / 2e6:,.0f} MB of moments in {len(parts.moments.shards)} groups")
    raw = arguments.directory / "raw"
    with open(raw, "wb") as file:
        write(file.fileno(), moved // 2)
    timed["raw"] = lambda: read_and_write(raw, moved // 2)
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    before = os.getloadavg()[0]
    for _ in range(arguments.repetitions):
        for name, run in timed.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    raw.unlink()
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median in medians.items():
        low, high = min(seconds[name]), max(seconds[name])
        print(f"{name:6}  {median:7.3f} s  (from {low:.3f} to {high:.3f})")
    for name in ("host", "disk"):
        added = medians[name] - medians["device"]
        print(f"{name} adds {added:.3f} s: {moved / added / 1e9:.2f} GB/s read and written")
    print(f"raw: {moved / medians['raw'] / 1e9:.2f} GB/s read and written")
    print(f"{os.cpu_count()} cores, load {before:.1f} before and {os.getloadavg()[0]:.1f} after")


def stepper(parts: Parts) -> Callable[[], None]:
    """Return a function that runs one step, after one that compiles."""
    rng, shapes = np.random.default_rng(0), parts.abstract_batch()
    host = {
        name: rng.integers(0, 200, x.shape).astype(x.dtype)
        if np.issubdtype(x.dtype, np.integer)
        else np.ones(x.shape, x.dtype)
        for name, x in shapes.items()
    }
    batch = {name: jax.device_put(host[name], x.sharding) for name, x in shapes.items()}
    state = parts.init_state()

    def step() -> None:
        nonlocal state
        state, metrics = parts.step.train(state, batch, math.inf)
        jax.block_until_ready((state, metrics))

    step()
    return step


def read_and_write(old: Path, num_bytes: int) -> None:
    """Read a file and write another of its size, at the same time."""
    new = old.with_suffix(".new")
    with open(old, "rb") as source, open(new, "wb") as target, ThreadPoolExecutor(1) as writer:
        done = writer.submit(write, target.fileno(), num_bytes)
        buffer = bytearray(BLOCK_BYTES)
        while os.readv(source.fileno(), [buffer]):
            pass
        os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        done.result()
    os.replace(new, old)


def write(file: int, num_bytes: int) -> None:
    """Write bytes to the disk and free their pages."""
    block = memoryview(np.random.default_rng(0).bytes(BLOCK_BYTES))
    left = num_bytes
    while left:
        left -= os.write(file, block[:left])
    os.fdatasync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


if __name__ == "__main__":
    main()
