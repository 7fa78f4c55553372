"""Moving averages and frozen parameters: closed forms, and no effect on the other parameters."""

import dataclasses
import json
import logging
import shutil

import jax
import numpy as np
import pytest
import tiny
from refusals import missing, refused
from test_api import TINY
from test_step import put_batch
from tiny import (
    LEARNING_RATE,
    Case,
    initial_state,
    largest,
    make_update,
    model_of,
    reference,
    step_of,
    text_batch,
)

import jaxdist
from jaxdist import optim
from jaxdist.checkpoint import CheckpointConfig, Checkpointer
from jaxdist.checkpoint.streaming_io import StoredArrays
from jaxdist.config import RunConfig
from jaxdist.core.parallel.context import place_batch
from jaxdist.core.sharding import MeshConfig
from jaxdist.models.huggingface.safetensors import open_all
from jaxdist.optim import OptimConfig, make_optimizer
from jaxdist.run.setup import assemble
from jaxdist.tools.convert.__main__ import main as convert

DECAY, STEPS = 0.75, 4


def train_with_ema(mesh, poisoned=()):
    case = tiny.Case("cnn", mesh)
    step, state = tiny.step_of(case, ema_decay=DECAY)
    history = [jax.device_get((state.params, state.copies["ema"]))]
    for number in range(STEPS):
        batch = tiny.image_batch(seed=number)
        if number in poisoned:
            batch["images"][0] = np.nan
        state, _ = step.train(state, place_batch(batch, step.batch_sharding), np.inf)
        history.append(jax.device_get((state.params, state.copies["ema"])))
    placed = jax.tree.map(lambda p, e: p.sharding == e.sharding, state.params, state.copies["ema"])
    assert all(jax.tree.leaves(placed))
    return history


def test_average_equals_the_closed_form_of_the_trajectory():
    """d^n p_0 + (1 - d) Σ d^(n-i) p_i, in float64; a skipped step changes nothing."""
    history = train_with_ema("1", poisoned=[2])
    trajectory = [params for params, _ in history if params is not history[3][0]]
    weights = [DECAY**3, *((1 - DECAY) * DECAY ** (3 - i) for i in (1, 2, 3))]
    expected = jax.tree.map(
        lambda *leaves: sum(w * np.float64(p) for w, p in zip(weights, leaves, strict=True)),
        *trajectory,
    )
    assert tiny.distance(history[-1][1], expected) <= 1e-6
    assert tiny.distance(history[3][1], history[2][1]) == 0
    assert tiny.distance(history[-1][1], history[-1][0]) > 1e-3


def test_average_on_a_mesh_matches_one_device():
    one, many = train_with_ema("1")[-1][1], train_with_ema("fsdp=2,tp=2")[-1][1]
    assert tiny.distance(many, one) <= 1e-5 * tiny.largest(one)


def parts_of(ema_decay):
    config = RunConfig(
        model=tiny.CONFIGS["cnn"],
        mesh=MeshConfig(shape="fsdp=2"),
        optim=OptimConfig(ema_decay=ema_decay),
    )
    return assemble(config, jax.devices()[:2])


