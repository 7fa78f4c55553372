"""Compiled programs move the bytes of the theory, and so does the estimate: by kind and axes."""

import collections
import dataclasses

import pytest
from test_estimate import job
from test_traffic import CASES, lowered, theory, traffic
from tiny import CONFIGS, ROWS, SEQ, Case, layout_of

from jaxdist.config import RunConfig
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.precision import PrecisionConfig
from jaxdist.core.sharding import MeshConfig
from jaxdist.core.step import TrainConfig
from jaxdist.hardware import GPUS, Cluster
from jaxdist.plan.estimate.job import Job
from jaxdist.plan.estimate.traffic import flows_of, members_per_fabric


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


@pytest.mark.parametrize(("nodes", "micros"), [(1, 32.2), (64, 8.4 + 448 * 3.4 + 63 * 9.6)])
def test_ring_latency_counts_every_gpu(nodes, micros):
    """NCCL's own figures for a ring of long messages; the rest is the bytes at their rate."""
    one = job(f"fsdp={8 * nodes}", gpus=f"h100:{nodes}x8", train={"global_batch_size": 8 * nodes})
    flow = next(f for f in flows_of(one) if (f.kind, f.purpose) == ("all-gather", "weights"))
    gpu, rest = one.cluster.gpu, flow.seconds - flow.times * micros * 1e-6
    rate = gpu.link_bandwidth if nodes == 1 else 8 * gpu.network_bandwidth
    missing = (8 - 1) / 8 if nodes == 1 else (nodes - 1) / nodes
    assert rest == pytest.approx(missing * flow.bytes / rate, rel=0.12 if nodes > 1 else 1e-6)


def test_gradient_sums_over_many_replicas_use_a_tree():
    """On 8 times as many nodes a ring would take 2 × 8 times as long to start."""
    starts = []
    for nodes in (2, 16):
        one = job(f"dp={8 * nodes}", gpus=f"h100:{nodes}x8", train={"global_batch_size": 8 * nodes})
        flow = next(f for f in flows_of(one) if f.kind == "all-reduce")
        share = 2 * (nodes - 1) / nodes
        rest = share * flow.bytes / (8 * one.cluster.gpu.network_bandwidth)
        starts.append(flow.seconds - max(rest, flow.wire_bytes / one.cluster.gpu.link_bandwidth))
    assert 0 < starts[0] < starts[1] < 3 * starts[0]


def test_groups_count_members_that_share_a_node():
    one = job("pp=2,dp=4,fsdp=4,tp=4", gpus="h100:16x8")
    assert members_per_fabric(one, ("tensor",)) == 4
    assert members_per_fabric(one, ("fsdp",)) == 2
    assert members_per_fabric(one, ("fsdp", "tensor")) == 8
    assert members_per_fabric(one, ("data",)) == 1
    assert members_per_fabric(one, ("pipeline",)) == 1
