"""Mixture of experts: every mesh equals one device; router, exchange and grouped products."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import records, run_here, tiny
from decoders import VARIANTS, logits_of, random_tokens
from hf_models import reference_of
from jax.sharding import PartitionSpec as P
from refusals import refused
from test_estimate_traffic import moved
from test_traffic import lowered, traffic
from tiny import (
    CONFIGS,
    LEARNING_RATE,
    Case,
    distance,
    every_expert,
    initial_state,
    layout_of,
    model_of,
    plan_of,
    reference,
    run,
    step_of,
    text_batch,
)

from jaxdist.config import RunConfig, read_run
from jaxdist.core import collectives
from jaxdist.core.collective_order import in_order
from jaxdist.core.matmul import grouped
from jaxdist.core.matmul.grouped import make_grouped_dot
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.parallel.context import place_batch
from jaxdist.core.parallel.expert import make_experts
from jaxdist.core.parallel.pipeline.config import PipelineConfig
from jaxdist.core.precision import PrecisionConfig
from jaxdist.core.routing import record_routing
from jaxdist.core.sharding import Layout, MeshConfig
from jaxdist.core.step import TrainConfig
from jaxdist.core.types import Context, Routing
from jaxdist.hardware import GPUS, Cluster
from jaxdist.models import DecoderConfig, build, layers
from jaxdist.models.experts import Experts
from jaxdist.models.weights import num_params
from jaxdist.optim import OptimConfig, make_optimizer
from jaxdist.plan.estimate.job import Job
from jaxdist.plan.estimate.time import model_flops_per_token
from jaxdist.plan.estimate.traffic import flows_of
from jaxdist.run.audit import audit_parts
from jaxdist.run.command_settings import TextSettings
from jaxdist.run.setup import assemble
from jaxdist.run.text_generation import Decoder

PART = 1e-6  # of the norm of a part's gradients: order of float32 sums
LOSSES = 2e-6  # relative, over 20 steps: routers have no ties
PARTS = {"router", "up", "down", "shared_gate", "qkv", "table", "kernel"}


def parts_of(tree) -> dict[str, list]:
    parts: dict[str, list] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/").rpartition("/")[2]
        parts.setdefault(name, []).append(leaf)
    return parts


def relative_distance(ours, others) -> float:
    norm = lambda parts: np.sqrt(sum(np.sum(np.square(x, dtype=np.float64)) for x in parts))
    return norm([a - b for a, b in zip(ours, others, strict=True)]) / norm(others)


def check(case: Case, **options) -> None:
    actual, expected = run(case, **options), reference(case.model)
    ours, others = parts_of(actual.grads), parts_of(expected.grads)
    assert PARTS <= ours.keys() == others.keys()
    far = {name: relative_distance(ours[name], others[name]) for name in others}
    assert {name: d for name, d in far.items() if d > PART} == {}
    assert actual.losses[0] == pytest.approx(expected.losses[0], rel=PART)
    assert actual.norm == pytest.approx(expected.norm, rel=PART)
    np.testing.assert_allclose(actual.losses, expected.losses, rtol=LOSSES)


CASES = [
    Case("experts", "ep=8"),
    Case("experts", "fsdp=2,ep=2,tp=2", microbatches=2),
    Case("experts_batch", "fsdp=2,ep=2,cp=2", microbatches=2, remat="dots"),
    Case("experts_batch", "pp=2,ep=2,tp=2"),
    Case("experts_sinks", "ep=2,cp=2,tp=2", microbatches=2),
    Case("experts_sinks", "fsdp=4,ep=2", zero=1, remat="full"),
    Case("experts_sinks", "dp=2,ep=2,tp=2", sequence=False),
    Case("experts_sinks", "pp=2,ep=2,cp=2"),
    Case("experts", "1"),
    Case("experts_mixed", "fsdp=2,ep=2,tp=2", microbatches=2, remat="full"),
    Case("experts", "fsdp=4,ep=2"),
    Case("experts", "ep=2,cp=2,tp=2"),
    Case("experts", "pp=2,ep=2,fsdp=2"),
    Case("experts_batch", "1", microbatches=4, remat="full"),
    Case("experts_batch", "dp=2,ep=2,tp=2"),
    Case("experts_mixed", "pp=2,ep=2,cp=2"),
    Case("experts", "dp=2,ep=4", zero=1, remat="full"),
    Case("experts", "dp=2,fsdp=2,ep=2", zero=3, remat="dots"),
    Case("experts", "ep=4,tp=2", sequence=False),
    Case("experts", "dp=2,ep=2,cp=2", zero=2, microbatches=2),
    Case("experts", "fsdp=8"),
    Case("experts", "tp=4"),
    Case("experts", "pp=2,ep=4", pipeline=PipelineConfig()),
    Case("experts", "pp=2,ep=2,tp=2"),
    Case("experts", "pp=2,ep=2,cp=2"),
    Case("experts_batch", "dp=8"),
    Case("experts_batch", "ep=4,tp=2", sequence=False, microbatches=2),
    Case("experts_batch", "dp=2,pp=2,cp=2"),
    Case("experts_batch", "fsdp=2,ep=2,tp=2", zero=3, microbatches=2),
]


@pytest.mark.parametrize(
    "case",
    [
        *CASES[2:5],
        *(pytest.param(case, marks=pytest.mark.product) for case in CASES[:2] + CASES[5:]),
    ],
    ids=str,
)
def test_every_mesh_equals_one_device(case):
    check(case)


TOKENS, PER_TOKEN, EXPERTS, WIDTH, HIDDEN = 24, 3, 8, 6, 4
ROUTERS = {
    "random": lambda rng: np.argsort(rng.random((8, TOKENS, EXPERTS)), -1)[..., :PER_TOKEN],
    "one device gets all": lambda rng: np.tile([1, 0, 1], (8, TOKENS, 1)),
    "one expert gets all": lambda rng: np.full((8, TOKENS, PER_TOKEN), 5),
    "skewed": lambda rng: np.minimum(rng.geometric(0.4, (8, TOKENS, PER_TOKEN)) - 1, EXPERTS - 1),
    "a third is dropped": lambda rng: rng.choice([*range(EXPERTS)] + [EXPERTS] * 4, (8, TOKENS, 3)),
    "all are dropped": lambda rng: np.full((8, TOKENS, PER_TOKEN), EXPERTS),
}
"""Name -> experts of 8 rows of tokens. An expert may appear twice, unlike in a real router."""


def most_rounds(chosen, spec: MeshSpec) -> int:
    """Return the largest number of exchanges after the first, from loads of pairs of devices."""
    parts = np.asarray(chosen).reshape(spec.num_replicas, -1)
    size = spec["expert"]
    capacity = max(1, int(np.ceil(1.25 * parts.shape[1] / size)))
    loads = [np.bincount(p[p < EXPERTS] // (EXPERTS // size), minlength=1).max() for p in parts]
    return max(0, int(-(-max(loads) // capacity)) - 1)


@pytest.mark.parametrize("mesh", ["ep=8", "fsdp=2,ep=4", "dp=2,ep=2,tp=2"])
def test_no_router_loses_a_token_or_its_gradient(mesh):
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.array(rng.normal(size=shape), jnp.float32)
    inputs = (
        draw(8, TOKENS, WIDTH),
        draw(8, TOKENS, PER_TOKEN),
        draw(EXPERTS, WIDTH, 2, HIDDEN),
        draw(EXPERTS, HIDDEN, WIDTH),
    )
    cotangent = draw(8, TOKENS, WIDTH)
    activate = lambda up: jax.nn.silu(up[:, 0]) * up[:, 1]
    spec = MeshSpec.parse(mesh)
    rows = tuple(axis.name for axis in spec.used if axis.splits_rows)
    split = "tensor" if spec["tensor"] > 1 else None

    def run(experts, x, shares, up, down, chosen, cotangent):
        y, rounds = experts(x, Routing(chosen, shares), up, down, activate)
        return jnp.sum(y * cotangent), (y, 0 if rounds is None else rounds)

    exchange = make_experts(make_grouped_dot("cpu"))

    def total(x, shares, up, down, chosen, cotangent):
        x, shares, chosen = collectives.vary((x, shares, chosen), split or ())
        up, down = collectives.vary((up, down), tuple(axis for axis in rows if axis != "expert"))
        total, (y, rounds) = run(exchange, x, shares, up, down, chosen, cotangent)
        total = collectives.all_reduce(total, (*rows, split) if split else rows)
        y = collectives.all_reduce(y, split) if split else y
        others = tuple(axis for axis in rows if axis != "expert")
        return total, (y, collectives.all_reduce(rounds, others, "max") if others else rounds)

    experts = (P("expert", None, None, split), P("expert", split))
    gradients = partial(jax.value_and_grad, argnums=(0, 1, 2, 3), has_aux=True)
    sharded = jax.shard_map(
        # The further rounds are a loop, which would overtake the first on some devices.
        in_order(gradients(total)),
        mesh=spec.build(jax.devices()[: spec.num_devices]),
        in_specs=(P(rows), P(rows), *experts, P(rows), P(rows)),
        out_specs=((P(), (P(rows), P())), (P(rows), P(rows), *experts)),
    )
    both = [jax.jit(sharded), jax.jit(gradients(partial(run, every_expert)))]
    for router, choose in ROUTERS.items():
        chosen = jnp.array(choose(rng), jnp.int32)
        results = [function(*inputs, chosen, cotangent) for function in both]
        assert int(results[0][0][1][1]) == most_rounds(chosen, spec), router
        results = [(y, *grads) for (_, (y, _)), grads in results]
        for ours, expected in zip(*results, strict=True):
            atol = 2e-6 * np.abs(expected).max()
            assert atol or router == "all are dropped"
            np.testing.assert_allclose(ours, expected, atol=atol, err_msg=router)


def test_ties_go_to_the_lowest_expert_and_losses_equal_their_definition():
    """The last row has no trained tokens, so its balance and logits have no effect."""
    config = dataclasses.replace(CONFIGS["experts"], num_layers=1)
    init, _, bind = layers.functional(lambda rngs: Experts(config, rngs))
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 16, 32)).astype(np.float32)
    router = rng.normal(size=(32, 8)).astype(np.float32)
    router[:, 5] = router[:, 2]
    weights = rng.random((3, 16)).astype(np.float32)
    weights[2] = 0
    real = np.ones((3, 16), np.float32)
    real[0, 12:] = 0
    aux = {"weights": jnp.array(weights), "real": jnp.array(real)}
    params = init(jax.random.key(0))
    route = lambda router: bind({**params, "router": router}).route(jnp.array(x), aux, Context())
    routing, sums = route(jnp.array(router))
    logits = x.astype(np.float64) @ router
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    order = np.argsort(-p.astype(np.float32), -1, kind="stable")[..., :3]
    np.testing.assert_array_equal(routing.experts, order)
    assert any(2 in row and 5 not in row for row in order.reshape(-1, 3))
    shares = np.take_along_axis(p, order, -1)
    np.testing.assert_allclose(routing.shares, shares / shares.sum(-1, keepdims=True), rtol=1e-5)
    balance, z, loads = 0.0, 0.0, []
    for row in range(3):
        kept = real[row] > 0
        load = np.bincount(order[row][kept].ravel(), minlength=8) / (3 * kept.sum())
        loads.append(load.astype(np.float32))
        balance += weights[row].sum() * 8 * (load * p[row][kept].mean(0)).sum()
        z += (weights[row] * np.log(np.exp(logits[row]).sum(-1)) ** 2).sum()
    assert float(sums["balance"]) == pytest.approx(balance, rel=1e-5)
    ranked = -np.sort(-p, -1)
    near = (ranked[..., 2] - ranked[..., 3] < 1e-5) * weights
    assert float(sums["near_ties"]) == pytest.approx(near.sum(), rel=1e-5) and near.sum() > 1

    def losses(router):
        """Return the balance loss with constant loads, and the z-loss, of the first two rows."""
        logits = jnp.array(x) @ router
        mean = [jax.nn.softmax(logits[r])[real[r] > 0].mean(0) for r in range(2)]
        balance = sum(weights[r].sum() * 8 * jnp.sum(loads[r] * mean[r]) for r in range(2))
        return 0.1 * balance + 0.01 * jnp.sum(weights * jax.nn.logsumexp(logits, -1) ** 2)

    actual = lambda router: route(router)[1]["aux_loss"]
    ours, expected = (jax.grad(f)(jnp.array(router)) for f in (actual, losses))
    np.testing.assert_allclose(ours, expected, atol=1e-5 * np.abs(expected).max())
    assert float(sums["aux_loss"]) == pytest.approx(0.1 * balance + 0.01 * z, rel=1e-5)


def test_router_of_deepseek_equals_its_definition():
    """The bias and the groups change the choice; shares are scores without the bias."""
    config = dataclasses.replace(CONFIGS["experts_bias"], num_layers=1)
    init, _, bind = layers.functional(lambda rngs: Experts(config, rngs))
    rng = np.random.default_rng(0)
    x, router = (rng.normal(size=s).astype(np.float32) for s in ((2, 16, 32), (32, 8)))
    bias = rng.normal(size=8).astype(np.float32) - 1  # a masked score of 0 would be chosen
    params = init(jax.random.key(0)) | {"router": jnp.array(router), "selection_bias": bias}
    routing, sums = bind(params).route(jnp.array(x), {}, Context())
    assert sums == {}
    scores = 1 / (1 + np.exp(-(x.astype(np.float64) @ router)))
    moved = 0
    rows = (part.reshape(-1, 3) for part in routing)
    for one, chosen, shares in zip(scores.reshape(-1, 8), *rows, strict=True):
        biased = one + bias
        best = sorted(range(4), key=lambda g: -biased[2 * g : 2 * g + 2].sum())[:2]
        allowed = [e for e in range(8) if e // 2 in best]
        expected = sorted(allowed, key=lambda e: -biased[e])[:3]
        moved += expected != np.argsort(-one)[:3].tolist()
        assert chosen.tolist() == expected
        np.testing.assert_allclose(shares, 2.5 * one[expected] / one[expected].sum(), rtol=1e-5)
    assert moved > 10


def counts_of(name: str, params, batch) -> np.ndarray:
    chosen = np.asarray(record_routing(model_of(name), params, batch))
    return counted(chosen[batch["segments"] > 0])


def counted(chosen) -> np.ndarray:
    """Return the number of choices of each expert, [layers, experts]."""
    layers = np.moveaxis(chosen, -2, 0)
    return np.stack([np.bincount(layer.ravel(), minlength=8) for layer in layers])


@pytest.mark.parametrize(
    ("mesh", "name"),
    [
        ("fsdp=2,ep=2,tp=2", "experts_sinks"),
        pytest.param("pp=2,ep=2,cp=2", "experts_blocks", marks=pytest.mark.product),
    ],
)
def test_recorded_choices_are_replayed_on_any_mesh(mesh, name):
    """The router of the replay has other weights, so without the record it would choose others."""
    batch, state = text_batch(), initial_state(name)
    batch["routing"] = np.array(record_routing(model_of(name), state.params, batch))
    noise = np.random.default_rng(0)
    draw = lambda x: noise.normal(size=x.shape).astype(np.float32)
    change = lambda path, x: x + draw(x) if "router" in str(path[-1]) else x
    params = jax.tree_util.tree_map_with_path(change, state.params)
    again = np.array(record_routing(model_of(name), params, batch))
    np.testing.assert_array_equal(again, batch["routing"])
    free = {n: x for n, x in batch.items() if n != "routing"}
    assert np.mean(record_routing(model_of(name), params, free) != again) > 0.3
    results = []
    for case in (Case(name, "1"), Case(name, mesh, microbatches=2)):
        step, state = step_of(case)
        state = dataclasses.replace(
            state,
            params=jax.tree.map(
                lambda x, old: jax.device_put(x, old.sharding), params, state.params
            ),
        )
        _, metrics = step.train(state, place_batch(batch, step.batch_sharding), np.inf)
        counts = metrics["layer_sums"]["expert_tokens"]
        np.testing.assert_array_equal(counts, counted(again))
        results.append(float(metrics["loss"]))
        assert ("further_rounds" in metrics) == (case.mesh != "1")
    assert results[1] == pytest.approx(results[0], rel=PART)
    wrong = {**batch, "routing": batch["routing"][..., :1]}
    with refused("[16, 16, ", "experts per token", "record_routing"):
        record_routing(model_of(name), params, wrong)


@pytest.mark.parametrize(
    "case",
    [
        Case("experts_bias", "fsdp=2,ep=2,tp=2", microbatches=2, zero=2, remat="full"),
        pytest.param(
            Case("experts_bias", "pp=2,ep=2,cp=2", pipeline=PipelineConfig(num_virtual_stages=1)),
            marks=pytest.mark.product,
        ),
    ],
    ids=str,
)
def test_bias_follows_the_loads_of_the_global_batch(case):
    """Each of two steps moves it once, by the loads of that step; Adam does not move it."""
    step, state = step_of(case, ema_decay=0.5)
    batch = text_batch()
    for name in ("segments", "weights"):  # padding, which has no load
        batch[name][:, -3:] = 0
    placed = place_batch(batch, step.batch_sharding)
    for _ in range(2):
        params = jax.device_get(state.params)
        counts = counts_of("experts_bias", params, batch)
        before = params["layers"]["mlp"]["selection_bias"]
        state, metrics = step.train(state, placed, np.inf)
        of_layers = jax.device_get(metrics["layer_sums"])
        np.testing.assert_array_equal(of_layers["expert_tokens"], counts)
        for name in ("balance", "router_entropy", "near_ties"):
            mean = of_layers[name].mean() / batch["weights"].sum()
            assert mean == pytest.approx(float(metrics[name]), rel=1e-5, abs=1e-12)
        after = jax.device_get(state.params)["layers"]["mlp"]["selection_bias"]
        sign = np.sign(counts.mean(-1, keepdims=True) - counts)
        np.testing.assert_array_equal(after, before + np.float32(0.01) * sign.astype(np.float32))
    state, _ = step.train(state, placed, 0.0)  # the loss exceeds this limit: a skipped step
    skipped = jax.device_get(state.params)["layers"]["mlp"]["selection_bias"]
    np.testing.assert_array_equal(skipped, after)


@pytest.mark.parametrize(
    "optimizer", ["muon", pytest.param("adafactor", marks=pytest.mark.product)]
)
def test_sharded_optimizers_update_experts_as_one_device_does(optimizer):
    """Each expert's matrix is orthogonalized, or factored, by itself."""
    rule = lambda case: make_optimizer(
        OptimConfig(optimizer=optimizer, weight_decay=0.0),
        model_of("experts").axes,
        layout_of(case).shardings(layout_of(case).moment_specs(model_of("experts").axes)),
    )
    updated = []
    for case in (Case("experts", "1"), Case("experts", "fsdp=2,ep=2,tp=2")):
        step, state = step_of(case, rule=rule(case))
        for _ in range(2):
            state, _ = step.train(state, place_batch(text_batch(), step.batch_sharding), np.inf)
        updated.append(jax.device_get(state.params))
    # Muon and Adafactor divide by norms: rounding of small gradients grows to this share of a step.
    assert distance(*updated) <= 1e-3 * LEARNING_RATE