def test_average_can_start_and_end_between_two_checkpoints(tmp_path, caplog):
    caplog.set_level(logging.INFO, "jaxdist")
    checkpoints = Checkpointer(tmp_path, CheckpointConfig(), log=lambda line: None)
    without, with_ema = parts_of(0.0), parts_of(0.5)
    new = with_ema.init_state()
    jax.tree.map(np.testing.assert_array_equal, new.copies["ema"], new.params)
    checkpoints.save(1, without.init_state(), {}, force=True)
    state, _, _ = with_ema.restore(checkpoints, 1)
    assert any(missing(line, "checkpoint 1", "ema") == [] for line in caplog.messages)
    jax.tree.map(np.testing.assert_array_equal, state.copies["ema"], state.params)
    shards = lambda tree: [s for leaf in jax.tree.leaves(tree) for s in leaf.addressable_shards]
    buffers = [
        {shard.data.unsafe_buffer_pointer() for shard in shards(tree)}
        for tree in (state.params, state.copies["ema"])
    ]
    assert not buffers[0] & buffers[1]  # both are donated
    marked = jax.tree.map(lambda x: x + 1, state.copies["ema"])
    checkpoints.save(2, dataclasses.replace(state, copies={"ema": marked}), {}, force=True)
    caplog.clear()
    again, _, _ = with_ema.restore(checkpoints, 2)
    jax.tree.map(np.testing.assert_array_equal, again.copies["ema"], marked)
    assert not caplog.text
    assert without.restore(checkpoints, 2)[0].copies == {}
    assert any(missing(s, "ema", "checkpoint 2", "optim.ema_decay") == [] for s in caplog.messages)
    target = without.abstract_state().params
    for weights, expected in (("auto", marked), ("ema", marked), ("raw", state.params)):
        loaded = checkpoints.restore_params(target, 2, weights=weights)
        jax.tree.map(np.testing.assert_array_equal, loaded, expected)
    with refused("weights=ema", "--weights raw", "--optim.ema-decay"):
        checkpoints.restore_params(target, 1, weights="ema")
    fresh = dict(target, dense_2=state.params["dense_2"])
    loaded = checkpoints.restore_params(fresh, 2, reinit=["params/dense_2"])
    assert tiny.distance(loaded["dense_1"], marked["dense_1"]) == 0
    checkpoints.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return train(tmp_path_factory.mktemp("ema") / "run")


def train(path):
    settings = {"optim.ema_decay": 0.9, "checkpoint.save_interval_steps": 2}
    return jaxdist.train(TINY, run_dir=path, steps=4, progress=False, **settings)


def arrays(path):
    stored = StoredArrays(path)
    return {name: stored.read(name).tobytes() for name in stored.entries}


@pytest.mark.slow
def test_run_resumes_its_average_bit_identically(run, tmp_path):
    again = tmp_path / "run"
    shutil.copytree(run.path, again)
    shutil.rmtree(again / "checkpoints" / "4")
    resumed = train(again)
    assert [e["event"] for e in resumed.events].count("restore") == 1
    expected, actual = (arrays(path / "checkpoints" / "4") for path in (run.path, again))
    assert actual == expected
    assert any(name.startswith("ema_params/") for name in expected)
    assert resumed.evaluations[-1]["loss"] == run.evaluations[-1]["loss"]


