"""GFLOP/s of the matrix products of a step on one CPU core: XLA:CPU in two forms, and PyTorch.

    python scripts/bench/cpu_products.py

The shapes are those of `versus.py` with a vocabulary of 256: 2,048 tokens, d_model 384. Each
product is timed in the forward pass, for its input gradient and for its weight gradient. `xla` is
the form of our step; `xla, transposed` stores weights and their gradients as [outputs, inputs].
Each library runs in a separate process with one thread on one core and keeps freed memory. The
processes take turns. The script prints medians of CPU time over the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"  # read when jax is imported


TOKENS = 2048
SHAPES = {
    "query, key, value": (384, 1152),
    "attention's output": (384, 384),
    "gate and up": (384, 2048),
    "down": (1024, 384),
    "head": (384, 256),
}
"""Product -> (inputs, outputs) of its weight."""

PASSES = ("forward", "input gradient", "weight gradient")
LIBRARIES = ("xla", "xla, transposed", "pytorch")
BLOCK_FLOPS = 8e9  # per measurement


def xla(is_transposed: bool) -> Callable[[int, int], dict[str, Callable[[], Any]]]:
    """Return (inputs, outputs) -> pass -> function that computes it and waits."""
    import jax
    import jax.numpy as jnp

    dims = ("tk,kn->tn", "tn,kn->tk", "tn,tk->kn")
    if is_transposed:
        dims = ("tk,nk->tn", "tn,nk->tk", "tn,tk->nk")

    def products(inputs: int, outputs: int) -> dict[str, Callable[[], Any]]:
        sizes = {"t": TOKENS, "k": inputs, "n": outputs}

        def product(dims: str) -> Callable[[], Any]:
            names = dims.partition("->")[0].split(",")
            keys = jax.random.split(jax.random.key(0))
            operands = [
                jax.random.normal(key, [sizes[dim] for dim in name])
                for key, name in zip(keys, names, strict=True)
            ]
            compiled = jax.jit(lambda a, b: jnp.einsum(dims, a, b)).lower(*operands).compile()
            return lambda: compiled(*operands).block_until_ready()

        return dict(zip(PASSES, map(product, dims), strict=True))

    return products


def pytorch(inputs: int, outputs: int) -> dict[str, Callable[[], Any]]:
    """Return the passes in PyTorch, in the form of `nn.Linear` and its backward."""
    import torch

    torch.set_num_threads(1)
    x, weight = torch.randn(TOKENS, inputs), torch.randn(outputs, inputs)
    grad = torch.randn(TOKENS, outputs)
    products = (lambda: x @ weight.T, lambda: grad @ weight, lambda: grad.T @ x)
    return dict(zip(PASSES, products, strict=True))


def serve(library: str) -> None:
    """Answer each line `[product, pass]` with GFLOP/s."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    make = pytorch if library == "pytorch" else xla(is_transposed=library != "xla")
    products = {name: make(*shape) for name, shape in SHAPES.items()}
    for line in sys.stdin:
        name, which = json.loads(line)
        flops = 2 * TOKENS * SHAPES[name][0] * SHAPES[name][1]
        run, repeats = products[name][which], max(1, round(BLOCK_FLOPS / flops))
        run()
        begin = time.process_time()
        for _ in range(repeats):
            run()
        print(flops * repeats / (time.process_time() - begin) / 1e9, flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each product")
    parser.add_argument("--serve", choices=LIBRARIES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return serve(arguments.serve)
    children = {
        name: subprocess.Popen(
            [sys.executable, __file__, "--serve", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in LIBRARIES
    }
    print(row("product", *(f"{which}, {name}" for which in PASSES for name in LIBRARIES)))
    print(row(*["---"] + ["---:"] * len(PASSES) * len(LIBRARIES)))
    for product, (inputs, outputs) in SHAPES.items():
        cells = [measure(children, [product, which], arguments.rounds) for which in PASSES]
        print(row(f"{product}, {inputs} × {outputs}", *(x for cell in cells for x in cell)))
    for child in children.values():
        child.stdin.close()
        child.wait()


def measure(children: dict[str, subprocess.Popen], what: list[str], rounds: int) -> list[str]:
    """Return the median GFLOP/s of each library."""
    seconds: dict[str, list[float]] = {name: [] for name in children}
    for _ in range(rounds):
        for name, child in children.items():
            print(json.dumps(what), file=child.stdin, flush=True)
            seconds[name].append(float(child.stdout.readline()))
    return [f"{statistics.median(x):.0f}" for x in seconds.values()]


def row(*cells: str) -> str:
    """Return one row of a Markdown table."""
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
