"""Step time and temporary memory of a mixture of experts on CPU, against two other models.

    python scripts/bench/experts.py >results/experts_NAME.md

One device: the same decoder with 8 experts of which each token uses 2, with one MLP of twice the
width (equal active FLOPs), and with an einsum of every token with every expert. The steps take
turns; times are medians over rounds. Eight simulated devices (`fsdp=2,ep=4`): routers whose logits
are random, and one whose logits are 0, so that all tokens choose experts 0 and 1 of the same
device. A learning rate near 0 keeps both routers.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_NUM_CPU_DEVICES"] = "8"

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.config import RunConfig
from jaxdist.core import experts
from jaxdist.core.precision import PrecisionConfig
from jaxdist.core.sharding import MeshConfig
from jaxdist.core.step import TrainConfig
from jaxdist.models import DecoderConfig
from jaxdist.optim import OptimConfig
from jaxdist.run.setup import assemble

SIZES: dict[str, Any] = dict(
    vocab_size=1024, d_model=256, num_layers=2, num_heads=8, max_seq_len=256
)
DENSE = DecoderConfig(**SIZES, mlp_dim=1024)
SPARSE = DecoderConfig(**SIZES, mlp_dim=512, num_experts=8, experts_per_token=2)
CAPACITY = dataclasses.replace(SPARSE, router={"capacity_factor": 1.25})
ROWS, ROUNDS = 8, 5
MIB = 2**20


def every_expert(_: Any) -> Callable[..., Any]:
    """Make `Context.experts` as one einsum of all tokens with all experts, [batch, seq, ...]."""

    def run(x: Any, routing: Any, up: Any, down: Any, activate: Any) -> Any:
        hidden = activate(jnp.einsum("bsd,edwf->bsewf", x, up).reshape(-1, *up.shape[2:]))
        chosen = jax.nn.one_hot(routing.experts, up.shape[0])
        shares = jnp.einsum("bske,bsk->bse", chosen, routing.shares)
        hidden = hidden.reshape(*x.shape[:2], up.shape[0], -1)
        return jnp.einsum("bsef,bse,efd->bsd", hidden, shares, down)

    return run


class Steps:
    """A compiled step with its state; `mesh` and `router_scale` as in the module's text."""

    def __init__(self, model: DecoderConfig, mesh: str = "1", router_scale: float = 1.0):
        config = RunConfig(
            model=model,
            mesh=MeshConfig(shape=mesh),
            precision=PrecisionConfig(compute_dtype="float32"),
            optim=OptimConfig(peak_lr=1e-30, weight_decay=0.0),
            train=TrainConfig(global_batch_size=ROWS, seq_len=SIZES["max_seq_len"]),
        )
        parts = assemble(config, jax.devices()[: config.mesh.spec.num_devices])
        state = parts.init_state()
        layers = state.params["layers"]
        if model.num_experts:
            layers["mlp"]["router"] = layers["mlp"]["router"] * router_scale
        rows = np.random.default_rng(0).integers(0, 1024, (ROWS, SIZES["max_seq_len"] + 1))
        fields = {"tokens": rows[:, :-1].astype(np.int32), "targets": rows[:, 1:].astype(np.int32)}
        fields["weights"] = np.ones(fields["tokens"].shape, np.float32)
        self.batch = jax.device_put(fields, parts.step.batch_sharding)
        self.state = state
        compiled = parts.step.train.lower(state, self.batch, np.inf).compile()
        self.temporary = compiled.memory_analysis().temp_size_in_bytes
        self.train, self.wall, self.processor = compiled, [], []
        self.metrics: dict[str, Any] = {}

    def run(self) -> None:
        """Run one step; keep its time."""
        began, used = time.perf_counter(), time.process_time()
        self.state, self.metrics = self.train(self.state, self.batch, np.inf)
        jax.block_until_ready(self.metrics)
        self.wall.append(time.perf_counter() - began)
        self.processor.append(time.process_time() - used)


def table(cases: dict[str, Steps]) -> None:
    """Run the cases in turns and print their times; ratios are to the first case."""
    for step in range(1 + ROUNDS):
        for case in cases.values():
            case.run()
            if not step:
                case.wall.clear(), case.processor.clear()
    first = next(iter(cases.values()))
    print(
        "| step | wall ms | processor ms | ratio, wall | ratio, processor | temporary MiB | load |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, case in cases.items():
        wall, processor = (statistics.median(times) for times in (case.wall, case.processor))
        ratios = [
            statistics.median(a / b for a, b in zip(ours, others, strict=True))
            for ours, others in ((case.wall, first.wall), (case.processor, first.processor))
        ]
        load = float(case.metrics.get("largest_load", 0))
        print(
            f"| {name} | {1e3 * wall:.0f} | {1e3 * processor:.0f} | {ratios[0]:.2f} "
            f"| {ratios[1]:.2f} | {case.temporary / MIB:.0f} | {load:.2f} |"
        )


def main() -> None:
    """Print both tables."""
    own = experts.make_experts
    print(f"jax {jax.__version__}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}\n")
    one = {"dense, equal active FLOPs": Steps(DENSE), "8 experts, 2 per token": Steps(SPARSE)}
    experts.make_experts = every_expert
    one["8 experts, all of them for each token"] = Steps(SPARSE)
    experts.make_experts = own
    table(one)
    print(f"\n`fsdp=2,ep=4`; load average {os.getloadavg()[0]:.1f}\n")
    mesh = "fsdp=2,ep=4"
    table(
        {
            "random router": Steps(SPARSE, mesh),
            "all tokens to one device": Steps(SPARSE, mesh, 0.0),
            "random router, capacity_factor 1.25": Steps(CAPACITY, mesh),
            "all tokens to one device, capacity_factor 1.25": Steps(CAPACITY, mesh, 0.0),
        }
    )


if __name__ == "__main__":
    main()
