"""The planner's estimates of shared rows: traffic as compiled, and configs that fit their GPUs."""

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from refusals import refused
from roofline import model_times
from test_estimate_traffic import job_of, moved
from test_traffic import traffic
from tiny import Case, layout_of, step_of, text_batch

from jaxdist.config import RunConfig, stored_run
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.parallel.context import place_batch
from jaxdist.core.sharding import MeshConfig
from jaxdist.core.step import TrainConfig
from jaxdist.data import DataConfig
from jaxdist.hardware import GPUS, Cluster
from jaxdist.models import DecoderConfig
from jaxdist.plan import advice
from jaxdist.plan.compiled import check
from jaxdist.plan.compiled.collectives import read_collectives
from jaxdist.plan.estimate.attention import imbalance
from jaxdist.plan.estimate.job import Job
from jaxdist.plan.estimate.memory import estimate_memory, usable_bytes
from jaxdist.plan.estimate.search import Candidate, exchanges, search
from jaxdist.plan.estimate.software import OURS
from jaxdist.plan.estimate.time import estimate_time
from jaxdist.plan.estimate.traffic import flows_of
from jaxdist.runtime.formatting.numbers import percent

CONFIGS = Path(__file__).parent.parent / "configs"


@pytest.mark.parametrize(
    ("exchange", "kinds"),
    [
        ("ring", {"collective-permute"}),
        ("all_to_all", {"all-to-all"}),
        ("hybrid", {"collective-permute", "all-to-all"}),
    ],
)
def test_an_exchange_plans_no_collective_that_it_does_not_run(exchange, kinds):
    """A collective of zero bytes is not planned either: the table of `plan` would list it."""
    flows = flows_of(job_of(Case("learned", "cp=4", exchange=exchange)))
    assert {flow.kind for flow in flows if flow.purpose not in ("gradients", "weights")} == kinds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "packing"),
    [
        pytest.param(
            Case("rotary", "cp=4", exchange="all_gather"), "documents", marks=pytest.mark.product
        ),
        (Case("windowed", "cp=4", exchange="ring"), "documents"),
        (Case("learned", "cp=4", exchange="hybrid"), "stream"),
    ],
    ids=str,
)
def test_traffic_of_shared_rows_equals_the_compiled_programs(case, packing):
    """Compare keys, values, heads and documents, forward and backward, and gradients.

    Documents are the same in every layer: XLA may move some of them only once.
    """
    step, state = step_of(case)
    rows = text_batch(packed=packing == "documents")
    batch = place_batch(rows, step.batch_sharding)
    text = step.train.lower(state, batch, np.inf).compile().as_text()
    read = traffic(text, layout_of(case).mesh.shape)
    data = DataConfig(packing=packing)
    planned = moved(case, data=data)
    sent = {key: amount for key, (_, amount) in read.items()}
    if packing == "stream":
        assert planned == sent
        # Heads are exchanged by half of the devices, which send less than all would.
        wires = sum(
            c.count * c.wire_bytes for c in read_collectives(text, layout_of(case).mesh.shape)
        )
        assert sum(f.wire_bytes for f in flows_of(job_of(case, data=data))) == wires
        return
    assert planned == pytest.approx(sent, rel=0.02)
    assert sum(planned.values()) >= sum(sent.values())


@pytest.mark.parametrize(("name", "num_nodes"), [("llama3_8b_128k", 1), ("llama3_70b_128k", 16)])
def test_configs_of_long_rows_fit_their_gpus(name, num_nodes):
    """They fit 80-GB GPUs with a tenth to spare, by a mesh whose attention is cuDNN's.

    Planned memory is near compiled memory. With exchanged heads the output is kept twice.
    """
    config = stored_run(CONFIGS / f"{name}.toml")
    job = Job.of(
        config, config.mesh.spec, Cluster(gpu=GPUS["h100"], num_nodes=num_nodes, gpus_per_node=8)
    )
    config.check_mesh(job.spec, job.model, job.cluster.num_gpus)
    assert estimate_memory(job).total_bytes <= 0.9 * usable_bytes(job)
    assert (job.plan.exchange.exchange, job.attention) == ("all_to_all", "cudnn")
    page = (CONFIGS.parent / "scripts/bench/results/context_program.md").read_text()
    compiled = float(re.search(rf"^\| `{name}` .*\| ([\d.]+) \| [\d.]+ \|$", page, re.M)[1])
    assert estimate_memory(job).total_bytes / 2**30 == pytest.approx(compiled, rel=0.05)


def long_rows(heads: int, kv_heads: int, **shape) -> RunConfig:
    """Return settings with rows of 32,768 tokens, four per step."""
    sizes = {"d_model": 128 * heads, "mlp_dim": 512 * heads, "vocab_size": 32000, "num_layers": 8}
    model = DecoderConfig(num_heads=heads, num_kv_heads=kv_heads, positions="rotary", **sizes)
    train = TrainConfig(global_batch_size=4, seq_len=32768, num_microbatches=1, remat="full")
    return RunConfig(model=model, train=train, **shape)


