"""The exchange of devices that share rows: its choice, traffic, memory and time."""

import dataclasses
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused
from roofline import model_times
from test_estimate_traffic import job_of, moved
from test_traffic import traffic
from tiny import Case, layout_of, model_of, plan_of, step_of, text_batch

from jaxdist.config import RunConfig, read_run, stored_run
from jaxdist.core.attention.context_parallel import plan_exchange
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.parallel import context as axis
from jaxdist.core.parallel.context import place_batch
from jaxdist.core.sharding import Layout, MeshConfig
from jaxdist.core.step import TrainConfig, describe_exchange
from jaxdist.core.step_plan import _per_node, exchange_of
from jaxdist.core.weights import gradient_barrier
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
from jaxdist.settings import ConfigError

CONFIGS = Path(__file__).parent.parent / "configs"


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


@pytest.mark.parametrize(
    ("sizes", "exchange", "inner"),
    [
        ({"size": 2, "heads": 32, "kv_heads": 8}, "all_to_all", 2),
        ({"size": 3, "heads": 32, "kv_heads": 4}, "all_gather", 1),
        ({"size": 3, "heads": 32, "kv_heads": 8}, "ring", 1),
        ({"size": 8, "heads": 32, "kv_heads": 8}, "all_to_all", 8),
        ({"size": 64, "heads": 32, "kv_heads": 8, "per_node": 8}, "hybrid", 8),
        ({"size": 4, "heads": 3, "kv_heads": 3}, "ring", 1),
        ({"size": 8, "heads": 6, "kv_heads": 2}, "ring", 1),
        # Neighbors share the work that documents make uneven.
        ({"size": 8, "heads": 6, "kv_heads": 2, "packed": True}, "hybrid", 2),
        ({"size": 4, "heads": 3, "kv_heads": 3, "packed": True}, "ring", 1),
        ({"size": 3, "heads": 4, "kv_heads": 4, "has_stages": True}, "all_gather", 1),
    ],
)
def test_exchange_is_chosen_by_heads_and_devices(sizes, exchange, inner):
    plan = plan_exchange("auto", **{"per_node": sizes["size"], "has_stages": False, **sizes})
    assert (plan.exchange, plan.inner) == (exchange, inner)


@pytest.mark.parametrize(
    ("mesh", "per_host", "exchange", "inner"),
    [
        ("cp=8", 8, "all_to_all", 8),
        ("cp=8", 4, "hybrid", 4),
        ("cp=4,tp=2", 4, "hybrid", 2),
        # Two rows of six devices on hosts of four: only pairs share a host in both rows.
        ("dp=2,cp=6", 4, "hybrid", 2),
        ("cp=8", 1, None, 0),
    ],
)
def test_single_device_processes_are_grouped_by_host(mesh, per_host, exchange, inner):
    """Also if each process has one device, as with one process per GPU."""
    spec = MeshSpec.parse(mesh)
    devices = [SimpleNamespace(process_index=i) for i in range(spec.num_devices)]
    simulated = SimpleNamespace(
        devices=np.array(devices).reshape(*spec.sizes.values()),
        axis_names=tuple(spec.sizes),
        shape=spec.sizes,
    )
    requested = "auto" if exchange == "all_to_all" else "hybrid"
    hosts = {i: f"host{i // per_host}" for i in range(spec.num_devices)}
    layout = Layout(mesh=simulated, context_attention=requested, host_of=hosts)
    model = SimpleNamespace(context_parallel=True, dims={"heads": 24, "kv_heads": 24})
    if exchange is None:
        with pytest.raises(ConfigError):
            exchange_of(model, layout, _per_node(layout), packed=False)
        return
    plan = exchange_of(model, layout, _per_node(layout), packed=False)
    assert (plan.exchange, plan.inner) == (exchange, inner)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--mesh=cp=3"], "train.seq_len=132"),
        (["--mesh=cp=2", "--model.attention_dropout=0.1"], "model.attention_dropout=0.1"),
        (["--mesh=cp=2", "--model=cnn", "--data.sources="], "Model.context_parallel"),
        (["--mesh=cp=16", "--mesh.context_attention=all_to_all"], "cp=2, 4 or 8 "),
        (["--mesh=cp=3,pp=2", "--mesh.context_attention=ring"], "'all_gather'"),
        (["--mesh=fsdp=8,cp=32"], "fsdp=8 × cp=32"),
        (["--mesh=cp=3"], "mesh cp=3 does not divide model.d_model=128"),
    ],
)
def test_a_mesh_that_cannot_share_rows_is_refused(flags, named):
    with pytest.raises(ConfigError) as refused:
        read_run(flags, command="jaxdist.train")
    assert named in str(refused.value)