@pytest.mark.parametrize(
    ("mesh", "model"),
    [
        ("ep=8", "experts_mixed"),
        pytest.param("fsdp=2,ep=2,tp=2", "experts_batch", marks=pytest.mark.product),
        ("pp=2,ep=2,cp=2", "experts_blocks"),
    ],
)
def test_audit_of_a_sparse_model_is_clean(mesh, model):
    config = RunConfig(
        model=CONFIGS[model],
        mesh=MeshConfig(shape=mesh),
        train=TrainConfig(global_batch_size=16, seq_len=16, num_microbatches=2),
        precision=PrecisionConfig(compute_dtype="float32"),
    )
    audit = audit_parts(assemble(config, jax.devices()))
    assert audit.is_clean and "expert" in {axis for t in audit.transfers for axis in t.axes}


@pytest.mark.parametrize("name", ["experts_mixed", "experts_blocks"])
def test_generation_of_sharded_experts_equals_one_device(name):
    model = model_of(name)
    params = initial_state(name).params
    prompts = [np.arange(1, 8), np.array([3]), np.arange(20, 32)]
    texts = []
    for mesh in ("1", "fsdp=2,ep=2,tp=2"):
        layout = layout_of(Case(name, mesh))
        placed = jax.device_put(params, layout.shardings(layout.param_specs(model.axes)))
        decoder = Decoder(
            model, placed, layout, plan_of(model, layout), TextSettings(temperature=0.0)
        )
        texts.append(list(decoder.tokens(prompts, max_new_tokens=6)))
    assert texts[0] == texts[1]
    # The path of training, without a cache, continues the longest prompt in the same way.
    tokens = np.concatenate([prompts[2], [column[2] for column in texts[0]]])[None, :-1]
    logits = logits_of(model, params, {"tokens": tokens.astype(np.int32)})
    assert [column[2] for column in texts[0]] == logits[0, 11:].argmax(-1).tolist()


