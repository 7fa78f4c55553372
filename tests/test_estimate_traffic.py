"""The estimated traffic equals that of compiled programs: kind, mesh axes, bytes, per step."""

import collections
import dataclasses

import jax
import pytest
from test_traffic import CASES, lowered, traffic
from tiny import CONFIGS, ROWS, SEQ, Case, initial_state, layout_of, make_update, model_of

from jaxdist.config import RunConfig
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.precision import PrecisionConfig
from jaxdist.core.sharding import MeshConfig
from jaxdist.core.step import TrainConfig
from jaxdist.optim import OptimConfig, make_optimizer
from jaxdist.plan.estimate.job import Job
from jaxdist.plan.estimate.traffic import flows_of
from jaxdist.plan.hardware import GPUS, Cluster


def job_of(case: Case, **changes) -> Job:
    config = RunConfig(
        model=CONFIGS[case.model],
        mesh=MeshConfig(
            zero=case.zero,
            sequence_parallel=case.sequence,
            fsdp_over_context=case.over_context,
            context_attention=case.exchange,
        ),
        train=TrainConfig(
            global_batch_size=ROWS,
            seq_len=SEQ,
            num_microbatches=case.microbatches,
            remat="none",
        ),
        precision=PrecisionConfig(compute_dtype="float32"),
    )
    config = dataclasses.replace(config, **changes)
    spec = MeshSpec.parse(case.mesh)
    return Job.of(
        config, spec, Cluster(gpu=GPUS["h100"], num_nodes=1, gpus_per_node=spec.num_devices)
    )


def moved(case: Case, **changes) -> dict[tuple[str, str], float]:
    found = collections.Counter()
    for flow in flows_of(job_of(case, **changes)):
        found[flow.kind, "+".join(flow.axes)] += flow.bytes
    # Kinds and axes whose arrays are all below 64 bytes are left out of the reader's account.
    return {key: amount for key, amount in found.items() if amount}


def test_muon_exchanges_its_matrices_and_no_device_gets_all():
    """The compiled update; two layers, so that most of what eight devices send is padding."""
    case, config = Case("rotary", "fsdp=8"), OptimConfig(optimizer="muon")
    layout, axes = layout_of(case), model_of("rotary").axes
    placed = layout.shardings(layout.moment_specs(axes))
    rule = make_optimizer(config, axes, placed)
    params = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        initial_state("rotary").params,
        placed,
    )
    state = jax.eval_shape(rule.init, params)
    text = make_update(rule).lower(params, state, params).compile().as_text()
    read = traffic(text, layout.mesh.shape)
    estimated = moved(case, optim=config)
    key = ("all-to-all", "fsdp")
    assert {key: amount for key, (_, amount) in read.items()} == {key: estimated[key]}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_estimated_traffic_equals_the_compiled_programs(case):
    text = lowered(case).compile().as_text()
    read = traffic(text, layout_of(case).mesh.shape)
    assert moved(case) == {key: amount for key, (_, amount) in read.items()}
