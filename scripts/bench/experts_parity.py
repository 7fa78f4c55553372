"""Compare mixtures of experts on 16 and 64 simulated devices with one device.

    python scripts/bench/experts_parity.py

Prints for each mesh the largest relative distance of the gradients of one part of the parameters
(router, up, down, ...) at the first step, and of 20 losses.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import jax

MESHES = (
    (16, "experts", "fsdp=4,ep=4"),
    (16, "experts_sinks", "ep=4,cp=2,tp=2"),
    (16, "experts_batch", "pp=2,dp=2,ep=4"),
    (64, "experts", "fsdp=2,ep=8,cp=2,tp=2"),
)


def main() -> None:
    """Print one row of a table per mesh."""
    jax.config.update("jax_num_cpu_devices", 64)
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
    from test_experts import parts_of, relative_distance
    from tiny import Case, reference, run

    print("| devices | model | mesh | gradients | losses | s |\n|---:|---|---|---:|---:|---:|")
    for devices, model, mesh in MESHES:
        begin = time.perf_counter()
        actual, expected = run(Case(model, mesh)), reference(model)
        ours, others = parts_of(actual.grads), parts_of(expected.grads)
        far = max(relative_distance(ours[name], others[name]) for name in others)
        pairs = zip(actual.losses, expected.losses, strict=True)
        losses = max(abs(a - b) / b for a, b in pairs)
        took = time.perf_counter() - begin
        print(
            f"| {devices} | {model} | {mesh} | {far:.1e} | {losses:.1e} | {took:.0f} |", flush=True
        )


if __name__ == "__main__":
    main()