def test_greedy_text_with_sinks_and_windows_equals_transformers(tmp_path):
    torch = pytest.importorskip("torch", reason="needs the reference extra (torch)")
    from test_convert_hf import tree_of

    reference = reference_of(VARIANTS["gpt_oss"])
    reference.save_pretrained(tmp_path)
    model, spec = build(VARIANTS["gpt_oss"], seq_len=16), MeshSpec.parse("fsdp=2,ep=2,tp=2")
    layout = Layout(mesh=spec.build(jax.devices()), rules=model.rules)
    placed = jax.device_put(tree_of(tmp_path), layout.shardings(layout.param_specs(model.axes)))
    prompts = [random_tokens(1, n, seed=n)[0] for n in (9, 12)]  # longer than the window of 5
    decoder = Decoder(model, placed, layout, plan_of(model, layout), TextSettings(temperature=0.0))
    texts = list(zip(*decoder.tokens(prompts, max_new_tokens=6), strict=True))
    for prompt, text in zip(prompts, texts, strict=True):
        tokens = torch.from_numpy(prompt[None]).long()
        expected = reference.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=6, do_sample=False
        )
        assert list(text) == expected[0, len(prompt) :].tolist()
    assert len(set(texts[0] + texts[1])) > 4


@pytest.mark.slow
def test_a_saved_run_resumes_on_meshes_with_and_without_experts(tmp_path):
    flags = [
        "--model.num-experts=8", "--model.mlp-dim=32", "--checkpoint.save_interval_steps=2",
        "--eval.interval_steps=0", "--optim.schedule=constant", f"--run-dir={tmp_path}",
    ]  # fmt: skip
    for steps, mesh in ((2, "fsdp=2,ep=2,tp=2"), (4, "dp=8")):
        assert run_here("train", *tiny(*flags, f"--mesh={mesh}", f"--steps={steps}")) == 0
    alone = tmp_path.with_name("one")
    flags[-1] = f"--run-dir={alone}"
    assert run_here("train", *tiny(*flags, "--mesh=fsdp=8", "--steps=4")) == 0
    expected = [r["loss"] for r in records(alone, "train")]
    assert [r["loss"] for r in records(tmp_path, "train")] == pytest.approx(expected, rel=2e-5)
    assert {"balance", "largest_load", "router_entropy"} <= records(alone, "train")[0].keys()


