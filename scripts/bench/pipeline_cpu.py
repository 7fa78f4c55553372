"""Measure the total work of pipeline stages on CPU, by processor time.

    python scripts/bench/pipeline_cpu.py [--steps 3]

Four simulated stages with 16 microbatches, by number of virtual stages, next to one device with the
same 16 microbatches; each in its own process, with one thread per device. Wall time means nothing
here, because all devices share the cores. Memory is kept between steps, as in a run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from datetime import UTC, datetime

STAGES, MICROBATCHES = 4, 16
MODEL = dict(vocab_size=1024, d_model=256, num_layers=8, num_heads=4, mlp_dim=1024, max_seq_len=256)
SINGLE_THREADED = "--xla_cpu_multi_thread_eigen=false"


def main() -> None:
    """Measure each case and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--inside", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside is not None:
        print(measure(args.inside["stages"], args.inside["virtual"], args.steps))
        return
    print(f"{datetime.now(UTC):%Y-%m-%d}, load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    print("| stages | virtual stages | processor s of a step | relative |")
    print("|---:|---:|---:|---:|")
    one = _in_process(1, 1, args.steps)
    print(f"| 1 | | {one:.2f} | 1.00 |", flush=True)
    for virtual in (1, 2):
        spent = _in_process(STAGES, virtual, args.steps)
        print(f"| {STAGES} | {virtual} | {spent:.2f} | {spent / one:.2f} |", flush=True)


def _in_process(stages: int, virtual: int, steps: int) -> float:
    case = json.dumps({"stages": stages, "virtual": virtual})
    done = subprocess.run(
        [sys.executable, __file__, "--inside", case, "--steps", str(steps)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": SINGLE_THREADED},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return float(done.stdout.split()[-1])


def measure(stages: int, virtual: int, steps: int) -> float:
    """Return the median processor seconds of a step, after two that are not counted."""
    import statistics

    import jax
    import numpy as np

    from jaxdist.config import RunConfig
    from jaxdist.core.parallel.pipeline.config import PipelineConfig
    from jaxdist.core.precision import PrecisionConfig
    from jaxdist.core.sharding import MeshConfig
    from jaxdist.core.step import TrainConfig
    from jaxdist.models import DecoderConfig
    from jaxdist.run.setup import assemble
    from jaxdist.runtime import tune_malloc

    tune_malloc()
    jax.config.update("jax_num_cpu_devices", stages)
    config = RunConfig(
        model=DecoderConfig(**MODEL),
        mesh=MeshConfig(shape=f"pp={stages}"),
        pipeline=PipelineConfig(num_virtual_stages=virtual),
        precision=PrecisionConfig(compute_dtype="float32"),
        train=TrainConfig(
            global_batch_size=MICROBATCHES,
            seq_len=MODEL["max_seq_len"],
            num_microbatches=MICROBATCHES,
        ),
    )
    parts = assemble(config, jax.devices())
    state, random = parts.init_state(), np.random.default_rng(0)
    rows = random.integers(0, MODEL["vocab_size"], (MICROBATCHES, MODEL["max_seq_len"] + 1))
    batch = {
        "tokens": rows[:, :-1].astype(np.int32),
        "targets": rows[:, 1:].astype(np.int32),
        "weights": np.ones((MICROBATCHES, MODEL["max_seq_len"]), np.float32),
    }
    batch = jax.device_put(batch, parts.step.batch_sharding)
    spent = []
    for _ in range(2 + steps):
        began = time.process_time()
        state, metrics = parts.step.train(state, batch, np.inf)
        jax.block_until_ready(metrics)
        spent.append(time.process_time() - began)
    return statistics.median(spent[2:])


if __name__ == "__main__":
    main()