def test_zigzag_balances_work_across_devices():
    assert axis.imbalance(8, 4096) <= 0.05
    assert axis.imbalance(8, 64) <= 0.05
    # With a window of 2 only the row's first position sees fewer keys: 7 on one device, 8 on the
    # other.
    assert axis.imbalance(2, 8, window=2) == pytest.approx(8 / 7.5 - 1)
    # A document of 2 and one of 6: keys seen in the quarters 1+2, 1+2, 3+4, 5+6. Two neighbors that
    # exchange heads share the work of both.
    documents = np.array([[0, 1, 0, 1, 2, 3, 4, 5]])
    assert axis.imbalance(2, 8, position_ids=documents) == pytest.approx(14 / 12 - 1)
    assert axis.imbalance(2, 8, position_ids=np.repeat(documents, 3, 0), inner=2) == 0
    # The work of a microbatch's rows adds up.
    mirrored = np.array([[0, 1, 0, 1, 2, 3, 4, 5], [0, 1, 2, 0, 1, 2, 0, 1]])
    seen = (mirrored + 1).reshape(2, 4, 2).sum(2)
    work = seen[:, :2] + seen[:, :1:-1]
    assert work.tolist() == [[14, 10], [6, 9]]
    imbalance = axis.imbalance(2, 8, position_ids=mirrored, rows=2)
    assert imbalance == pytest.approx(20 / 19.5 - 1)
    assert axis.imbalance(2, 8, position_ids=mirrored, rows=16) == imbalance
    position_ids = np.sort(np.concatenate([axis.position_ids_of(i, 6, 4) for i in range(4)]))
    assert np.array_equal(position_ids, np.arange(24))


def unbalanced_rows(exchange: str, heads: int) -> str:
    """Describe the exchange of 8 devices whose rows have five documents."""
    spec = MeshSpec.parse("cp=8")
    layout = Layout(mesh=spec.build(jax.devices()), context_attention=exchange)
    dims = {"heads": heads, "kv_heads": heads}
    model = dataclasses.replace(model_of("rotary"), dims=dims)
    plan = plan_of(model, layout, packed=True)
    position_ids = np.concatenate([np.arange(length) for length in (5, 11, 3, 21, 24)])[None]
    (line,) = describe_exchange(model, layout, plan, 64, position_ids=position_ids)
    return line


@pytest.mark.parametrize(
    ("exchange", "heads", "named"),
    [
        ("ring", 8, ["all_to_all (0.0 %)", "hybrid (11.7 %)"]),
        ("auto", 12, []),  # uses the hybrid; no other has less
        ("ring", 12, ["hybrid (11.7 %)"]),
    ],
)
def test_imbalance_message_names_exchanges_with_less(exchange, heads, named):
    line = unbalanced_rows(exchange, heads)
    assert ("--mesh.context-attention" in line) == bool(named)
    assert all(name in line for name in named)


def test_gradient_barrier_joins_gradients_and_keeps_their_values():
    """Their values do not change."""

    def loss(x, w, barrier=gradient_barrier):
        x, w = barrier((x, w))
        return jnp.sum(jnp.tanh(x @ w))

    inputs = jnp.ones((2, 3)), jnp.arange(12.0).reshape(3, 4) / 12
    traced = jax.make_jaxpr(jax.grad(loss, (0, 1)))(*inputs)
    (barrier,) = [e for e in traced.eqns if e.primitive.name == "optimization_barrier"]
    assert barrier.outvars == traced.jaxpr.outvars
    plain = jax.grad(partial(loss, barrier=lambda tree: tree), (0, 1))(*inputs)
    for ours, expected in zip(jax.grad(loss, (0, 1))(*inputs), plain, strict=True):
        assert np.array_equal(ours, expected)


def test_balanced_work_gets_no_suggestion():
    assert "--mesh.context-attention" not in unbalanced_rows("all_to_all", 8)
