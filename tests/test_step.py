"""Tests of the step: skipping, clipping, loss scale, recomputation, donation, compilation."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from refusals import refused
from test_parity import check
from tiny import (
    LEARNING_RATE,
    Case,
    distance,
    initial_state,
    largest,
    layout_of,
    make_update,
    model_of,
    place_state,
    reference,
    run,
    step_of,
    text_batch,
)

from jaxdist.config import RunConfig
from jaxdist.core import step_plan
from jaxdist.core.parallel.context import place_batch
from jaxdist.core.parallel.pipeline.virtual_stages import LayerSplit
from jaxdist.core.precision import PrecisionConfig
from jaxdist.core.sharding import Layout
from jaxdist.core.state import init_state
from jaxdist.core.step import Optimizer, TrainConfig, make_step, remat_policy
from jaxdist.core.types import Dims, Model
from jaxdist.objectives import regularized
from jaxdist.optim import OptimConfig, make_optimizer
from jaxdist.run.setup import assemble
from jaxdist.settings import ConfigError, problems_of

SPREAD = Case("rotary", "dp=2,fsdp=2", zero=1)
ALL = Case("rotary", "dp=2,fsdp=2,tp=2")


def put_batch(step, batch):
    return jax.device_put(batch, step.batch_sharding)


@pytest.fixture(scope="module")
def spread():
    """Return a step on data × fsdp with ZeRO-1, compiled once for the tests that share it."""
    return step_of(SPREAD)[0]


@pytest.mark.smoke
def test_a_run_compiles_once_and_donates_its_old_state():
    case = Case("learned", "dp=2")
    step, _ = step_of(case)
    state = init_state(
        model_of("learned"), tiny.optimizer(), layout_of(case), seed=0, loss_scale={}
    )
    batch = put_batch(step, text_batch())
    state, _ = step.train(state, batch, np.inf)
    compiled = []
    listen = lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    jax.monitoring.register_event_duration_secs_listener(listen)
    for _ in range(3):
        old, (state, _) = state, step.train(state, batch, np.inf)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves((old.params, old.opt_state)))
    assert compiled == []
    assert int(state.step) == 4
    jax.jit(lambda x: x + 41)(batch["tokens"])
    assert compiled, "the listener hears compilations"


@pytest.mark.parametrize(
    ("optimizer", "ema_decay"),
    [
        ("adamw", 0.9),
        ("muon", 0.0),
        pytest.param("adafactor", 0.0, marks=pytest.mark.product),
    ],
)
def test_one_cpu_device_updates_its_state_without_a_copy(optimizer, ema_decay):
    """XLA copies a donated leaf that another leaf's update may still read."""
    config = RunConfig(
        model=tiny.CONFIGS["rotary"],
        optim=OptimConfig(optimizer=optimizer, ema_decay=ema_decay),
        train=TrainConfig(global_batch_size=4, seq_len=16),
    )
    parts = assemble(config, jax.devices()[:1])
    limit = jax.ShapeDtypeStruct((), jnp.float32)
    lowered = parts.step.train.lower(parts.abstract_state(), parts.abstract_batch(), limit)
    text = lowered.compile().as_text()
    assert "%state_params" in text
    assert re.findall(r"= f32\[\d[^ ]* copy\(%state\w*", text) == []


@pytest.mark.smoke
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_poisoned_batch_changes_nothing_but_the_step(poison, spread):
    """One row on one replica; all devices must decide equally, since every shard is compared."""
    step, state = spread, place_state(SPREAD)
    good = put_batch(step, text_batch())
    bad = text_batch()
    bad["weights"][5, 3] = poison
    state, metrics = step.train(state, good, np.inf)
    assert bool(metrics["applied"])
    before = jax.device_get((state.params, state.opt_state))
    state, metrics = step.train(state, put_batch(step, bad), np.inf)
    assert not bool(metrics["applied"])
    for shard in metrics["applied"].addressable_shards:
        assert not bool(shard.data)
    jax.tree.map(
        np.testing.assert_array_equal, jax.device_get((state.params, state.opt_state)), before
    )
    replicas = state.params["layers"]["mlp_norm"]["scale"].addressable_shards
    for shard in replicas:
        np.testing.assert_array_equal(shard.data, replicas[0].data)
    assert int(state.step) == 2
    state, metrics = step.train(state, good, np.inf)
    assert bool(metrics["applied"])
    assert np.isfinite(float(metrics["loss"]))