@pytest.mark.parametrize(
    ("flags", "facts"),
    [
        (["--mesh=ep=8"], ["ep=8", "fsdp=8", "model.num_experts"]),
        (
            ["--model.num-experts=6", "--mesh=ep=4,tp=2"],
            ["ep=4", "model.num_experts=6", "1, 2, 3 or 6"],
        ),
        (["--model.num-experts=2", "--model.experts-per-token=3"], ["=3", "num_experts=2"]),
        (["--model.bias=router"], ["'router'", "model.num_experts"]),
        (["--model.attention-sinks=true", "--model.attention=cudnn"], ["cudnn", "sinks"]),
        (["--model.num-experts=8", "--model.dense-layers=0"], ["dense_mlp_dim=0", "both"]),
        (
            ["--model.num-experts=8", "--model.dense-layers=2,8,2", "--model.dense-mlp-dim=64"],
            ["dense_layers has 2, 8, 2", "0 to 7"],
        ),
        (["--model.first-dense-layers=1"], ["first_dense_layers", "model.dense_layers"]),
        (["--model.num-experts=8", "--model.router.groups=3"], ["groups=3", "num_experts=8"]),
        (
            ["--model.num-experts=8", "--model.router.groups=4", "--model.experts-per-token=3"],
            ["groups_per_token=1", "experts_per_token=3", "Use 2"],
        ),
        (["--model.num-experts=8", "--model.router.scores=relu"], ["'relu'", "softmax"]),
        (["--model.num-experts=8", "--model.router.top=1"], ["router.top=1", "balance_loss"]),
        (["--model.num-experts=8", "--model.router.capacity_factor=-1"], ["capacity_factor=-1"]),
        (["--model.num-experts=8", "--model.balance-loss=0.1"], ["model.router.balance_loss"]),
        (
            ["--model.num-experts=4", "--lora.rank=4", "--lora.variant=dora"],
            ["lora.variant", "gate_up_proj", "attention"],
        ),
        (["--model.num-experts=4", "--precision.matmul-dtype=fp8"], ["matmul_dtype=fp8", "auto"]),
    ],
)
def test_conflicts_with_experts_are_rejected(flags, facts):
    with refused(*facts):
        read_run(["--simulate=8", *flags], command="test")


