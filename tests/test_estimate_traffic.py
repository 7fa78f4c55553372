"""Compiled programs move the bytes of the theory, and so does the estimate: by kind and axes."""

import collections
import dataclasses

import pytest
from test_traffic import CASES, lowered, theory, traffic
from tiny import CONFIGS, ROWS, SEQ, Case, layout_of

from jaxdist.config import RunConfig
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.precision import PrecisionConfig
from jaxdist.core.sharding import MeshConfig
from jaxdist.core.step import TrainConfig
from jaxdist.hardware import GPUS, Cluster
from jaxdist.plan.estimate.job import Job
from jaxdist.plan.estimate.traffic import flows_of


def job_of(case: Case, **changes) -> Job:
    config = RunConfig(
        model=CONFIGS[case.model],
        mesh=MeshConfig(
            zero=case.zero,
            context_attention=case.exchange,
        ),
        train=TrainConfig(
            global_batch_size=ROWS,
            seq_len=SEQ,
            num_microbatches=case.microbatches,
            remat=case.remat,
        ),
        precision=PrecisionConfig(compute_dtype="float32"),
    )
    config = dataclasses.replace(config, **changes)
    spec = MeshSpec.parse(case.mesh)
    model = config.build_model()
    model = dataclasses.replace(model, sequence=model.sequence and case.sequence)
    cluster = Cluster(gpu=GPUS["h100"], num_nodes=1, gpus_per_node=spec.num_devices)
    return Job.of(config, spec, cluster, model)


def moved(case: Case, **changes) -> dict[tuple[str, str], float]:
    totals = collections.Counter()
    for flow in flows_of(job_of(case, **changes)):
        totals[flow.kind, "+".join(flow.axes)] += flow.bytes
    # The program reader omits kinds and axes whose arrays are all below 64 bytes.
    return {key: amount for key, amount in totals.items() if amount}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_estimated_traffic_equals_the_compiled_programs(case):
    text = lowered(case).compile().as_text()
    read = traffic(text, layout_of(case).mesh.shape)
    compiled = {key: amount for key, (_, amount) in read.items()}
    assert compiled == theory(case)
    assert compiled == moved(case)


@pytest.mark.parametrize(
    ("remat", "sequence"),
    [
        *(("dots", True), ("names:attention", True), ("names:attention_out", True)),
        *(("full", True), ("names:attention_out", False), ("full", False)),
    ],
)
def test_estimated_traffic_includes_rematerialized_collectives(remat, sequence):
    """Attention's output is saved after its sum over `tensor`; it is not summed again."""
    case = Case("rotary", "fsdp=2,tp=2", sequence=sequence, microbatches=2, remat=remat)
    text = lowered(case).compile().as_text()
    read = traffic(text, layout_of(case).mesh.shape)
    assert moved(case) == {key: amount for key, (_, amount) in read.items()}
