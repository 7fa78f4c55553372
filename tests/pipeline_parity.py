"""Compare gradients of one pipeline step with one device, here or on more devices.

    python tests/pipeline_parity.py NUM_DEVICES CASE [CASE ...]

A case is `mesh;key=value;...`. Prints one JSON object per case.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import os
import sys
from typing import Any

import numpy as np

SEQ_LEN = 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison; `automatic` leaves the tensor axis to XLA, as for a model without hooks."""

    mesh: str
    microbatches: int = 0
    virtual: int = 1
    gather: str = "action"
    family: str = "llama"
    layers: int = 4
    rows: int = 8
    zero: int = 0
    sequence_parallel: bool = True
    automatic: bool = False
    remat: str = "none"
    dtype: str = "float32"
    scale: float = 1.0
    exchange: str = "auto"
    depths: str = ""

    def __str__(self) -> str:
        default = {field.name: field.default for field in dataclasses.fields(self)}
        changed = {k: v for k, v in dataclasses.asdict(self).items() if v != default[k]}
        mesh = changed.pop("mesh").replace("=", "").replace(",", "_")
        return "-".join([mesh, *(f"{k}={v}" for k, v in changed.items())])


FAMILIES = {
    "llama": {},
    "llama_tied": {"tie_embeddings": True},
    "gemma": {
        "norm": "zero_centered_rms",
        "norm_placement": "both",
        "activation": "geglu",
        "qk_norm": "head",
        "tie_embeddings": True,
        "scale_embeddings": True,
        "sliding_window": 3,
        "full_attention_every": 3,
        "local_rope_theta": 100.0,
        "attention_softcap": 0.5,
        "logit_softcap": 0.5,
    },
    "olmo2": {"norm_placement": "post", "qk_norm": "all"},
    "gpt2": {
        "norm": "layer",
        "positions": "learned",
        "activation": "gelu",
        "bias": ["qkv", "out", "mlp"],
        "tie_embeddings": True,
        "dropout": 0.2,
    },
}


@functools.cache
def make_model(family: str, layers: int) -> Any:
    from jaxdist.models import DecoderConfig, build

    config = DecoderConfig(
        d_model=32,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=4,
        mlp_dim=64,
        vocab_size=60,
        max_seq_len=SEQ_LEN,
        **FAMILIES[family],
    )
    return build(config, seq_len=SEQ_LEN)


@functools.cache
def host_params(family: str, layers: int) -> Any:
    import jax

    return jax.device_get(jax.jit(make_model(family, layers).init)(jax.random.key(0)))


def host_batch(rows: int) -> dict[str, np.ndarray]:
    """Return random tokens with weights that differ by row and microbatch and sum exactly."""
    random = np.random.default_rng(0)
    tokens = random.integers(0, 60, (rows, SEQ_LEN + 1)).astype(np.int32)
    weights = (random.random((rows, SEQ_LEN)) > 0.3) * (1 + np.arange(rows) % 4)[:, None] / 4
    return {
        "tokens": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "weights": weights.astype(np.float32),
    }


def make_parts(case: Case) -> tuple[Any, ...]:
    """Return (model, layout, train config, precision, context, pipeline config) of a case."""
    import jax
    from tiny import plan_of

    from jaxdist.core.mesh import MeshSpec
    from jaxdist.core.parallel.pipeline.config import PipelineConfig
    from jaxdist.core.precision import PrecisionConfig
    from jaxdist.core.sharding import Layout
    from jaxdist.core.step import TrainConfig, make_context

    spec = MeshSpec.parse(case.mesh)
    layout = Layout(
        mesh=spec.build(jax.devices()[: spec.num_devices]),
        zero=case.zero,
        sequence_parallel=case.sequence_parallel and not case.automatic,
        auto_tensor=case.automatic,
        context_attention=case.exchange,
        stage_depths=tuple(map(int, case.depths.split("."))) if case.depths else (),
    )
    model = make_model(case.family, case.layers)
    config = TrainConfig(
        global_batch_size=case.rows,
        seq_len=SEQ_LEN,
        num_microbatches=case.microbatches,
        remat=case.remat,
    )
    precision = PrecisionConfig(compute_dtype=case.dtype)  # type: ignore[arg-type]
    stages = PipelineConfig(
        num_virtual_stages=case.virtual,
        gather=case.gather,  # type: ignore[arg-type]
    )
    plan = plan_of(model, layout, config, precision, stages)
    return model, layout, plan, make_context(model, layout, plan)


def placed_params(case: Case, model: Any, layout: Any, plan: Any) -> Any:
    import jax
    import optax

    from jaxdist.core.parallel.pipeline.virtual_stages import to_execution_order
    from jaxdist.core.state import abstract_state

    state = abstract_state(model, optax.identity(), layout, loss_scale={})
    shardings = jax.tree.map(lambda x: x.sharding, state.params)
    params = jax.device_put(host_params(case.family, case.layers), shardings)
    return to_execution_order(params, plan.layers)


