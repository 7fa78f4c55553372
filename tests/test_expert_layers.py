"""Experts with a capacity, and in some layers only: parity of meshes, dropped tokens, planning."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_experts import check
from tiny import CONFIGS, Case

from jaxdist.config import RunConfig
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.step import TrainConfig
from jaxdist.core.types import Context
from jaxdist.hardware import GPUS, Cluster
from jaxdist.models import DecoderConfig, layers
from jaxdist.models.expert_settings import repeated_block
from jaxdist.models.experts import Experts, bias_increments
from jaxdist.plan.estimate.job import Job
from jaxdist.plan.estimate.memory import estimate_memory
from jaxdist.plan.estimate.model_costs import costs_of
from jaxdist.plan.estimate.time import model_flops_per_token
from jaxdist.plan.estimate.traffic import flows_of

FAST = [
    Case("experts_capacity", "ep=2,cp=2,tp=2"),
    Case("experts_blocks", "pp=2,ep=2,tp=2", remat="full"),
]
CASES = [
    Case("experts_blocks", "1", microbatches=4),
    Case("experts_blocks", "fsdp=2,ep=2,cp=2", microbatches=2, remat="dots"),
    Case("experts_blocks", "dp=2,ep=2,tp=2", zero=3),
    Case("experts_capacity", "1", microbatches=4, remat="full"),
    Case("experts_capacity", "fsdp=2,ep=2,tp=2", microbatches=2, zero=2),
    Case("experts_capacity", "pp=2,ep=2,cp=2"),
    Case("experts_capacity", "dp=2,ep=2,tp=2", sequence=False, remat="dots"),
    Case("experts_capacity", "dp=8"),
]


@pytest.mark.parametrize(
    "case", [*FAST, *(pytest.param(case, marks=pytest.mark.product) for case in CASES)], ids=str
)
def test_every_mesh_equals_one_device(case):
    check(case)


def test_an_expert_drops_the_last_tokens_of_a_row_above_its_capacity():
    """Padding is not counted. Shares are those without drops; evaluation drops nothing."""
    config = dataclasses.replace(CONFIGS["experts_capacity"], num_layers=1)
    init, _, bind = layers.functional(lambda rngs: Experts(config, rngs))
    rng = np.random.default_rng(0)
    x, router = (rng.normal(size=s).astype(np.float32) for s in ((3, 16, 32), (32, 8)))
    weights, real = rng.random((3, 16)).astype(np.float32), np.ones((3, 16), np.float32)
    real[0, :5] = 0
    aux = {"weights": weights, "real": real, "index": np.arange(16)}
    experts = bind(init(jax.random.key(0)) | {"router": jnp.array(router)})
    route = lambda **training: experts.route(
        jnp.array(x), jax.tree.map(jnp.array, aux), Context(**training)
    )
    (every, shares), sums = route()
    assert "dropped" not in sums
    expected, dropped, capacity = np.array(every), 0.0, 5  # 0.8 · 16 tokens · 3 choices / 8 experts
    for row in range(3):
        accepted = np.zeros(8, int)
        for token in range(16):
            for choice, expert in enumerate(every[row, token]):
                if real[row, token] and accepted[expert] < capacity:
                    accepted[expert] += 1
                else:
                    expected[row, token, choice] = 8
                    dropped += weights[row, token] / 3
    routing, sums = route(dropout_key=jax.random.key(0))
    np.testing.assert_array_equal(routing.experts, expected)
    np.testing.assert_array_equal(routing.shares, np.where(expected < 8, shares, 0))
    assert (expected[real > 0] == 8).sum() > 5
    assert float(sums["dropped"]) == pytest.approx(dropped, rel=1e-5)
    assert float(sums["layer/dropped"][0]) == pytest.approx(dropped, rel=1e-5)


@pytest.mark.parametrize(
    ("layers", "first", "block"),
    [
        ("EEEE", 0, "E"),
        ("DEEE", 1, "E"),
        ("DEDE", 0, "DE"),
        ("DDDEDE", 2, "DE"),
        ("EEDEED", 0, "EED"),
        ("DEED", 1, "EED"),
        ("DDEED", 2, "EED"),
    ],
)
def test_the_stack_repeats_the_shortest_block(layers, first, block):
    assert repeated_block([x == "E" for x in layers]) == (first, tuple(x == "E" for x in block))


def test_each_layer_of_a_block_has_its_own_bias():
    config = dataclasses.replace(
        CONFIGS["experts_bias"], num_layers=6, dense_layers=[0, 3], dense_mlp_dim=48
    )
    counts = np.random.default_rng(0).integers(0, 9, (4, 8)).astype(np.float32)
    sign = np.sign(counts.mean(-1, keepdims=True) - counts)
    increments = bias_increments(config, {"layer/expert_tokens": jnp.array(counts)})["layers"]
    assert sorted(increments) == ["1", "2"]
    for name, rows in (("1", [0, 2]), ("2", [1, 3])):
        bias = increments[name]["mlp"]["selection_bias"]
        np.testing.assert_allclose(bias, 0.01 * sign[rows], rtol=1e-6)


def test_plan_adds_up_the_layers_of_a_block():
    """Every second of eight layers has 8 experts, 2 of which do the work of the other MLPs."""
    dense = DecoderConfig(d_model=512, num_layers=8, mlp_dim=2048)
    every = dataclasses.replace(dense, num_experts=8, mlp_dim=1024)
    mixed = dataclasses.replace(every, dense_layers=[0, 2, 4, 6], dense_mlp_dim=2048)
    one, all_sparse, job = (
        Job.of(
            RunConfig(
                model=model, train=TrainConfig(global_batch_size=16, seq_len=512, remat=remat)
            ),
            MeshSpec.parse(mesh),
            Cluster(gpu=GPUS["h100"], num_nodes=1, gpus_per_node=8),
        )
        for model, mesh, remat in (
            (dense, "fsdp=8", "dots"),
            (every, "fsdp=4,ep=2", "dots"),
            (mixed, "fsdp=4,ep=2", "dots"),
        )
    )
    assert job.decoder is not None and job.model.num_layers == 4
    assert model_flops_per_token(job) == model_flops_per_token(one) + 6 * 4 * 512 * 8
    both = costs_of(one), costs_of(job)
    own, block = (costs.forward() for costs in both)
    unused = both[1].expert_work()[0].products  # rows that fill up the kernels' tiles
    assert block.products - unused == pytest.approx(2 * own.products, rel=1e-12)
    assert block.attention == 2 * own.attention and 0 < unused < own.products
    kept, kept_of_block = (costs.kept_per_layer() for costs in both)
    assert 1.5 * kept < kept_of_block < 2 * kept  # one input for two layers
    flows = [
        [f for f in flows_of(j) if f.purpose == "tokens for experts"] for j in (all_sparse, job)
    ]
    (full,), (half,) = flows
    assert 2 * half.wire_bytes == full.wire_bytes > 0
    sizes = [estimate_memory(j).total_bytes for j in (one, job, all_sparse)]
    assert sizes == sorted(sizes)
