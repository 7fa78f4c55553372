"""Parameters with metadata (a frozen base in bf16 and int8, adapters) on meshes against one device.

Nothing here modifies the package. The reference multiplies plain float32 matrices: the product of
an adapter is added to its base. No mesh, no scan, no chunks, no custom gradient.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from refusals import refused

from jaxdist.checkpoint import CheckpointConfig, Checkpointer, pytree
from jaxdist.config import RunConfig
from jaxdist.core.attention import AttentionPlan, make_attend
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.parallel.context import place_batch
from jaxdist.core.precision import PrecisionConfig
from jaxdist.core.state import abstract_state, init_state
from jaxdist.core.step import Optimizer, make_step
from jaxdist.core.types import Context, Dims
from jaxdist.core.weights import (
    GROUPS,
    CompositeWeight,
    Parameter,
    ParameterGroup,
    frozen,
    merged,
    trained,
)
from jaxdist.hardware import GPUS, Cluster
from jaxdist.models.weights import num_params
from jaxdist.optim import OptimConfig
from jaxdist.plan.estimate.cost import checkpoint_bytes
from jaxdist.plan.estimate.job import Job
from jaxdist.plan.estimate.memory import estimate_memory

BASE = dataclasses.replace(tiny.model_of("rotary"), decoding=None)
MESHES = {
    "one": tiny.Case("rotary", "dp=1"),
    "fsdp2_tp2": tiny.Case("rotary", "fsdp=2,tp=2"),
    "pp2": tiny.Case("rotary", "pp=2", microbatches=4),
    "cp2": tiny.Case("rotary", "cp=2"),
}
STEPS, RANK = 3, 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LowRank(CompositeWeight):
    """A frozen weight plus the product of two trained matrices."""

    base: object
    a: object
    b: object

    def multiply(self, dot, dims, x, *, out_dtype, sum_over):
        """Return x · base + (x · a) · b."""
        inputs, out = dims.split("->")
        left, right = (part.split() for part in inputs.split(","))
        shared = [name for name in right if name in left]
        rows, columns = ([n for n in names if n not in shared] for names in (left, right))
        text = lambda *names: " ".join(names)
        low = dot(f"{text(*left)}, {text(*shared)} rank -> {text(*rows)} rank", x, self.a)
        high = dot(
            f"{text(*rows)} rank, rank {text(*columns)} -> {out}", low, self.b, out_dtype=out_dtype
        )
        return dot(dims, x, self.base, out_dtype=out_dtype) + high


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8(CompositeWeight):
    """A frozen weight in int8 [layers, inputs, outputs], and a float32 scale of each output."""

    values: object
    scale: object

    def multiply(self, dot, dims, x, *, out_dtype, sum_over):
        """Return the product of x and the values times their scale."""
        return dot(dims, x, self.complete().astype(x.dtype), out_dtype=out_dtype)

    def complete(self):
        return self.values.astype(jnp.float32) * self.scale

    @classmethod
    def of(cls, w):
        scale = jnp.max(jnp.abs(w), axis=1, keepdims=True).astype(jnp.float32) / 127
        return cls(jnp.round(w / scale).astype(jnp.int8), scale)

    @classmethod
    def record(cls, dims):
        layers, _, outputs = dims
        scale = Parameter((layers, None, outputs), update="none", keeps_dtype=True)
        return cls(Parameter(dims, storage="int8", update="none"), scale)


def adapt(model, inputs):
    """Return a model in which only adapters train, of a base in bf16 and one product in int8.

    `inputs`: how many dims a product sums.
    """

    def edit(tree, make, quantize):
        layers = {part: dict(leaves) for part, leaves in tree["layers"].items()}
        for (part, name), count in inputs.items():
            layers[part][name] = make(layers[part][name], count)
        down = layers["mlp"]["down"]
        layers["mlp"]["down"] = dataclasses.replace(down, base=quantize(down.base))
        return {**tree, "layers": layers}

    def matrices(w, count):
        layers, *shape = w.shape
        shapes = (layers, *shape[:count], RANK), (layers, RANK, *shape[count:])
        filled = lambda s: jnp.sin(jnp.arange(np.prod(s), dtype=jnp.float32)).reshape(s) / 8
        return LowRank(w, *map(filled, shapes))

    def records(dims, count):
        layers, *names = dims
        a, b = Dims((layers, *names[:count], None)), Dims((layers, None, *names[count:]))
        return LowRank(dims, a, b)

    narrow = lambda w: w.astype(jnp.bfloat16)
    init = lambda key: edit(jax.tree.map(narrow, model.init(key)), matrices, Int8.of)
    stored = lambda dims: Parameter(dims, storage="bfloat16", update="none")
    return dataclasses.replace(
        model, init=init, axes=edit(jax.tree.map(stored, model.axes), records, Int8.record)
    )


ADAPTED = {("attention", "qkv"): 1, ("attention", "out"): 2, ("mlp", "up"): 1, ("mlp", "down"): 1}
MODEL = adapt(BASE, ADAPTED)


def plain(params):
    """Return the float32 matrix that each weight represents, in the tree of the base model."""

    def leaf(w):
        if isinstance(w, LowRank):
            base = leaf(w.base)
            added = w.a.reshape(len(base), -1, RANK) @ w.b.reshape(len(base), RANK, -1)
            return base + added.reshape(base.shape)
        return w.complete() if isinstance(w, Int8) else w.astype(jnp.float32)

    return jax.tree.map(leaf, params, is_leaf=lambda node: isinstance(node, CompositeWeight))


def logps(params, batch):
    context = Context(attend=make_attend(AttentionPlan("cpu")))
    x, aux = BASE.embed(params, batch, context), BASE.prepare(batch, context)
    for i in range(BASE.num_layers):
        x, _ = BASE.block(jax.tree.map(lambda w, i=i: w[i], params["layers"]), x, aux, context)
    head, _ = BASE.head(params, x, batch, context)
    every = jax.nn.log_softmax((head.x @ head.kernel)[..., : head.vocab_size])
    return jnp.take_along_axis(every, batch["targets"][..., None], -1)[..., 0]


def mean_loss(params, batch):
    losses = -logps(plain(params), batch)
    return jnp.sum(losses * batch["weights"]) / jnp.sum(batch["weights"])


@functools.cache
def start():
    return jax.device_get(jax.jit(MODEL.init)(jax.random.key(0)))


@functools.cache
def by_hand():
    axes, rule, batch = MODEL.axes, tiny.optimizer(), tiny.text_batch()
    moving, rest = trained(start(), axes), frozen(start(), axes)
    complete = lambda moving: merged(moving, rest)
    gradient = jax.jit(jax.value_and_grad(lambda moving: mean_loss(complete(moving), batch)))
    opt_state, losses, first = rule.init(moving), [], None
    for _ in range(STEPS):
        loss, grads = gradient(moving)
        directions, opt_state = tiny.make_update(rule)(grads, opt_state, moving)
        moving = jax.tree.map(lambda p, d: p - tiny.LEARNING_RATE * d, moving, directions)
        losses.append(float(loss))
        first = first or jax.device_get(grads)
    return losses, first, jax.device_get(complete(moving))


def on_mesh(case):
    layout, rule = tiny.layout_of(case), tiny.optimizer()
    formats = PrecisionConfig(compute_dtype="float32")
    plan = tiny.plan_of(MODEL, layout, tiny.train_config(case), formats, case.pipeline)
    step = make_step(MODEL, MODEL.objective, Optimizer(rule, tiny.schedule), layout, plan)
    params = jax.device_put(start(), layout.shardings(layout.param_specs(MODEL.axes)))
    state = init_state(MODEL, rule, layout, seed=0, loss_scale={}, params=params)
    return step, state


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(mesh, marks=[pytest.mark.product] * (mesh not in ("fsdp2_tp2", "cp2")))
        for mesh in MESHES
    ],
)
def test_every_mesh_trains_as_one_device_does(mesh):
    losses, grads, params = by_hand()
    step, state = on_mesh(MESHES[mesh])
    placed = place_batch(tiny.text_batch(), step.batch_sharding)
    evaluated = step.evaluate(state.params, placed)
    np.testing.assert_allclose(evaluated["loss"] / evaluated["weight"], losses[0], rtol=LOSSES)
    for number in range(STEPS):
        state, metrics = step.train(state, placed, np.inf)
        np.testing.assert_allclose(metrics["loss"], losses[number], rtol=LOSSES)
        if number == 0:
            gradients = jax.tree.map(
                lambda mu: mu / (1 - tiny.BETA1), jax.device_get(state.opt_state.mu)
            )
            assert tiny.distance(gradients, grads) <= GRADIENTS * tiny.largest(grads)
    axes, final = MODEL.axes, jax.device_get(state.params)
    assert tiny.distance(trained(final, axes), trained(params, axes)) <= PARAMS
    jax.tree.map(np.testing.assert_array_equal, frozen(final, axes), frozen(start(), axes))


# Float32 sums in another order than the reference. Adam divides by the root of the second moment: a
# gradient near `tiny.EPS` moves a parameter by more than its own error.
LOSSES, GRADIENTS, PARAMS = 5e-6, 5e-6, 1e-4


def test_checkpoints_hold_stored_weights_and_averages_of_the_trained_ones(tmp_path):
    """Saved on fsdp=2,tp=2 and restored on one device; an average lacks frozen leaves."""
    model, rule = MODEL, tiny.optimizer()
    layouts = [tiny.layout_of(MESHES[mesh]) for mesh in ("fsdp2_tp2", "one")]
    settings = {"loss_scale": {}, "copies": ["ema"]}
    state = init_state(model, rule, layouts[0], seed=0, **settings)
    average = jax.tree.map(lambda p: p + 1, state.copies["ema"])
    state = dataclasses.replace(state, copies={"ema": average})
    checkpoints = Checkpointer(tmp_path, CheckpointConfig(), log=lambda line: None)
    checkpoints.save(1, state, {}, force=True)
    target = abstract_state(model, rule, layouts[1], **settings)
    restored, _, _ = checkpoints.restore(target, optional=("ema_params",))
    for part in ("params", "copies", "opt_state"):
        jax.tree.map(
            np.testing.assert_array_equal,
            *(jax.device_get(getattr(s, part)) for s in (restored, state)),
        )
    assert restored.params["layers"]["mlp"]["down"].base.values.dtype == jnp.int8
    assert len(jax.tree.leaves(restored.copies["ema"])) == 2 * len(ADAPTED)
    evaluated = checkpoints.restore_params(target.params, 1, weights="ema")
    expected = merged(state.copies["ema"], state.params)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(evaluated), jax.device_get(expected))
    jax.tree.map(
        np.testing.assert_array_equal, jax.device_get(state.eval_params), jax.device_get(expected)
    )
    checkpoints.close()


@pytest.mark.parametrize(
    "mesh",
    [pytest.param(m, marks=[pytest.mark.product] * (m != "pp2")) for m in MESHES],
)
def test_a_frozen_copy_is_a_group_of_its_own(tmp_path, monkeypatch, mesh):
    """A bf16 reference is one entry of `GROUPS`, and a setting that adds it to a run."""
    group = ParameterGroup("reference_params", "model.reference", storage="bfloat16")
    monkeypatch.setitem(GROUPS, "reference", group)
    for name in ("ITEMS", "OPTIONAL"):
        monkeypatch.setattr(pytree, name, (*getattr(pytree, name), group.item))
    case, rule, copies = MESHES[mesh], tiny.optimizer(), {"ema": 0.5, "reference": 1.0}
    layout, batch = tiny.layout_of(case), tiny.text_batch()
    plan = tiny.plan_of(BASE, layout, tiny.train_config(case), pipeline=case.pipeline)
    step = make_step(
        BASE, BASE.objective, Optimizer(rule, tiny.schedule, copies=copies), layout, plan
    )
    kept = {"loss_scale": {}, "copies": copies}
    state = init_state(BASE, rule, layout, seed=0, **kept)
    reference = jax.tree.map(lambda w: w.astype(jnp.bfloat16), jax.device_get(state.params))
    placed = place_batch(batch, step.batch_sharding)
    for _ in range(2):
        state, _ = step.train(state, placed, np.inf)
    own, copy = jax.device_get((state.params, state.copies["reference"]))
    jax.tree.map(np.testing.assert_array_equal, copy, reference)
    assert tiny.distance(own, copy) > 1e-3
    sums = step.evaluate(state.copies["reference"], placed)
    np.testing.assert_allclose(
        sums["loss"] / sums["weight"], mean_loss(reference, batch), rtol=LOSSES
    )
    with_group(monkeypatch, tmp_path, state, kept)


def with_group(monkeypatch, folder, state, kept):
    """Check that checkpoints, evaluation and plan of a state contain its reference."""
    layout, rule = tiny.layout_of(MESHES["one"]), tiny.optimizer()
    checkpoints = Checkpointer(folder, CheckpointConfig(), log=lambda line: None)
    checkpoints.save(1, state, {}, force=True)
    target = abstract_state(BASE, rule, layout, **kept)
    restored, _, _ = checkpoints.restore(target, optional=pytree.OPTIONAL)
    trees = [jax.device_get((one.params, one.copies)) for one in (restored, state)]
    jax.tree.map(np.testing.assert_array_equal, *trees)
    assert checkpoints.copies(1) == ["ema", "reference"]
    loaded = checkpoints.restore_params(target.copies["reference"], 1, weights="reference")
    assert tiny.distance(*map(jax.device_get, (loaded, state.copies["reference"]))) == 0
    checkpoints.close()
    config, sizes = RunConfig(), []
    cluster = Cluster.of(GPUS["h100"], 4)
    for copies in ({}, {"reference": 1.0}):
        monkeypatch.setattr(OptimConfig, "copies", copies)
        job = Job.of(config, MeshSpec.parse("fsdp=4"), cluster, config.build_model())
        memory = estimate_memory(job).state.get("reference", 0)
        sizes.append((config.state_bytes(job.model), checkpoint_bytes(job), 4 * memory))
    num = num_params(job.model)
    assert np.subtract(sizes[1], sizes[0]).tolist() == pytest.approx([2 * num] * 3, rel=0.01)


def test_trained_parameters_are_float32():
    with refused("storage='int8'", "update='none'", error=ValueError):
        Parameter(("d_model",), storage="int8")
