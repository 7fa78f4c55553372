"""Statistics of every layer: against numpy on one device, and equal on every mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiny import SEQ, Case, initial_state, model_of, reference, text_batch

from jaxdist.core.attention import AttentionPlan, make_attend
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.parallel.context import place_batch
from jaxdist.core.parallel.pipeline.config import PipelineConfig
from jaxdist.core.parallel.pipeline.virtual_stages import LayerSplit, to_execution_order
from jaxdist.core.types import Context

MESHES = [
    Case("rotary", "dp=2,fsdp=2,tp=2", zero=1),
    Case("rotary", "cp=2,tp=2", exchange="ring"),
    Case("four", "pp=2,dp=2", microbatches=4, pipeline=PipelineConfig(num_virtual_stages=2)),
    Case("rotary", "cp=4", exchange="all_to_all"),
    Case("rotary", "dp=2", microbatches=4, remat="full"),
    Case("rotary", "pp=2,tp=2", microbatches=4),
    Case("rotary", "fsdp=2,tp=2", sequence=False),
]


def measure(case, batch):
    step, state = tiny.step_of(case, layer_statistics_steps=2)
    spec, virtual = MeshSpec.parse(case.mesh), case.pipeline.num_virtual_stages
    split = LayerSplit.of(tiny.model_of(case.model).num_layers, spec["pipeline"], virtual)
    state, both = to_execution_order(state, split), []
    for _ in range(2):
        state, metrics = step.train(state, place_batch(batch, step.batch_sharding), np.inf)
        both.append(jax.device_get(metrics["layer_statistics"]))
    return both


def norms_of(tree):
    named = {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x, np.float64)
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }
    norm = lambda name, x: np.sqrt((x**2).sum(tuple(range(name.startswith("layers/"), x.ndim))))
    return {name: norm(name, x) for name, x in named.items()}


def test_norms_equal_numpy_on_one_device():
    first, _ = measure(Case("rotary", "1"), text_batch())
    start, trace = initial_state("rotary").params, reference("rotary")
    update = jax.tree.map(lambda old, new: new - old, start, trace.params)
    for kind, tree in (("grad_norm", trace.grads), ("weight_norm", start), ("update_norm", update)):
        expected = norms_of(tree)
        assert first[kind].keys() == expected.keys()
        for name, norm in expected.items():
            np.testing.assert_allclose(first[kind][name], norm, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["windowed", pytest.param("rotary", marks=pytest.mark.product)])
def test_activations_and_logits_equal_a_plain_loop(name):
    """Packed rows: only pairs of one document count; in `windowed` only near ones."""
    model, batch, window = model_of(name), text_batch(), tiny.CONFIGS[name].sliding_window
    params, logits, rms = initial_state(name).params, [], []
    plain = make_attend(AttentionPlan("cpu"))
    behind = np.arange(SEQ)[:, None] - np.arange(SEQ)
    seen = (behind >= 0) & (behind < (window or SEQ))
    seen = seen & (batch["segments"][:, :, None] == batch["segments"][:, None])

    def attend(query, key, value, mask, **options):
        grouped = jnp.repeat(key, query.shape[2] // key.shape[2], axis=2)
        scores = np.einsum("bqhd,bkhd->bhqk", query, grouped) / np.sqrt(query.shape[-1])
        logits.append(scores.transpose(1, 0, 2, 3)[:, seen].max())
        return plain(query, key, value, mask, **options)

    context = Context(attend=attend)
    x, aux = model.embed(params, batch, context), model.prepare(batch, context)
    for i in range(model.num_layers):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"])
        x, _ = model.block(layer, x, aux, dataclasses.replace(context, layer=i))
        rms.append(np.sqrt(np.mean(np.square(x))))
    step, state = tiny.step_of(Case(name, "1"), layer_statistics_steps=1)
    _, metrics = step.train(state, place_batch(batch, step.batch_sharding), np.inf)
    statistics = metrics["layer_statistics"]
    np.testing.assert_allclose(statistics["activation_rms"]["layers"], rms, rtol=1e-5)
    np.testing.assert_allclose(statistics["attention_logit"]["layers"], logits, rtol=1e-5)


@pytest.mark.parametrize(
    "case",
    [*MESHES[:2], *(pytest.param(case, marks=pytest.mark.product) for case in MESHES[2:])],
    ids=str,
)
def test_statistics_are_equal_on_every_mesh(case):
    batch = text_batch()
    expected = measure(Case(case.model, "1"), batch)
    actual = measure(case, batch)
    for ours, on_one_device in zip(actual, expected, strict=True):
        assert ours.keys() == on_one_device.keys()
        for kind, parameters in on_one_device.items():
            for name, value in parameters.items():
                np.testing.assert_allclose(
                    ours[kind][name], value, rtol=2e-4, atol=1e-6, err_msg=f"{kind} {name}"
                )
    assert np.all(expected[1]["attention_logit"]["layers"] > 0)
    assert not np.any(expected[0]["activation_rms"]["layers"])  # the first step measures none


def test_a_model_without_stacked_layers_has_norms_only():
    step, state = tiny.step_of(Case("cnn", "dp=2"), layer_statistics_steps=1)
    batch = place_batch(tiny.batch_of("cnn"), step.batch_sharding)
    _, metrics = step.train(state, batch, np.inf)
    statistics = metrics["layer_statistics"]
    assert sorted(statistics) == ["grad_norm", "update_norm", "weight_norm"]
    assert statistics["weight_norm"].keys() == norms_of(initial_state("cnn").params).keys()


def test_measuring_changes_no_bit_of_training():
    batch, states = text_batch(), []
    for interval in (0, 1):
        step, state = tiny.step_of(Case("rotary", "fsdp=2,tp=2"), layer_statistics_steps=interval)
        state, metrics = step.train(state, place_batch(batch, step.batch_sharding), np.inf)
        states.append(jax.device_get((state.params, metrics["loss"])))
    assert all(map(np.array_equal, *map(jax.tree.leaves, states)))