@pytest.mark.smoke
def test_metrics_are_means_over_the_global_batch(spread):
    step, state = spread, place_state(SPREAD)
    batch = text_batch()
    _, metrics = step.train(state, put_batch(step, batch), np.inf)
    assert float(metrics["weight"]) == pytest.approx(batch["weights"].sum(), rel=1e-6)
    assert 0 <= float(metrics["accuracy"]) <= 1
    assert float(metrics["learning_rate"]) == pytest.approx(LEARNING_RATE)


@pytest.mark.smoke
def test_evaluation_sums_over_every_replica(spread):
    step, state = spread, place_state(SPREAD)
    sums = step.evaluate(state.params, put_batch(step, text_batch()))
    mean = float(sums["loss"]) / float(sums["weight"])
    assert mean == pytest.approx(reference("rotary").losses[0], rel=1e-6)


def test_a_batch_without_weight_has_no_gradient():
    step, state = step_of(Case("learned", "dp=2"))
    batch = text_batch()
    batch["weights"][:] = 0
    _, metrics = step.train(state, put_batch(step, batch), np.inf)
    assert float(metrics["loss"]) == float(metrics["grad_norm"]) == 0
    assert not metrics["applied"]
    # A weight below 1 is a weight, not 1.
    batch["weights"][0, 0] = 0.125
    _, metrics = step.train(place_state(Case("learned", "dp=2")), put_batch(step, batch), np.inf)
    assert 1 < float(metrics["loss"]) < 10


@pytest.mark.parametrize("share", [0.5, 2.0])
def test_clipping_equals_its_closed_form(share):
    """params - lr · g · min(1, clip / |g|), the norm over all devices."""
    expected = reference("rotary")
    rule = optax.identity()
    step, state = step_of(ALL, rule=rule, max_grad_norm=share * expected.norm)
    state, metrics = step.train(state, put_batch(step, text_batch()), np.inf)
    factor = LEARNING_RATE * min(1.0, share)
    start = initial_state("rotary").params
    target = jax.tree.map(lambda p, g: p - factor * g, start, expected.grads)
    # Parameters of size 1 are stored to 6e-8; gradients agree to 1e-5 of the largest.
    bound = 2e-7 + factor * 1e-5 * largest(expected.grads)
    assert distance(jax.device_get(state.params), target) <= bound
    assert float(metrics["grad_norm"]) == pytest.approx(expected.norm, rel=1e-5)


