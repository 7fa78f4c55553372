"""Runs on pipeline meshes: many steps, another mesh after a checkpoint, generation."""

import contextlib
import dataclasses

import jax
import numpy as np
import optax
import pytest
from pipeline_parity import SEQ_LEN, Case, host_batch, host_params, make_model, make_parts

from jaxdist.checkpoint import CheckpointConfig, Checkpointer
from jaxdist.config import RunConfig
from jaxdist.core.attention import AttentionPlan, make_attend
from jaxdist.core.parallel.pipeline.config import PipelineConfig
from jaxdist.core.parallel.pipeline.virtual_stages import (
    execution_order,
    to_execution_order,
    to_model_order,
)
from jaxdist.core.sharding import MeshConfig
from jaxdist.core.state import abstract_state, init_state
from jaxdist.core.step import Optimizer, TrainConfig, make_step
from jaxdist.core.types import Context
from jaxdist.models import DecoderConfig
from jaxdist.run.setup import assemble

OPTIMIZER = optax.scale_by_adam()
SMALL = DecoderConfig(
    d_model=16, num_layers=8, num_heads=2, mlp_dim=32, vocab_size=256, max_seq_len=32
)


def make_run(case: Case):
    """Return (layout, step) of a case with Adam, clipping and a constant learning rate."""
    model, layout, plan, _ = make_parts(case)
    optimizer = Optimizer(OPTIMIZER, lambda count: 3e-3 + 0.0 * count, max_grad_norm=1.0)
    return layout, make_step(model, model.objective, optimizer, layout, plan)


def train(step, state, first: int, last: int):
    """Return losses of steps first .. last - 1, with a new batch each, and the final state."""
    losses = []
    for number in range(first, last):
        batch = host_batch(8)
        batch["tokens"] = np.roll(batch["tokens"], number, axis=1)
        state, metrics = step.train(state, jax.device_put(batch, step.batch_sharding), np.inf)
        losses.append(float(metrics["loss"]))
    return losses, state


def start(case: Case, layout):
    model = make_model(case.family, case.layers)
    return init_state(model, OPTIMIZER, layout, seed=0, loss_scale={})


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(mesh="pp=4,tp=2", family="gpt2"), marks=pytest.mark.product),
        Case(mesh="pp=2,dp=4", zero=2, family="llama_tied"),
    ],
    ids=str,
)
def test_twenty_steps_match_one_device(case):
    layout, step = make_run(case)
    one = dataclasses.replace(Case(mesh="dp=1"), family=case.family)
    one_layout, one_step = make_run(one)
    losses, _ = train(step, start(case, layout), 0, 20)
    expected, _ = train(one_step, start(one, one_layout), 0, 20)
    assert expected[-1] < expected[0] - 0.05
    # Contract of the project: 20 steps within 2e-5 relative in float32.
    np.testing.assert_allclose(losses, expected, rtol=2e-5)


@pytest.mark.slow
def test_checkpoint_of_interleaved_stages_resumes_without_stages_and_back(tmp_path):
    staged = Case(mesh="pp=2,fsdp=2", virtual=2)
    plain = Case(mesh="dp=2")
    model = make_model(staged.family, staged.layers)
    expected, _ = train(make_run(plain)[1], start(plain, make_run(plain)[0]), 0, 6)
    losses, state, at = [], None, 0
    for case in (staged, plain, staged):
        layout, step = make_run(case)
        directory = tmp_path / "checkpoints"
        if state is None:
            state = start(case, layout)
        else:
            reader = Checkpointer(directory, CheckpointConfig(), read_only=True)
            target = abstract_state(model, OPTIMIZER, layout, loss_scale={})
            state, _, at = reader.restore(target)
        state = to_execution_order(state, case.virtual)
        part, state = train(step, state, at, at + 2)
        losses += part
        writer = Checkpointer(directory, CheckpointConfig())
        writer.save(at + 2, to_model_order(state, case.virtual), {}, force=True)
        assert writer.wait()
        writer.close()
    np.testing.assert_allclose(losses, expected, rtol=2e-5)


def test_checkpoint_has_the_layers_in_the_order_of_the_model(tmp_path):
    """Four virtual stages on each of two stages: a layer each, in another order in the state."""
    run = tmp_path / "run"
    settings = dict(model=SMALL, train=TrainConfig(global_batch_size=4, seq_len=32))
    stages = RunConfig(
        mesh=MeshConfig(shape="pp=2"), pipeline=PipelineConfig(num_virtual_stages=4), **settings
    )
    parts = assemble(stages, jax.devices()[:2])
    state = parts.init_state()
    one = assemble(RunConfig(mesh=MeshConfig(shape="dp=1"), **settings), jax.devices()[:1])
    expected = jax.device_get(one.init_state())
    up = lambda tree: np.asarray(jax.device_get(tree["layers"]["mlp"]["up"]))
    order = execution_order(8, 2, 4)
    np.testing.assert_array_equal(order, [0, 2, 4, 6, 1, 3, 5, 7])
    np.testing.assert_array_equal(up(state.params), up(expected.params)[order])
    with contextlib.closing(Checkpointer(run, CheckpointConfig())) as writer:
        writer.save(1, parts.in_model_order(state), {}, force=True)
        assert writer.wait()
    with contextlib.closing(Checkpointer(run, CheckpointConfig(), read_only=True)) as reader:
        restored, _, _ = reader.restore(one.abstract_state())
    compared = lambda a, b: np.testing.assert_array_equal(key_data(a), key_data(b))
    jax.tree.map(compared, jax.device_get(restored), expected)


def key_data(x):
    return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def test_generation_on_stages_matches_the_logits_of_one_device():
    """Layers are stored on their stages; XLA moves each to the activations during the scan."""
    logits = {}
    for mesh in ("dp=1", "pp=4,tp=2"):
        model, layout, _, context = make_parts(Case(mesh=mesh))
        plain = Context(dtype=context.dtype, attend=make_attend(AttentionPlan("cpu")))
        params = jax.device_put(
            host_params("llama", 4), layout.shardings(layout.param_specs(model.axes))
        )
        tokens = host_batch(2)["tokens"]
        positions = np.broadcast_to(np.arange(SEQ_LEN, dtype=np.int32), tokens.shape)
        cache = model.decoding.init_cache(2, SEQ_LEN, context.dtype)
        decode = jax.jit(lambda *args, plain=plain, model=model: model.decoding.step(*args, plain))
        logits[mesh] = jax.device_get(decode(params, cache, tokens, positions)[0])
    np.testing.assert_allclose(logits["pp=4,tp=2"], logits["dp=1"], atol=1e-5)