def committed(exchange: str) -> float:
    page = (CONFIGS.parent / "scripts/bench/results/context_program.md").read_text()
    table = page.partition("## One row of 1,048,576 tokens")[2]
    return float(re.search(rf"^\| {exchange} \| \w+ \| ([\d.]+) \|", table, re.M)[1])


@pytest.mark.parametrize("exchange", ["ring", "all_gather", "all_to_all", "hybrid"])
def test_the_memory_of_each_exchange_equals_the_compiled_program(exchange):
    """Two layers of a million tokens on 32 devices; after an all-gather all keys have gradients."""
    config = stored_run(CONFIGS / "llama3_8b_1m.toml")
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, num_layers=2),
        train=dataclasses.replace(
            config.train, global_batch_size=1, num_microbatches=1, remat="full"
        ),
        mesh=dataclasses.replace(config.mesh, context_attention=exchange),
    )
    nodes = 2 if exchange == "hybrid" else 1
    cluster = Cluster(gpu=GPUS["h100"], num_nodes=nodes, gpus_per_node=32 // nodes)
    planned = estimate_memory(Job.of(config, MeshSpec(context=32), cluster)).temporary_bytes
    assert planned / 2**30 == pytest.approx(committed(exchange), rel=0.06)


def test_activations_of_a_row_fall_with_the_devices_that_share_it():
    """Twice the devices halve the committed activations, within a tenth."""
    page = (CONFIGS.parent / "scripts/bench/results/context_program.md").read_text()
    table = page.partition("## Memory of one row")[2].partition("##")[0]
    shares = re.findall(r"^\| \d+ \|.*\| (\d+) % \|$", table, re.M)
    assert len(shares) == 2 and all(90 <= int(share) <= 110 for share in shares)


PACKED = DataConfig(packing="documents")
TWO_NODES = Cluster(gpu=GPUS["h100"], num_nodes=2, gpus_per_node=8)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "fastest"),
    [(6, 6, "hybrid"), (32, 8, "all_to_all")],
)
def test_the_search_selects_the_fastest_exchange_and_names_it(heads, kv_heads, fastest):
    """This also holds if the rule, which ignores links, chooses the ring (6 heads, 16 devices)."""
    config, spec = long_rows(heads, kv_heads), MeshSpec(context=16)
    best = next(c for c in search(config, TWO_NODES, stages=False).choices if c.job.spec == spec)
    name = best.job.config.mesh.context_attention
    assert name == best.job.plan.exchange.exchange == fastest
    assert best.flags(config)["mesh.context_attention"] == name
    for other in exchanges(best.job):
        changed = Candidate.of(best.job.changed("mesh", context_attention=other))
        assert not changed.fits or best.time.seconds <= changed.time.seconds


def test_an_exchange_without_the_requested_kernel_is_refused():
    """cuDNN's causal mask does not support all keys at once."""
    config, spec = long_rows(3, 3), MeshSpec(context=2)
    named = dataclasses.replace(config.model, attention="cudnn")
    cluster = Cluster(gpu=GPUS["h100"], num_nodes=1, gpus_per_node=2)
    job = Job.of(dataclasses.replace(config, model=named), spec, cluster)
    assert set(exchanges(Job.of(config, spec, cluster))) == {"ring", "all_gather"}
    assert exchanges(job) == ["ring"]
    with refused("attention='cudnn'", "all gathered keys"):
        _ = job.changed("mesh", context_attention="all_gather").attention
    # Wider heads than parts of packed rows support; complete packed rows support them.
    wide = dataclasses.replace(named, head_dim=192)
    results = search(dataclasses.replace(config, model=wide, data=PACKED), cluster, stages=False)
    assert "attention='cudnn'" in results.refused[spec] and results.choices


@pytest.mark.parametrize(("num_nodes", "waits_long"), [(1, False), (2, True)])
def test_a_ring_overlaps_with_attention(num_nodes, waits_long):
    """Every chunk except the device's own overlaps; the remaining time is waiting."""
    mesh = MeshConfig(context_attention="ring")
    cluster = dataclasses.replace(TWO_NODES, num_nodes=num_nodes)
    size = cluster.num_gpus
    job = Job.of(long_rows(6, 6, mesh=mesh), MeshSpec(context=size), cluster)
    parts = estimate_time(job).parts
    permutes = [f for f in flows_of(job) if f.kind == "collective-permute"]
    moving = sum(f.seconds for f in permutes) / OURS.links
    overlapped = parts["attention"] * (size - 1) / size
    assert (OURS.hidden * moving > overlapped) == waits_long
    waited = sum(parts[f"waiting for {f.purpose}"] for f in permutes)
    late = max(0.0, OURS.hidden * moving - overlapped)
    assert waited == pytest.approx((1 - OURS.hidden) * moving + late)


