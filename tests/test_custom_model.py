"""A user's own Flax model: jaxdist/models/example.py trains on every kind of mesh."""

import contextlib
import dataclasses
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from refusals import refused
from tiny import plan_of

from jaxdist.config import read_run
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.precision import PrecisionConfig
from jaxdist.core.sharding import Layout
from jaxdist.core.state import abstract_state, init_state
from jaxdist.core.step import Optimizer, TrainConfig, make_step
from jaxdist.core.types import AttentionCall, Context, Dims, Model
from jaxdist.models import CustomConfig, build, layers
from jaxdist.run.data_checks import check_data_fits
from jaxdist.run.setup import assemble
from jaxdist.settings import ConfigError

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "jaxdist" / "models" / "example.py"
SEQ, VOCAB = 8, 32


@pytest.fixture(autouse=True)
def repository_is_importable(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])


def example(**args):
    args = {"vocab": VOCAB, "width": 16, **args}
    return build(CustomConfig(factory="jaxdist.models.example:build", args=args), seq_len=SEQ)


def train(mesh, num_steps=2, dtype="float32", num_microbatches=1, **layout):
    model = example()
    spec = MeshSpec.parse(mesh)
    layout = Layout(
        mesh=spec.build(jax.devices()[: spec.num_devices]),
        rules=model.rules,
        auto_tensor=model.tensor == "auto",
        **layout,
    )
    optimizer = optax.scale_by_adam()
    config = TrainConfig(num_microbatches=num_microbatches)
    precision = PrecisionConfig(compute_dtype=dtype)
    schedule = lambda step: jnp.float32(1e-2)
    plan = plan_of(model, layout, config, precision)
    step = make_step(model, model.objective, Optimizer(optimizer, schedule, 1.0), layout, plan)
    state = init_state(model, optimizer, layout, seed=0, loss_scale={})
    history = []
    for number in range(num_steps):
        batch = jax.device_put(random_batch(number), step.batch_sharding)
        state, metrics = step.train(state, batch, np.inf)
        history.append((metrics["loss"], metrics["grad_norm"]))
    return np.array(jax.device_get(history)), state