@pytest.mark.slow
def test_average_is_evaluated_and_exported(run, tmp_path, capsys):
    from jaxdist.evaluate import main as evaluate

    losses = {}
    for weights in ("auto", "ema", "raw"):
        assert evaluate([str(run.path), f"--weights={weights}", "--max-batches=2", "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        losses[result["weights"]] = result["loss"]
        assert result["weights"] == {"auto": "ema"}.get(weights, weights)
    assert losses["ema"] == pytest.approx(run.evaluations[-1]["loss"], rel=1e-6)
    assert abs(losses["ema"] - losses["raw"]) > 1e-3
    stored = StoredArrays(run.path / "checkpoints" / "4")
    for weights, item in (("auto", "ema_params"), ("raw", "params")):
        out = tmp_path / weights
        assert convert(["to-hf", str(run.path), str(out), f"--weights={weights}"]) == 0
        exported_table = open_all(out)["model.embed_tokens.weight"]
        table = stored.read(f"{item}/embed/table")
        np.testing.assert_array_equal(exported_table.read(), table)
    np.testing.assert_array_equal(
        run.params["embed"]["table"], stored.read("ema_params/embed/table")
    )
    raw = jaxdist.open(run.path, weights="raw")
    np.testing.assert_array_equal(raw.params["embed"]["table"], stored.read("params/embed/table"))


FROZEN = ["embed", "layers/attention", "params/layers/mlp/down"]


@pytest.mark.parametrize(
    "optimizer, mesh",
    [("adamw", "dp=2,fsdp=2,tp=2"), ("lion", "pp=2,tp=2"), ("muon", "dp=2,fsdp=2,tp=2")],
)
def test_frozen_parts_stay_and_the_rest_trains_as_if_they_had_no_gradient(optimizer, mesh):
    start, grads = initial_state("rotary").params, reference("rotary").grads
    config = OptimConfig(optimizer=optimizer, eps=1e-3, freeze=FROZEN)
    axes = model_of("rotary").axes
    moves = jax.tree_util.tree_map_with_path(lambda path, _: named(path) not in STAYING, start)
    assert sum(jax.tree.leaves(moves)) == len(jax.tree.leaves(moves)) - len(STAYING)
    norm = np.sqrt(
        sum(
            np.square(g, dtype=np.float64).sum()
            for g, move in zip(jax.tree.leaves(grads), jax.tree.leaves(moves), strict=True)
            if move
        )
    )
    clip = 0.5 * norm
    unfrozen = make_optimizer(dataclasses.replace(config, freeze=[]), axes)
    scaled = jax.tree.map(lambda g: g * np.float32(clip / norm), grads)
    directions, _ = make_update(unfrozen)(scaled, unfrozen.init(start), start)
    step, state = step_of(
        Case("rotary", mesh),
        rule=make_optimizer(config, optim.with_frozen(config, axes)),
        max_grad_norm=clip,
        axes=optim.with_frozen(config, axes),
    )
    state, metrics = step.train(state, put_batch(step, text_batch()), np.inf)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    allowed = 2e-3 if optimizer == "lion" else 0  # signs of values that are 0 up to rounding

    def check(path, new, old, direction, move):
        if not move:
            np.testing.assert_array_equal(new, old, err_msg=named(path))
            return
        apart = np.abs((old - new) / LEARNING_RATE - direction)
        bound = 1e-3 * largest(jax.device_get(directions)) + 2e-5
        assert np.mean(apart > bound) <= allowed, named(path)

    jax.tree_util.tree_map_with_path(
        check, jax.device_get(state.params), start, jax.device_get(directions), moves
    )


def named(path):
    return jax.tree_util.keystr(path, simple=True, separator="/")


STAYING = {
    named(path)
    for path, _ in jax.tree_util.tree_leaves_with_path(initial_state("rotary").params)
    if named(path).startswith(("embed/", "layers/attention/")) or named(path) == "layers/mlp/down"
}


def test_frozen_parts_have_no_moments_and_no_weight_gradients():
    config = OptimConfig(freeze=["layers/mlp", "layers/attention"])

    def program(config):
        axes = optim.with_frozen(config, model_of("rotary").axes)
        step, state = step_of(Case("rotary", "1"), rule=make_optimizer(config, axes), axes=axes)
        lowered = step.train.lower(state, put_batch(step, text_batch()), np.inf)
        elements = sum(x.size for x in jax.tree.leaves(state.opt_state))
        return elements, lowered.compile().cost_analysis()["flops"]

    small, few = program(config)
    large, many = program(OptimConfig())
    params = initial_state("rotary").params
    inside = sum(
        x.size for x in jax.tree.leaves([params["layers"][k] for k in ("mlp", "attention")])
    )
    missing = 2 * inside - 2 * len(
        jax.tree.leaves([params["layers"]["mlp"], params["layers"]["attention"]])
    )
    assert large - small == missing  # a scalar replaces each moment
    assert few < 0.9 * many


def test_invalid_freeze_settings_are_reported():
    axes = model_of("rotary").axes
    (unknown,) = optim.frozen_problems(OptimConfig(freeze=["layers/mlpp", "embed"]), axes)
    assert "'layers/mlpp'" in unknown and "layers/mlp/down" in unknown
    (everything,) = optim.frozen_problems(OptimConfig(freeze=sorted(axes)), axes)
    assert missing(everything, "optim.freeze=", "nothing") == []