def test_plan_counts_active_work_and_all_memory():
    """Llama's shapes with 8 experts of half the width: 2 of 8 do the work of one MLP."""
    dense = DecoderConfig(d_model=512, num_layers=4, mlp_dim=2048)
    sparse = dataclasses.replace(dense, num_experts=8, mlp_dim=1024)
    jobs = [
        Job.of(
            RunConfig(model=model, train=TrainConfig(global_batch_size=16, seq_len=512)),
            MeshSpec.parse(mesh),
            Cluster(gpu=GPUS["h100"], num_nodes=1, gpus_per_node=8),
        )
        for model, mesh in ((dense, "fsdp=8"), (sparse, "fsdp=8"), (sparse, "fsdp=4,ep=2"))
    ]
    one, *others = (model_flops_per_token(job) for job in jobs)
    router = 6 * 4 * 512 * 8
    assert others == [one + router] * 2
    assert num_params(jobs[1].model, 0.25) == num_params(jobs[0].model) + 4 * 512 * 8
    stored = [job.total(job.weights, "param") for job in jobs]
    added = 4 * (3 * 512 * (8 * 1024 - 2048) + 512 * 8)
    assert [s - stored[0] for s in stored[1:]] == [added / 8] * 2
    (flow,) = [f for f in flows_of(jobs[2]) if f.purpose == "tokens for experts"]
    assert flow.axes == ("expert",) and flow.kind == "all-to-all"


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize(
    "sizes", [(5, 0, 130, 7), (0, 0, 0, 0), (0, 200, 0, 0), (64, 64, 64, 8), (1, 1, 1, 1)]
)
def test_grouped_product_equals_one_product_per_group(platform, sizes, monkeypatch):
    """Rows after the last group give 0 and get no gradient."""
    monkeypatch.setattr(grouped, "COPIED", 300)  # of at least 864: three batches or more
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(200, 12)), rng.normal(size=(4, 12, 6))
    groups = np.repeat(np.arange(5), (*sizes, 200 - sum(sizes)))
    dot = make_grouped_dot(platform)
    out = rng.normal(size=(200, 6))

    def loss(x, w):
        y = dot(x, w, jnp.array(sizes, jnp.int32))
        return jnp.sum(y * jnp.array(out, jnp.float32)), y

    (_, y), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(
        jnp.array(x, jnp.float32), jnp.array(w, jnp.float32)
    )
    padded = np.concatenate([w, np.zeros((1, 12, 6))])
    expected = np.einsum("rd,rdf->rf", x, padded[groups])
    dx = np.einsum("rf,rdf->rd", out, padded[groups])
    dw = np.stack([x[groups == g].T @ out[groups == g] for g in range(4)])
    for actual, correct in [(y, expected), (grads[0], dx), (grads[1], dw)]:
        np.testing.assert_allclose(actual, correct, atol=1e-6 * (1 + np.abs(correct).max()))


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("experts", "ep=4"), marks=pytest.mark.product),
        pytest.param(Case("experts_blocks", "ep=4"), marks=pytest.mark.product),
        Case("experts_batch", "fsdp=2,ep=2", microbatches=2),
    ],
    ids=str,
)
def test_compiled_exchanges_move_the_planned_bytes(case):
    """Two exchanges per layer with experts and pass; counts of 32 bytes are not read.

    A loss of the batch needs a third pass over each of two microbatches.
    """
    read = traffic(lowered(case).compile().as_text(), layout_of(case).mesh.shape)
    count, compiled = read["all-to-all", "expert"]
    planned = moved(case)["all-to-all", "expert"]
    sparse = 4 if case.model == "experts_blocks" else 2
    assert count == 2 * sparse * (2 if case.microbatches == 1 else 2 * 3)
    assert compiled == pytest.approx(planned, rel=0.02)  # rows are rounded up