def random_batch(seed):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, (8, SEQ + 1), np.int32)
    weights = rng.choice([0.0, 1.0], (8, SEQ)).astype(np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


@pytest.fixture(scope="module")
def one_device():
    sys.path.insert(0, str(ROOT))
    history, _ = train("1")
    assert history[-1, 0] < np.log(VOCAB) + 1
    return history


@pytest.mark.parametrize(
    "mesh, options",
    [
        pytest.param("dp=4", {"zero": 3, "num_microbatches": 2}, marks=pytest.mark.product),
        ("dp=2,fsdp=2,tp=2", {"num_microbatches": 2}),
    ],
    ids=["dp4_zero3", "dp2_fsdp2_tp2"],
)
def test_the_example_trains_equally_on_every_mesh(mesh, options, one_device):
    history, state = train(mesh, **options)
    # float32 sums in another order, two Adam steps.
    np.testing.assert_allclose(history, one_device, rtol=1e-5)
    kernel = state.params["blocks"][0]["up"]["kernel"]
    spec = MeshSpec.parse(mesh)
    ways = spec["tensor"] * spec["fsdp"] * (spec["data"] if options.get("zero") == 3 else 1)
    assert kernel.addressable_shards[0].data.size == kernel.size // ways


def test_the_tensor_axis_is_used_and_not_only_stored():
    """Under automatic partitioning too, no device multiplies by complete kernels."""
    model, mesh = example(), MeshSpec.parse("tp=4").build(jax.devices()[:4])
    layout = Layout(mesh=mesh, rules=model.rules, auto_tensor=True)
    schedule = lambda step: jnp.float32(1e-2)
    optimizer = Optimizer(optax.scale_by_adam(), schedule)
    step = make_step(model, model.objective, optimizer, layout, plan_of(model, layout))
    state = abstract_state(model, optax.scale_by_adam(), layout, loss_scale={})
    text = step.evaluate.lower(state.params, random_batch(0)).compile().as_text()
    assert "all-reduce" in text
    # Eight rows of eight tokens through `up`, [16, 64]: 16 of its columns on each device.
    assert "f32[64,16]" in text or "f32[8,8,16]" in text
    assert "f32[64,64]" not in text and "f32[8,8,64]" not in text


def test_weights_without_names_are_replicated():
    _, axes, _ = layers.functional(lambda rngs: nnx.Linear(2, 3, rngs=rngs))
    assert axes == {"kernel": Dims((None, None)), "bias": Dims((None,))}


def test_state_other_than_parameters_is_refused():
    with refused("BatchNorm", "BatchStat", error=ValueError):
        layers.functional(lambda rngs: nnx.BatchNorm(4, rngs=rngs))


def test_a_batch_has_the_fields_that_the_model_reads():
    config = read_run(["--mesh=dp=1", "--train.global_batch_size=4"], command="")
    row = {"waves": jax.ShapeDtypeStruct((5,), jnp.float32)}
    model = dataclasses.replace(example(), row=row)
    batch = assemble(config, jax.devices()[:1], model=model).abstract_batch()
    assert {name: x.shape for name, x in batch.items()} == {"waves": (4, 5)}


def test_tokens_beyond_the_vocabulary_of_a_model_are_refused():
    named = ["--model=custom", "--model.factory=jaxdist.models.example:build"]
    config = read_run(named, command="")
    data = SimpleNamespace(kind="text", vocab_size=300)
    for vocab, is_refused in ((256, True), (300, False)):
        parts = SimpleNamespace(config=config, model=example(vocab=vocab))
        with pytest.raises(ConfigError, match="300") if is_refused else contextlib.nullcontext():
            check_data_fits(parts, data)


def test_a_custom_model_reports_its_classes_and_attention():
    """Facts that are not in the settings come from the model, as for built-in models."""
    config = read_run(["--model=custom", "--model.factory=m:build", "--mesh=cp=2"], command="")
    images = dataclasses.replace(example(), unit="images", num_classes=10)
    data = SimpleNamespace(kind="images", vocab_size=11)
    with pytest.raises(ConfigError, match=r"num_classes\b.*\b11\b"):
        check_data_fits(SimpleNamespace(config=config, model=images), data)
    drops = dataclasses.replace(
        example(), context_parallel=True, attention_call=AttentionCall(dropout=0.25)
    )
    (problem,) = config.mesh_problems(MeshSpec.parse("cp=2"), drops)
    assert "0.25" in problem


def test_a_model_without_head_or_objective_is_rejected():
    rest = {"name": "m", "init": None, "axes": {}, "dims": {}}
    for fields in ({"head": print}, {"objective": print}):
        with refused("model 'm'", "head=", "objective=", "TokenHead"):
            Model(**rest, **fields)


def test_the_records_that_models_receive_stay_small():
    assert len(dataclasses.fields(Context)) <= 15
    assert len(inspect.signature(make_step).parameters) <= 6


def test_the_example_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= 60


@pytest.mark.parametrize(
    "factory, args, message",
    [
        ("no_such_module:build", {}, "'no_such_module'"),
        ("jaxdist.models.example:make", {}, "'make'"),
        ("jaxdist.models.example:build", {"widht": 8}, "'widht'"),
        ("jaxdist.models.example:RULES", {}, "'dict'"),
        ("builtins:dict", {}, "dict.*jaxdist.core.types.Model"),
    ],
)
def test_a_factory_that_returns_no_model_is_named_with_the_reason(factory, args, message):
    with pytest.raises(ConfigError, match=message):
        build(CustomConfig(factory=factory, args=args), seq_len=SEQ)


@pytest.mark.parametrize("factory", ["", "module", "module:", ":build", "module:not-a-name"])
def test_a_factory_must_name_module_and_function(factory):
    [problem] = CustomConfig(factory=factory).problems()
    assert repr(factory) in problem and "my_package.my_model:build" in problem
