"""Learning curves with gradients of sharded weights summed in float32 and in bfloat16.

    python scripts/bench/reduce_dtype.py [--steps 80] [--seeds 0 1] [--devices 8] [--out TABLE.md]

The default model computes in bfloat16, with weights sharded over simulated devices (`fsdp`).
XLA:CPU always adds in float32, so a bfloat16 sum is emulated: the partial sum is rounded after each
device, as in a ring of GPUs. Runs with the same seed use the same initial weights and batches. The
last rows show the difference between two seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parent.parent.parent
DTYPES = ("float32", "bfloat16")
WINDOW = 20
"""Steps averaged per table row."""


def run_in_a_ring(arguments: list[str]) -> None:
    """Train in this process, with sums in bfloat16 rounded after each device."""
    import jax.numpy as jnp
    from jax import lax

    from jaxdist import train
    from jaxdist.core import collectives

    plain = collectives.reduce_scatter

    def reduce_scatter(x: Any, axes: Any, dim: int = 0) -> Any:
        """Reduce-scatter [..., d, ...] to [..., d / n, ...], rounding bfloat16 as a ring does."""
        if x.dtype != jnp.bfloat16:
            return plain(x, axes, dim=dim)
        size, names = collectives.group_size(axes), tuple(axes)
        parts = jnp.stack(jnp.split(x.astype(jnp.float32), size, axis=dim))
        parts = lax.all_to_all(parts, names, 0, 0)
        # The sum of a shard starts at the device after its owner and ends at its owner.
        parts = jnp.roll(parts, -(collectives.group_index(axes) + 1), axis=0)
        total = parts[0]
        for part in parts[1:]:
            total = lax.reduce_precision(total + part, exponent_bits=8, mantissa_bits=7)
        return total.astype(jnp.bfloat16)

    collectives.reduce_scatter = reduce_scatter
    sys.exit(train.main(arguments))


def losses(dtype: str, seed: int, steps: int, devices: int) -> np.ndarray:
    """Train, and return the loss of each step, nats per token, [steps]."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--train", f"--run-dir={folder}/run"]
        command += [f"--simulate={devices}", f"--mesh=fsdp={devices}", f"--steps={steps}"]
        command += [f"--seed={seed}", "--precision.compute-dtype=bfloat16"]
        command += [f"--precision.reduce-dtype={dtype}", "--monitoring.tracker="]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
        lines = (Path(folder) / "run/metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return np.array([record["loss"] for record in records if record["kind"] == "train"])


def table(curves: dict[tuple[int, str], np.ndarray]) -> str:
    """Return curves [steps] by seed and dtype as Markdown, averaged over windows of steps."""
    lines = ["| seed | steps | float32 | bfloat16 | difference |", "|---|---|---|---|---|"]
    seeds = sorted({seed for seed, _ in curves})
    steps = len(next(iter(curves.values())))
    for seed in seeds:
        for end in range(WINDOW, steps + 1, WINDOW):
            wide, narrow = (curves[seed, d][end - WINDOW : end].mean() for d in DTYPES)
            row = f"| {seed} | {end - WINDOW + 1} to {end} | {wide:.4f} | {narrow:.4f} |"
            lines.append(f"{row} {narrow / wide - 1:+.3%} |")
    for other in seeds[1:]:
        one, two = (curves[seed, "float32"][-WINDOW:].mean() for seed in (seeds[0], other))
        lines.append(f"| {seeds[0]} against {other} | the last {WINDOW} | {one:.4f} | {two:.4f} |")
        lines[-1] += f" {two / one - 1:+.3%} |"
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run all and print the table."""
    if sys.argv[1:2] == ["--train"]:
        run_in_a_ring(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    options = parser.parse_args()
    curves = {}
    for seed in options.seeds:
        for dtype in DTYPES:
            curves[seed, dtype] = losses(dtype, seed, options.steps, options.devices)
            print(seed, dtype, curves[seed, dtype][-WINDOW:].mean(), flush=True)
    text = table(curves)
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