@pytest.mark.parametrize("exchange", ["ring", "hybrid"])
def test_a_window_does_not_change_ring_traffic(exchange):
    """Layers with a window run block by block, and their keys pass all devices."""
    config = long_rows(6, 6, mesh=MeshConfig(context_attention=exchange))
    sent = []
    for window, every, kernel in [(0, 0, "cudnn"), (4096, 0, "blockwise"), (4096, 2, "blockwise")]:
        model = dataclasses.replace(config.model, sliding_window=window, full_attention_every=every)
        job = Job.of(dataclasses.replace(config, model=model), MeshSpec(context=16), TWO_NODES)
        permutes = [f for f in flows_of(job) if f.kind == "collective-permute"]
        sent.append(sum(f.wire_bytes for f in permutes))
        assert job.attention == kernel and estimate_time(job).seconds > 0
    assert sent[0] > 0 and sent == sent[:1] * 3


def test_times_count_the_work_of_the_busiest_device():
    """Packed rows: a ring is unbalanced, a hybrid less, exchanged heads not. Causal: balanced."""
    job = Job.of(long_rows(8, 8), MeshSpec(context=8), TWO_NODES)
    spent = lambda job: estimate_time(job).parts["attention"]
    by = lambda job, name: job.changed("mesh", context_attention=name)
    remark_of = lambda job: next(advice._exchange(SimpleNamespace(choice=Candidate.of(job)))).text
    assert imbalance(by(job, "ring")) == 0
    packed = dataclasses.replace(job, config=dataclasses.replace(job.config, data=PACKED))
    uneven = [imbalance(by(packed, name)) for name in ("ring", "hybrid", "all_to_all")]
    assert uneven[0] > 1.5 * uneven[1] > 0.05 and uneven[2] == 0
    ring, packed_ring = by(job, "ring"), by(packed, "ring")
    # A little less, as the kernel is faster where it sees more keys.
    assert spent(packed_ring) == pytest.approx((1 + uneven[0]) * spent(ring), rel=0.02)
    shares = [f"{name} {percent(imbalance(by(packed, name)), 0)}" for name in exchanges(packed)]
    assert all(share in remark_of(packed_ring) and share not in remark_of(ring) for share in shares)


SMALL = RunConfig(
    model=DecoderConfig(d_model=512, num_layers=4, num_heads=8, num_kv_heads=8, mlp_dim=1024),
    train=TrainConfig(global_batch_size=2, seq_len=4096, num_microbatches=1, remat="full"),
    simulate=4,
)


@pytest.mark.slow
@pytest.mark.skipif(
    check.missing_compiler() is not None,
    reason="the extra `plan` (XLA:GPU compiler) is not installed",
)
@pytest.mark.parametrize(
    "exchange", ["ring", pytest.param("all_to_all", marks=pytest.mark.product)]
)
def test_traffic_of_the_gpu_program_is_the_planned(exchange):
    """Keys, values, heads and their gradients, in bfloat16 and float32 as the GPU sends them.

    Every permute of a ring overlaps, nearly all of them with a product.
    """
    mesh = MeshConfig(context_attention=exchange)
    config = dataclasses.replace(SMALL, mesh=mesh)
    spec, nodes = MeshSpec(context=4), Cluster(gpu=GPUS["h100"], num_nodes=1, gpus_per_node=4)
    step = check.compile_step(config, spec, nodes, timeout_s=300)
    assert isinstance(step, check.CompiledStep), step
    kinds = ("collective-permute", "all-to-all")
    sent = {key: value for key, value in step.wire_bytes().items() if key[0] in kinds}
    planned: dict[tuple[str, str], float] = {}
    for flow in flows_of(Job.of(config, spec, nodes)):
        if flow.kind in kinds:
            key = (flow.kind, "+".join(flow.axes))
            planned[key] = planned.get(key, 0.0) + flow.wire_bytes
    assert sent == pytest.approx(planned, rel=0.01)
    # Every step of the ring is one call: forward, again in backward, and two in backward itself.
    calls = 2 * 4 + 2 * 4 if exchange == "ring" else 3
    assert step.attention == "cudnn"
    times = model_times(step.program, spec.sizes, nodes)
    assert times.calls["attention"] == 4 * calls
    if exchange == "ring":
        rings = [c for c in step.collectives if c.kind == "collective-permute"]
        assert rings and all(c.overlapped for c in rings)
        # XLA runs one hop of key gradients next to the reduce-scatter of weights: 3 of 44 permutes.
        idle = sum(c.count for c in rings if not c.products)
        assert idle <= 3 and sum(c.count for c in rings) == 44