def lowered(case: Case) -> Any:
    import jax
    import jax.numpy as jnp

    from jaxdist.core.parallel.context import place_batch
    from jaxdist.core.step import make_value_and_grad

    model, layout, plan, context = make_parts(case)
    function = make_value_and_grad(model, layout, plan, context)
    arguments = (
        placed_params(case, model, layout, plan),
        place_batch(host_batch(case.rows), layout.sharding(layout.batch_spec())),
        jax.random.key(1),
        jnp.float32(case.scale),
    )
    return jax.jit(function), arguments


def gradients(case: Case) -> tuple[Any, Any, Any]:
    import jax

    from jaxdist.core.parallel.pipeline.virtual_stages import to_model_order

    function, arguments = lowered(case)
    sums, grads, norm = function(*arguments)
    layers = make_parts(case)[2].layers
    return jax.device_get((sums, to_model_order(grads, layers), norm))


def evaluation(case: Case) -> Any:
    import jax

    from jaxdist.core.parallel.context import place_batch
    from jaxdist.core.step import make_evaluate

    model, layout, plan, context = make_parts(case)
    evaluate = jax.jit(make_evaluate(model, layout, plan, context))
    params = placed_params(case, model, layout, plan)
    batch = place_batch(host_batch(case.rows), layout.sharding(layout.batch_spec()))
    return jax.device_get(evaluate(params, batch))


@functools.cache
def reference(case: Case) -> tuple[Any, Any, Any]:
    return gradients(Case(mesh="dp=1", family=case.family, layers=case.layers, rows=case.rows))


@dataclasses.dataclass(frozen=True)
class Difference:
    """Differences between a pipeline and one device.

    Attributes:
        loss: relative difference of the summed loss.
        weight: difference of the summed weight.
        gradient: largest difference of any gradient, relative to the largest gradient.
        norm: relative difference of the gradient norm.
    """

    loss: float
    weight: float
    gradient: float
    norm: float


def compare(case: Case) -> Difference:
    import jax

    sums, grads, norm = gradients(case)
    ref_sums, ref_grads, ref_norm = reference(dataclasses.replace(case, mesh="dp=1"))
    largest = max(np.abs(x).max() for x in jax.tree.leaves(ref_grads))
    apart = jax.tree.map(lambda a, b: np.abs(np.asarray(a, np.float64) - b).max(), grads, ref_grads)
    return Difference(
        loss=abs(float(sums["loss"]) / float(ref_sums["loss"]) - 1),
        weight=abs(float(sums["weight"]) - float(ref_sums["weight"])),
        gradient=float(max(jax.tree.leaves(apart)) / largest),
        norm=abs(float(norm) / float(ref_norm) - 1),
    )


SCHEDULES: tuple[dict[str, Any], ...] = (
    {},
    {"virtual": 2},
    {"virtual": 3},
)
STRATEGIES: tuple[tuple[str, int], ...] = (  # (the rest of the mesh, ZeRO stage)
    ("dp=2", 0),
    ("fsdp=2", 0),
    ("tp=2", 0),
    ("dp=2,fsdp=2", 0),
    ("dp=2", 1),
    ("dp=2", 2),
)


def combined(i: int, j: int, num_stages: int) -> Case:
    """Combine schedule `i` with strategy `j` and an odd microbatch count; families alternate."""
    schedule, (rest, zero) = SCHEDULES[i], STRATEGIES[j]
    replicas = {"tp=2": 1, "dp=2,fsdp=2": 4}.get(rest, 2)
    microbatches = num_stages + 1
    return Case(
        mesh=f"pp={num_stages},{rest}",
        zero=zero,
        family=tuple(FAMILIES)[(i + 2 * j) % len(FAMILIES)],
        layers=num_stages * schedule.get("virtual", 1),
        rows=microbatches * replicas,
        microbatches=microbatches,
        **schedule,
    )


def cover() -> list[Case]:
    """Cover each strategy once and each schedule twice, on two or four stages.

    Four stages of four replicas need more devices than a test process has; they use two stages.
    """
    return [
        combined(j % len(SCHEDULES), j, 4 if j in (1, 2, 4) else 2) for j in range(len(STRATEGIES))
    ]


def parse(text: str) -> Case:
    mesh, *items = text.split(";")
    types = {field.name: type(field.default) for field in dataclasses.fields(Case)}
    options = dict(item.split("=", 1) for item in items)
    values = {
        key: value == "True" if types[key] is bool else types[key](value)
        for key, value in options.items()
    }
    return Case(mesh=mesh, **values)


def main(argv: list[str]) -> None:
    """Compare on more devices than the test process has."""
    gc.set_threshold(100_000, 50, 100)  # as a command does: see `run_command`
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_num_cpu_devices", int(argv[0]))
    for case in map(parse, argv[1:]):
        print(json.dumps({"case": str(case), **dataclasses.asdict(compare(case))}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
