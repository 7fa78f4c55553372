"""Batch norm and the residual network: equal to PyTorch, and the same on every mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import refused
from test_cnn import layout_of, random_batch, trainer
from tiny import plan_of

from jaxdist.config import RunConfig
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.step import make_context, make_value_and_grad, statistics
from jaxdist.core.types import BATCH_STATISTICS, Context
from jaxdist.models import ResnetConfig, build
from jaxdist.models.weights import num_params
from jaxdist.optim import OptimConfig, with_frozen


class TinyConfig(ResnetConfig):
    """Images of 8 x 8 and few channels."""

    image_size = 8
    width = 8


TINY = TinyConfig(depth=8)
LEARNING_RATE = 0.1
STEPS = 2


def test_resnet_20_has_the_published_size():
    """He et al. 2015, table 6: 0.27 M parameters, without running averages."""
    model = build(ResnetConfig(), seq_len=1)
    assert num_params(model) == 269_722
    assert model.flops_per_token["full"] / 6 == pytest.approx(40.6e6, rel=0.02)  # multiply-adds
    assert sum(d.update == "statistic" for d in jax.tree.leaves(model.axes)) == 2 * 19


def run(mesh, **options):
    step, start = trainer(TINY, mesh, LEARNING_RATE, **options)
    state, losses = start(0), []
    for number in range(STEPS):
        batch = jax.device_put(random_batch(16, seed=number), step.batch_sharding)
        state, metrics = step.train(state, batch, np.inf)
        assert BATCH_STATISTICS not in metrics
        losses.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    held = jax.device_put(random_batch(16, seed=9), step.batch_sharding)
    return losses, jax.device_get(state.params), float(step.evaluate(state.params, held)["loss"])


@pytest.fixture(scope="module")
def alone():
    return run("1")


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("dp=2", {}),
        pytest.param("dp=2,fsdp=2,tp=2", {"zero": 3}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_batch_norm_uses_the_global_batch_on_every_mesh(alone, mesh, options):
    losses, params, evaluated = run(mesh, **options)
    np.testing.assert_allclose(losses, alone[0], rtol=2e-5)
    assert evaluated == pytest.approx(alone[2], rel=2e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5 * np.abs(b).max() + 1e-7),
        params,
        alone[1],
    )


def test_mesh_error_names_the_resnet_setting():
    config = RunConfig(model=ResnetConfig())
    (problem,) = config.mesh_problems(MeshSpec.parse("tp=3"))
    assert "=16" in problem


def test_head_that_drops_its_batch_statistics_is_rejected():
    model = build(TINY, seq_len=1)
    head = lambda *arguments: (model.head(*arguments)[0], {})
    layout = layout_of(model, "1")
    plan = plan_of(model, layout)
    context = make_context(model, layout, plan)
    forgetful = dataclasses.replace(model, head=head)
    function = make_value_and_grad(forgetful, layout, plan, context)
    params = jax.eval_shape(model.init, jax.random.key(0))
    with refused("norm/mean", "batch_statistics", error=TypeError):
        jax.eval_shape(function, params, random_batch(), jax.random.key(0), jnp.float32(1))


@pytest.mark.slow
def test_microbatches_average_their_statistics(alone):
    """A step of two equal halves updates running averages like a step of either half."""
    step, start = trainer(TINY, "1", 0.0, num_microbatches=2)
    half = random_batch(8)
    doubled_batch = {name: np.concatenate([value, value]) for name, value in half.items()}
    twice = step.train(start(0), doubled_batch, np.inf)[0].params["norm"]
    step, start = trainer(TINY, "1", 0.0)
    once = step.train(start(0), half, np.inf)[0].params["norm"]
    for name in ("mean", "variance"):
        np.testing.assert_allclose(twice[name], once[name], rtol=1e-6)


def test_frozen_running_averages_do_not_change():
    model = build(TINY, seq_len=1)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    parts = [name for name in model.axes if name != "norm"]
    axes = with_frozen(OptimConfig(freeze=parts), model.axes)
    observed = jax.tree.map(lambda x: x + 1, params)
    moved = statistics.update_running_stats(axes, params, params, observed)
    changed = jax.tree_util.tree_map_with_path(
        lambda path, a, b: (jax.tree_util.keystr(path), bool(np.any(a != b))), moved, params
    )
    names = jax.tree.leaves(changed, is_leaf=lambda x: isinstance(x, tuple))
    assert {name for name, is_changed in names if is_changed} == {
        "['norm']['mean']",
        "['norm']['variance']",
    }


# PyTorch


def test_layer_equals_pytorch():
    """Forward in training and evaluation, gradients and running averages of BatchNorm2d."""
    torch = pytest.importorskip("torch", reason="needs the reference extra (torch)")
    from jaxdist.models import layers

    rng = np.random.default_rng(0)
    size, rows = 5, 6
    init, axes, bind = layers.functional(lambda rngs: layers.BatchNorm(size, None))
    params = jax.tree.map(lambda x: np.array(x), init(jax.random.key(0)))
    params["scale"], params["bias"] = rng.normal(size=(2, size)).astype(np.float32)
    torch_layer = torch.nn.BatchNorm2d(size)
    with torch.no_grad():
        torch_layer.weight.copy_(torch.from_numpy(params["scale"]))
        torch_layer.bias.copy_(torch.from_numpy(params["bias"]))
    training = Context(dropout_key=jax.random.key(0))

    def weighted(params, x, context):
        module = bind(params)
        y = module(x, context)
        return jnp.sum(jnp.sin(y)), (y, layers.batch_statistics(module, context))

    for _ in range(2):
        x = (3 + 2 * rng.normal(size=(rows, 4, 4, size))).astype(np.float32)
        function = jax.grad(weighted, argnums=(0, 1), has_aux=True)
        (grads, dx), (y, sums) = function(params, x, training)
        observed = sums[BATCH_STATISTICS]
        params = jax.device_get(
            statistics.update_running_stats(axes, params, params, params | observed)
        )
        image = torch.from_numpy(x.transpose(0, 3, 1, 2).copy()).requires_grad_()
        out = torch_layer(image)
        torch_layer.zero_grad()
        out.sin().sum().backward()
        last = lambda t: t.detach().numpy().transpose(0, 2, 3, 1)
        np.testing.assert_allclose(y, last(out), atol=2e-6)
        np.testing.assert_allclose(dx, last(image.grad), atol=2e-6)
        np.testing.assert_allclose(grads["scale"], torch_layer.weight.grad, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(grads["bias"], torch_layer.bias.grad, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(params["mean"], torch_layer.running_mean, rtol=1e-6)
        np.testing.assert_allclose(params["variance"], torch_layer.running_var, rtol=2e-6)
    y, sums = weighted(params, x, Context())[1]
    assert sums == {}
    np.testing.assert_allclose(y, last(torch_layer.eval()(image)), atol=2e-6)
