"""Measure how much a concurrent local save slows a step if the save has its own core.

    python scripts/bench/local_tier.py                  # about two minutes on two quiet cores
    python scripts/bench/local_tier.py --mb 200 --saves 20

The process and its CPU device are bound to the first core, the thread that writes local saves to
the second, as on a host of GPUs, whose steps need no core. A step multiplies matrices and updates
`--mb` of state. Blocks of steps with one save each and without alternate. `blocked` is the copy to
host memory, for which a step waits; checksums run on the device, between two steps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TRAINING_CORE, SAVING_CORE = 0, 1
BLOCK_STEPS = 12
SAVER = "checkpoint-local"
"""Name of the thread of `jaxdist.checkpoint.local.tier`."""


def bind() -> None:
    """Bind this process to a core before jax starts threads, and the saver thread to another."""
    os.sched_setaffinity(0, {TRAINING_CORE})
    run = threading.Thread.run

    def run_bound(thread: threading.Thread) -> None:
        if thread.name == SAVER:
            os.sched_setaffinity(0, {SAVING_CORE})  # only this thread
        run(thread)

    threading.Thread.run = run_bound  # type: ignore[method-assign]


def main() -> int:
    """Measure and print one line for each kind of step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--mb", type=float, default=50, help="of state (default %(default)s)")
    parser.add_argument("--step-s", type=float, default=0.5, help="about so long without a save")
    parser.add_argument("--saves", type=int, default=10, help="(default %(default)s)")
    arguments = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        print("two cores are needed: one for steps, one for saves")
        return 2
    bind()
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory(prefix="bench-local-tier-") as folder:
        report(measure(Path(folder), arguments.mb, arguments.step_s, arguments.saves))
    return 0


def measure(folder: Path, mb: float, step_s: float, saves: int) -> dict[str, list[float]]:
    """Return seconds of steps without a save, of steps during a save, and of parts of the saves."""
    from jaxdist.checkpoint import CheckpointConfig, Checkpointer

    step, state = make_step(mb, step_s)
    config = CheckpointConfig(local_dir=str(folder / "disk"))
    writer = Checkpointer(folder / "run", config, log=lambda line: None)
    writer.preflight(state)
    measured: dict[str, list[float]] = {"without": [], "beside": [], "blocked": [], "written": []}
    number = 0
    for block in range(2 * (saves + 1)):  # the first of each kind warms up
        saved = block % 2 == 0
        seconds: list[float] = []
        for k in range(BLOCK_STEPS):
            number += 1
            begin = time.perf_counter()
            if saved and k == 0:
                writer.save(number, state, {}, due="local")
            state = step(state)
            seconds.append(time.perf_counter() - begin)
            events = [e for e in writer.pop_events() if e["event"] == "local_save"]
            if events:
                break
        if block < 2:
            continue
        if saved and events:  # else not written within the block: reported below
            measured["beside"] += seconds
            measured["blocked"].append(events[0]["blocked_s"])
            measured["written"].append(events[0]["written_s"])
        elif not saved:
            measured["without"] += seconds
    writer.close()
    return measured


def make_step(mb: float, step_s: float) -> tuple[Any, Any]:
    """Return a step that waits for its own end, and its first state of `mb` MB."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    columns = int(mb * 1e6 / 4 / 3 / 1024)
    params = {"w": jax.random.normal(jax.random.key(0), (1024, columns))}
    moments = {name: jax.tree.map(jnp.zeros_like, params) for name in ("mu", "nu")}
    # Use a mesh, as in a run: otherwise each checksum would block the next step.
    placed = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec())
    state = jax.device_put({"params": params, "opt_state": moments}, placed)

    def one(state: Any, products: int) -> Any:
        first = jnp.eye(1024) + state["params"]["w"][:, :1]
        x = jax.lax.fori_loop(0, products, lambda _, x: jnp.tanh(x @ x) / 32, first)
        return jax.tree.map(lambda leaf: leaf * 0.999 + x[0, 0], state)

    compiled = jax.jit(one, static_argnums=1, donate_argnums=0)
    run = lambda state, products: jax.block_until_ready(compiled(state, products))
    state = run(state, 4)
    begin = time.perf_counter()
    state = run(state, 4)
    products = max(1, round(4 * step_s / (time.perf_counter() - begin)))
    state = run(state, products)
    return lambda state: run(state, products), state


def report(measured: dict[str, list[float]]) -> None:
    """Print medians, and the ratio that must stay within 10 %."""
    without = statistics.median(measured["without"])
    load = ", ".join(f"{x:.1f}" for x in os.getloadavg())
    print(
        f"load averages {load}; {len(measured['blocked'])} saves written within {BLOCK_STEPS} steps"
    )
    for name, values in measured.items():
        median, most = statistics.median(values), max(values)
        line = f"{name:8} median {median:.3f} s, slowest {most:.3f} s, {len(values)} times"
        print(line + f", {median / without:.3f} of a step")
    mean = statistics.fmean(measured["beside"]) / statistics.fmean(measured["without"])
    print(f"mean step beside a save / without: {mean:.3f}")


if __name__ == "__main__":
    sys.exit(main())
