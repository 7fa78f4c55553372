"""Sums returned by blocks reach the step once, on every mesh and schedule; `aux_loss` trains."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import plan_of

from jaxdist.core.mesh import MeshSpec
from jaxdist.core.parallel.pipeline.config import PipelineConfig
from jaxdist.core.parallel.pipeline.virtual_stages import to_execution_order, to_model_order
from jaxdist.core.sharding import Layout
from jaxdist.core.step import TrainConfig, make_context, make_evaluate, make_value_and_grad
from jaxdist.core.types import Dims, Model, TokenHead
from jaxdist.objectives import cross_entropy

LAYERS, ROWS, SEQ, WIDTH, MLP, VOCAB = 4, 8, 8, 8, 16, 16
SCALE = 4.0
"""Loss scale: gradients of every term of the loss are scaled, then divided."""


def gated_block(params, x, aux, context):
    """An MLP with a load-balancing loss on its router; positions weigh as their targets do."""
    gates = jax.nn.softmax(x @ params["router"])
    weights = context.split(aux["weights"][..., None])
    hidden = jnp.tanh(
        context.dot("batch seq d, d mlp -> batch seq mlp", context.enter(x), params["up"])
    )
    y = x + context.leave(hidden @ params["down"])
    sums = {
        "aux_loss": 0.1 * jnp.sum(weights * gates**2),
        "first_gate": jnp.sum(weights[..., 0] * gates[..., 0]),
        # Over this device's hidden units: partial with and without sequence parallelism.
        "hidden": jnp.sum(aux["weights"][..., None] * hidden**2),
    }
    return y, sums


def make_model():
    names = {"up": ("d_model", "mlp"), "down": ("mlp", "d_model"), "router": ("d_model", None)}

    def init(key):
        keys = iter(jax.random.split(key, 5))
        draw = lambda *shape: 0.5 * jax.random.normal(next(keys), shape)
        layers = {"up": draw(LAYERS, WIDTH, MLP), "down": draw(LAYERS, MLP, WIDTH)}
        layers["router"] = draw(LAYERS, WIDTH, 3)
        return {"layers": layers, "table": draw(VOCAB, WIDTH), "head": draw(WIDTH, VOCAB)}

    def head(params, x, batch, context):
        return TokenHead(context.enter(x), params["head"], VOCAB), {}

    return Model(
        name="gated",
        init=init,
        axes={
            "layers": {name: Dims(("layers", *dims)) for name, dims in names.items()},
            "table": Dims((None, "d_model")),
            "head": Dims(("d_model", "vocab")),
        },
        dims={"layers": LAYERS, "d_model": WIDTH, "mlp": MLP, "vocab": VOCAB},
        embed=lambda params, batch, context: context.split(params["table"][batch["tokens"]]),
        block=gated_block,
        head=head,
        objective=cross_entropy,
        num_layers=LAYERS,
        sequence=True,
    )


def make_batch():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (ROWS, SEQ + 1), np.int32)
    weights = rng.choice([0.0, 0.5, 1.0], (ROWS, SEQ)).astype(np.float32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}


@pytest.fixture(scope="module")
def reference():
    model, batch = make_model(), make_batch()
    params = jax.device_get(jax.jit(model.init)(jax.random.key(0)))

    def loss(params):
        x, weights = params["table"][batch["tokens"]], batch["weights"][..., None]
        sums = dict.fromkeys(("aux_loss", "first_gate", "hidden"), 0.0)
        for i in range(LAYERS):
            layer = jax.tree.map(lambda w, i=i: w[i], params["layers"])
            gates = jax.nn.softmax(x @ layer["router"])
            hidden = jnp.tanh(x @ layer["up"])
            x = x + hidden @ layer["down"]
            sums["aux_loss"] += 0.1 * jnp.sum(weights * gates**2)
            sums["first_gate"] += jnp.sum(weights[..., 0] * gates[..., 0])
            sums["hidden"] += jnp.sum(weights * hidden**2)
        log_probs = jax.nn.log_softmax(x @ params["head"])
        picked = jnp.take_along_axis(log_probs, batch["targets"][..., None], -1)[..., 0]
        sums["loss"] = -jnp.sum(picked * batch["weights"])
        sums["weight"] = jnp.sum(batch["weights"])
        return (sums["loss"] + sums["aux_loss"]) / sums["weight"], sums

    grads, sums = jax.jit(jax.grad(loss, has_aux=True))(params)
    return params, jax.device_get(sums), jax.device_get(grads)


@dataclasses.dataclass(frozen=True)
class Case:
    mesh: str
    microbatches: int = 1
    virtual: int = 1
    sequence: bool = False
    zero: int = 0
    remat: str = "none"

    def __str__(self):
        parts = [f"{f.name}={v}" for f in dataclasses.fields(self) if (v := getattr(self, f.name))]
        return "-".join(parts)


CASES = [
    Case("1", microbatches=4, remat="full"),
    Case("tp=4"),
    Case("dp=2,fsdp=2,tp=2", microbatches=2, sequence=True),
    Case("pp=2,tp=2", sequence=True),
    Case("pp=2,dp=2", virtual=2),
    Case("1"),
    Case("dp=4", microbatches=2, zero=2),
    Case("fsdp=4"),
    Case("tp=4", sequence=True),
    Case("pp=4"),
    Case("pp=2,dp=2"),
    Case("pp=2,tp=2", remat="full"),
    Case("pp=2,fsdp=2", virtual=2),
]


def make_parts(case):
    model, spec = make_model(), MeshSpec.parse(case.mesh)
    layout = Layout(
        mesh=spec.build(jax.devices()[: spec.num_devices]),
        zero=case.zero,
        sequence_parallel=case.sequence,
    )
    config = TrainConfig(
        global_batch_size=ROWS, seq_len=SEQ, num_microbatches=case.microbatches, remat=case.remat
    )
    stages = PipelineConfig(num_virtual_stages=case.virtual)
    plan = plan_of(model, layout, config, pipeline=stages)
    return model, layout, plan, make_context(model, layout, plan)


@pytest.mark.parametrize(
    "case",
    [*CASES[:5], *(pytest.param(case, marks=pytest.mark.product) for case in CASES[5:])],
    ids=str,
)
def test_sums_and_gradients_match_a_plain_loop(case, reference):
    params, expected, expected_grads = reference
    model, layout, plan, context = make_parts(case)
    function = make_value_and_grad(model, layout, plan, context)
    placed = jax.device_put(params, layout.shardings(layout.param_specs(model.axes)))
    placed = to_execution_order(placed, plan.layers)
    batch = jax.device_put(make_batch(), layout.sharding(layout.batch_spec()))
    sums, grads, _ = jax.jit(function)(placed, batch, jax.random.key(0), jnp.float32(SCALE))
    check_sums(sums, expected)
    largest = max(np.abs(g).max() for g in jax.tree.leaves(expected_grads))
    jax.tree.map(
        # float32 sums in another order
        lambda ours, other: np.testing.assert_allclose(ours, other, rtol=0, atol=1e-5 * largest),
        jax.device_get(to_model_order(grads, plan.layers)),
        expected_grads,
    )


@pytest.mark.parametrize(
    "case", [Case("dp=2,tp=2", sequence=True), Case("pp=2,tp=2", virtual=2)], ids=str
)
def test_evaluation_adds_up_the_sums_of_blocks(case, reference):
    params, expected, _ = reference
    model, layout, plan, context = make_parts(case)
    batch = jax.device_put(make_batch(), layout.sharding(layout.batch_spec()))
    placed = jax.device_put(params, layout.shardings(layout.param_specs(model.axes)))
    placed = to_execution_order(placed, plan.layers)
    check_sums(jax.jit(make_evaluate(model, layout, plan, context))(placed, batch), expected)


def test_constant_sum_is_counted_once_by_devices_that_share_a_layer(reference):
    params, _, _ = reference
    model, layout, plan, context = make_parts(Case("tp=2", sequence=True))
    model = dataclasses.replace(model, block=lambda _, x, *__: (x, {"layers": jnp.float32(1)}))
    batch = jax.device_put(make_batch(), layout.sharding(layout.batch_spec()))
    placed = jax.device_put(params, layout.shardings(layout.param_specs(model.axes)))
    assert jax.jit(make_evaluate(model, layout, plan, context))(placed, batch)["layers"] == LAYERS


def check_sums(sums, expected):
    assert sums["weight"] == expected["weight"]
    assert sums.keys() - {"correct"} == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(sums[name], value, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    "returned", [lambda x: x, lambda x: (x, {"rows": jnp.sum(x, (1, 2))}), lambda x: (x, {"n": 1})]
)
def test_block_with_invalid_return_value_is_refused(returned):
    model = dataclasses.replace(make_model(), block=lambda params, x, *_: returned(x))
    _, layout, plan, context = make_parts(Case("1"))
    evaluate = make_evaluate(model, layout, plan, context)
    params = jax.eval_shape(model.init, jax.random.key(0))
    with pytest.raises(TypeError, match=r"Model\.block returned"):
        jax.eval_shape(evaluate, params, make_batch())