@pytest.mark.smoke
@pytest.mark.parametrize(
    "case",
    [
        Case("learned", "dp=2"),
        pytest.param(Case("learned", "cp=2", exchange="ring"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_float16_scales_its_loss_and_finds_the_scale(case, monkeypatch):
    monkeypatch.setattr("jaxdist.core.precision.INITIAL_LOSS_SCALE", 2.0**22)
    monkeypatch.setattr("jaxdist.core.precision.GROWTH_STEPS", 4)
    precision = PrecisionConfig(compute_dtype="float16")
    step, state = step_of(case, precision=precision)
    batch = place_batch(text_batch(), step.batch_sharding)
    scales, finite, losses, norms = [float(state.loss_scale["scale"])], [], [], []
    for _ in range(16):
        before = jax.device_get(state.params["embed"]["table"])
        state, metrics = step.train(state, batch, np.inf)
        assert float(metrics["loss_scale"]) == scales[-1]
        scales.append(float(state.loss_scale["scale"]))
        finite.append(bool(metrics["applied"]))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
        changed = not np.array_equal(before, jax.device_get(state.params["embed"]["table"]))
        assert changed == finite[-1]
    assert not finite[0], "the first scale is chosen to overflow float16"
    run_length = 0
    for i, good in enumerate(finite):
        run_length = run_length + 1 if good else 0
        factor = 0.5 if not good else 2 if run_length == 4 else 1
        run_length %= 4
        assert scales[i + 1] == factor * scales[i]
    assert sum(finite) >= 4
    # Half precision holds 11 bits; the loss of its first finite steps is the reference's.
    assert losses[0] == pytest.approx(reference("learned").losses[0], rel=2e-3)
    # Gradients are unscaled before they are clipped and applied.
    assert norms[finite.index(True)] == pytest.approx(reference("learned").norm, rel=5e-3)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.usefixtures("users_promotion")
@pytest.mark.parametrize(
    "case",
    [
        Case("rotary", "fsdp=2"),
        Case("learned", "tp=2"),
        pytest.param(Case("rotary", "cp=2", exchange="ring"), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_bfloat16_stays_near_float32(case):
    """8 bits of mantissa: 4e-3 a rounding, averaged over many tokens and products."""
    trace, expected = (
        run(case, precision=PrecisionConfig(compute_dtype="bfloat16")),
        reference(case.model),
    )
    assert trace.losses[0] == pytest.approx(expected.losses[0], rel=2e-3)
    assert distance(trace.grads, expected.grads) <= 0.03 * largest(expected.grads)
    np.testing.assert_allclose(trace.losses, expected.losses, rtol=0.03)
    assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(trace.params))


@functools.cache
def with_remat(remat):
    step, state = step_of(Case("learned", "1"), remat=remat)
    batch = put_batch(step, text_batch())
    compiled = step.train.lower(state, batch, np.inf).compile()
    state, _ = compiled(state, batch, np.inf)
    grads = jax.tree.map(lambda mu: mu / (1 - tiny.BETA1), jax.device_get(state.opt_state.mu))
    return grads, compiled.memory_analysis().temp_size_in_bytes


REMATS = ["none", "dots", "full", "names:qkv,mlp_out"]


@pytest.mark.smoke
@pytest.mark.parametrize("remat", REMATS)
def test_recomputing_changes_no_gradient(remat):
    expected = reference("learned").grads
    assert distance(with_remat(remat)[0], expected) <= 1e-5 * largest(expected)


def test_recomputing_saves_memory():
    temp = {remat: with_remat(remat)[1] for remat in REMATS}
    assert temp["full"] < temp["names:qkv,mlp_out"] < temp["none"]
    assert temp["full"] < temp["dots"] < temp["none"]


def test_an_unknown_policy_is_refused():
    with refused("remat='some'", "none, dots, full", error=ValueError):
        remat_policy("some")


def test_gathered_weights_are_not_kept_for_the_backward_pass():
    """Layers are wide and tokens few: kept weights of all layers would dominate memory."""
    temps = {}
    for num_layers in (2, 6):
        config = dataclasses.replace(
            tiny.CONFIGS["learned"], d_model=64, mlp_dim=1024, num_layers=num_layers
        )
        model = tiny.build(config, seq_len=tiny.SEQ)
        case = Case("learned", "fsdp=2")
        layout = layout_of(case)
        settings = tiny.train_config(case, remat="none")
        state = jax.eval_shape(lambda m=model: tiny.make_state(m, optax.identity(), {})(0))
        step = make_step(
            model, model.objective, Optimizer(optax.identity(), tiny.schedule), layout,
            tiny.plan_of(model, layout, settings, PrecisionConfig(compute_dtype="float32")),
        )  # fmt: skip
        batch = {k: jax.ShapeDtypeStruct(v[:2, :4].shape, v.dtype) for k, v in text_batch().items()}
        memory = step.train.lower(state, batch, np.inf).compile().memory_analysis()
        temps[num_layers] = memory.temp_size_in_bytes
    matrices = 4 * (2 * 64 * 1024 + 64 * 24 * 8 + 64 * 64)
    # Each further layer holds half a layer of gradients, and less than half a layer besides.
    assert (temps[6] - temps[2]) / 4 < matrices


@pytest.mark.parametrize(
    "optimizer",
    [
        "adamw",
        "adafactor",
        "muon",
        *(pytest.param(x, marks=pytest.mark.product) for x in ("sgd", "lion")),
    ],
)
def test_every_optimizer_updates_as_on_one_device(optimizer):
    """Muon and Adafactor need complete matrices, which no device has."""
    start, expected = initial_state("rotary").params, reference("rotary").grads
    config, axes = OptimConfig(optimizer=optimizer, eps=1e-3), model_of("rotary").axes
    rule = make_optimizer(config, axes)
    directions, _ = make_update(rule)(expected, rule.init(start), start)
    case = Case("rotary", "dp=2,fsdp=2,tp=2", zero=1)
    layout = layout_of(case)
    rule = make_optimizer(config, axes, layout.shardings(layout.moment_specs(axes)))
    step, state = step_of(case, rule=rule)
    state, _ = step.train(state, put_batch(step, text_batch()), np.inf)
    directions_on_mesh = jax.tree.map(
        lambda new, old: (old - new) / LEARNING_RATE, jax.device_get(state.params), start
    )
    differing = jax.tree.map(
        lambda a, b: np.abs(a - b), directions_on_mesh, jax.device_get(directions)
    )
    flat = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(differing)])
    # Lion uses signs, which may differ for gradients that are 0 up to rounding.
    allowed = 2e-3 if optimizer == "lion" else 0
    bound = 1e-3 * largest(jax.device_get(directions)) + 2e-5
    assert np.mean(flat > bound) <= allowed


def test_regularizers_and_groups_act_as_on_one_device():
    """Over a split vocabulary and pipeline stages; the reported loss stays the plain one."""
    config = OptimConfig(groups=["layers/mlp:lr=0.5:weight_decay=0.2", "embed:lr=2"], eps=1e-3)
    rule = make_optimizer(config, model_of("rotary").axes)
    train = TrainConfig(z_loss=1e-2, label_smoothing=0.1)
    runs = []
    for mesh, micro in (("1", 1), ("fsdp=2,tp=2", 1), ("pp=2,tp=2", 2)):
        case = Case("rotary", mesh, microbatches=micro)
        objective = regularized(model_of("rotary").objective, train)
        step, state = step_of(case, rule=rule, objective=objective)
        state, metrics = step.train(state, put_batch(step, text_batch()), np.inf)
        runs.append((jax.device_get(metrics), jax.device_get(state.params)))
    with refused("train.z_loss", "another objective", error=ConfigError):
        regularized(lambda *_: {}, train)
    (expected, params), *others = runs
    assert expected["aux_loss"] > 0.05
    assert expected["loss"] == pytest.approx(float(reference("rotary").losses[0]), rel=1e-6)
    for metrics, updated in others:
        for name in ("loss", "aux_loss", "grad_norm"):
            assert metrics[name] == pytest.approx(expected[name], rel=1e-5)
        assert distance(updated, params) <= 1e-3 * LEARNING_RATE


def test_dropout_is_the_same_on_every_mesh(monkeypatch):
    """Random bits belong to a row and a position, not to a device or a microbatch."""
    dropping = dataclasses.replace(tiny.CONFIGS["learned"], dropout=0.2, attention_dropout=0.2)
    monkeypatch.setitem(tiny.CONFIGS, "dropping", dropping)
    alone = run(Case("dropping", "1"), steps=3)
    spread = run(Case("dropping", "dp=2,fsdp=2,tp=2", microbatches=2), steps=3)
    assert abs(alone.losses[0] / reference("dropping").losses[0] - 1) > 1e-3, "nothing was dropped"
    np.testing.assert_allclose(spread.losses, alone.losses, rtol=2e-6)
    assert distance(spread.grads, alone.grads) <= 1e-5 * largest(alone.grads)


def annotated_model():
    """Return a model of two products without hooks: the compiler partitions the tensor axis."""

    def init(key):
        up, down = jax.random.split(key)
        return {"up": jax.random.normal(up, (16, 32)), "down": jax.random.normal(down, (32, 16))}

    def head(params, x, batch, context):
        return jnp.tanh(batch["x"] @ params["up"]) @ params["down"], {}

    def squared_error(out, batch, context):
        losses = jnp.sum(jnp.square(out - batch["y"]), -1) * batch["weights"]
        return {"loss": losses.sum(), "weight": batch["weights"].sum()}

    axes = {"up": Dims(("d_model", "mlp")), "down": Dims(("mlp", "d_model"))}
    return Model(
        name="two products", init=init, axes=axes, dims={"mlp": 32, "d_model": 16},
        head=head, objective=squared_error, tensor="auto",
    )  # fmt: skip


@pytest.mark.smoke
def test_a_model_without_hooks_runs_with_the_tensor_axis_left_to_the_compiler():
    model, losses = annotated_model(), {}
    rng = np.random.default_rng(0)
    batch = {
        "x": rng.normal(size=(8, 16)).astype(np.float32),
        "y": rng.normal(size=(8, 16)).astype(np.float32),
        "weights": rng.uniform(size=8).astype(np.float32),
    }
    for text in ("1", "dp=2,tp=2", "fsdp=2,tp=4"):
        spec = tiny.MeshSpec.parse(text)
        layout = Layout(mesh=spec.build(jax.devices()[: spec.num_devices]), auto_tensor=True)
        state = init_state(model, optax.identity(), layout, seed=0, loss_scale={})
        identity = Optimizer(optax.identity(), tiny.schedule)
        step = make_step(model, model.objective, identity, layout, tiny.plan_of(model, layout))
        losses[text] = []
        for _ in range(3):
            state, metrics = step.train(state, put_batch(step, batch), np.inf)
            losses[text].append(float(metrics["loss"]))
        if spec["tensor"] > 1:
            assert state.params["up"].sharding.spec[-1] == "tensor"
    np.testing.assert_allclose(losses["dp=2,tp=2"], losses["1"], rtol=2e-6)
    np.testing.assert_allclose(losses["fsdp=2,tp=4"], losses["1"], rtol=2e-6)


def test_rows_that_do_not_divide_are_refused():
    step, state = step_of(Case("learned", "dp=2", microbatches=3))
    with refused("num_microbatches=3", "8 rows", error=ValueError):
        step.train.lower(state, put_batch(step, text_batch()), np.inf)
    step, state = step_of(Case("learned", "dp=8"))
    ragged = jax.tree.map(lambda x: x[:12], text_batch())
    with refused("12", "8", error=ValueError):
        step.train.lower(state, ragged, np.inf)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(steps=0), "train.steps=0"),
        (dict(num_microbatches=-1), "train.num_microbatches=-1"),
        (dict(remat="half"), "train.remat='half'"),
        (dict(remat="names:"), "is unknown"),
        (dict(remat="names:qkv,logits"), "logits"),
    ],
    ids=str,
)
def test_invalid_settings_report_the_allowed_ones(changes, message):
    (problem,) = problems_of(TrainConfig(**changes), "train")
    assert message in problem


@pytest.mark.parametrize(
    "mesh, platform, remat, layers, unrolled",
    [
        ("dp=2", "gpu", "dots", 32, True),
        ("dp=2", "gpu", "none", 12, True),
        ("dp=2", "gpu", "full", 12, False),
        ("dp=2", "gpu", "dots", 33, False),
        ("fsdp=2", "gpu", "dots", 12, False),
        ("tp=2", "gpu", "dots", 12, False),
        ("cp=2", "gpu", "dots", 12, False),
        ("pp=2", "gpu", "dots", 12, False),
        ("dp=2", "cpu", "none", 12, True),
        ("dp=2", "cpu", "dots", 12, False),
        ("dp=2", "cpu", "none", 17, False),
    ],
)
def test_layers_without_communication_are_unrolled(
    mesh, platform, remat, layers, unrolled, monkeypatch
):
    monkeypatch.setattr(step_plan, "UNROLL_UP_TO", 16)
    model = dataclasses.replace(model_of("rotary"), num_layers=layers)
    gathers = mesh.startswith("fsdp")
    num_layers, _ = step_plan.layers_of_a_body(
        model,
        layout_of(Case("rotary", mesh)),
        platform,
        remat,
        gathers=gathers,
        split=LayerSplit((layers,), 1),
    )
    assert num_layers == (layers if unrolled else 1)


def test_unrolled_layers_equal_a_loop(monkeypatch):
    """The layers use recomputation, as on GPUs."""
    case = Case("rotary", "dp=2", microbatches=2, remat="dots")
    unrolled = lambda model, *_, **__: (model.num_layers, "")
    monkeypatch.setattr(step_plan, "layers_of_a_body", unrolled)
    check(run(case), reference(case.model))


@pytest.mark.parametrize(
    "case",
    [
        Case("rotary", "dp=2,fsdp=2,tp=2", microbatches=2),
        Case("rotary", "pp=2,dp=2", microbatches=2),
        pytest.param(Case("rotary", "cp=2,dp=2"), marks=pytest.mark.product),
    ],
    ids=str,
)
def test_a_step_without_labels_changes_nothing_and_one_label_anywhere_does(case):
    """Weight decay and moments move parameters at gradient 0 as well."""
    step, state = step_of(case, rule=optax.adamw(1.0, weight_decay=0.1), ema_decay=0.9)
    empty = text_batch()
    empty["weights"][:] = 0
    last = {**empty, "weights": empty["weights"].copy()}
    last["weights"][-1, -1] = 1.0
    state, metrics = step.train(state, put_batch(step, text_batch()), np.inf)
    kept = lambda state: jax.device_get((state.params, state.opt_state, state.copies))
    before = kept(state)
    state, metrics = step.train(state, put_batch(step, empty), np.inf)
    assert not metrics["applied"] and int(state.step) == 2
    assert distance(kept(state), before) == 0
    state, metrics = step.train(state, put_batch(step, last), np.inf)
    assert metrics["applied"] and distance(kept(state), before) > 0
