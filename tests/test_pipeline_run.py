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
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.parallel.pipeline.config import PipelineConfig
from jaxdist.core.parallel.pipeline.virtual_stages import to_execution_order, to_model_order
from jaxdist.core.sharding import MeshConfig
from jaxdist.core.state import abstract_state, init_state
from jaxdist.core.step import Optimizer, TrainConfig, make_step
from jaxdist.core.types import Context
from jaxdist.hardware import parse_gpus
from jaxdist.models import DecoderConfig
from jaxdist.optim import OptimConfig
from jaxdist.plan.estimate.job import Job
from jaxdist.run.setup import assemble

OPTIMIZER = optax.scale_by_adam()
SMALL = DecoderConfig(
    d_model=16, num_layers=8, num_heads=2, mlp_dim=32, vocab_size=256, max_seq_len=32
)


def make_run(case: Case):
    model, layout, plan, _ = make_parts(case)
    optimizer = Optimizer(OPTIMIZER, lambda count: 3e-3 + 0.0 * count, max_grad_norm=1.0)
    return plan, layout, make_step(model, model.objective, optimizer, layout, plan)


def train(step, state, first: int, last: int):
    losses = []
    for number in range(first, last):
        batch = host_batch(8)
        batch["tokens"] = np.roll(batch["tokens"], number, axis=1)
        state, metrics = step.train(state, jax.device_put(batch, step.batch_sharding), np.inf)
        losses.append(float(metrics["loss"]))
    return losses, state


def start(case: Case, layout, plan):
    model = make_model(case.family, case.layers)
    state = init_state(model, OPTIMIZER, layout, seed=0, loss_scale={})
    return to_execution_order(state, plan.layers)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case(mesh="pp=4,tp=2", family="gpt2"), marks=pytest.mark.product),
        pytest.param(
            Case(mesh="pp=2,dp=4", zero=2, family="llama_tied"), marks=pytest.mark.product
        ),
        Case(mesh="pp=2,tp=2", virtual=2, layers=5, depths="1.2.2.0", family="gpt2"),
    ],
    ids=str,
)
def test_twenty_steps_match_one_device(case):
    plan, layout, step = make_run(case)
    one = Case(mesh="dp=1", family=case.family, layers=case.layers)
    one_plan, one_layout, one_step = make_run(one)
    losses, state = train(step, start(case, layout, plan), 0, 20)
    expected, _ = train(one_step, start(one, one_layout, one_plan), 0, 20)
    up = np.asarray(jax.device_get(state.params["layers"]["mlp"]["up"]))
    assert not np.delete(up, plan.layers.positions, axis=0).any(), "padding stays zero"
    assert expected[-1] < expected[0] - 0.05
    # Contract of the project: 20 steps within 2e-5 relative in float32.
    np.testing.assert_allclose(losses, expected, rtol=2e-5)


@pytest.mark.slow
def test_checkpoint_of_interleaved_stages_resumes_without_stages_and_back(tmp_path):
    staged = Case(mesh="pp=2,fsdp=2", virtual=2, layers=5, depths="1.2.2.0")
    plain = Case(mesh="dp=2", layers=5)
    model = make_model(staged.family, staged.layers)
    plan, layout, step = make_run(plain)
    expected, _ = train(step, start(plain, layout, plan), 0, 6)
    losses, state, at = [], None, 0
    for case in (staged, plain, staged):
        plan, layout, step = make_run(case)
        directory = tmp_path / "checkpoints"
        if state is None:
            state = start(case, layout, plan)
        else:
            reader = Checkpointer(directory, CheckpointConfig(), read_only=True)
            target = abstract_state(model, OPTIMIZER, layout, loss_scale={})
            state, _, at = reader.restore(target)
            state = to_execution_order(state, plan.layers)
        part, state = train(step, state, at, at + 2)
        losses += part
        writer = Checkpointer(directory, CheckpointConfig())
        writer.save(at + 2, to_model_order(state, plan.layers), {}, force=True)
        assert writer.wait()
        writer.close()
    np.testing.assert_allclose(losses, expected, rtol=2e-5)


@pytest.mark.parametrize(
    ("shape", "virtual", "depths", "order"),
    [
        pytest.param("pp=2", 4, "auto", [0, 2, 4, 6, 1, 3, 5, 7], marks=pytest.mark.product),
        ("pp=2,fsdp=2", 2, "1,3,3,1", [0, 8, 8, 4, 5, 6, 1, 2, 3, 7, 8, 8]),
        ("pp=3,tp=2", 1, "2,3,3", [0, 1, 8, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_checkpoint_has_the_layers_in_the_order_of_the_model(
    shape, virtual, depths, order, tmp_path
):
    """Stages store other orders, and padding (8); any mesh loads the file bit for bit."""
    run = tmp_path / "run"
    settings = dict(model=SMALL, train=TrainConfig(global_batch_size=4, seq_len=32))
    pipeline = PipelineConfig(num_virtual_stages=virtual, layers_per_stage=depths)
    stages = RunConfig(mesh=MeshConfig(shape=shape), pipeline=pipeline, **settings)
    parts = assemble(stages, jax.devices()[: MeshSpec.parse(shape).num_devices])
    state = parts.init_state()
    one = assemble(RunConfig(mesh=MeshConfig(shape="dp=1"), **settings), jax.devices()[:1])
    expected = jax.device_get(one.init_state())
    up = lambda tree: np.asarray(jax.device_get(tree["layers"]["mlp"]["up"]))
    padded = np.pad(up(expected.params), [(0, 1), *[(0, 0)] * (up(expected.params).ndim - 1)])
    np.testing.assert_array_equal(up(state.params), padded[order])
    with contextlib.closing(Checkpointer(run, CheckpointConfig())) as writer:
        writer.save(1, parts.in_model_order(state), {}, force=True)
        assert writer.wait()
    with contextlib.closing(Checkpointer(run, CheckpointConfig(), read_only=True)) as reader:
        restored, _, _ = reader.restore(one.abstract_state())
        again, _, _ = parts.restore(reader)
        averaging = dataclasses.replace(stages, optim=OptimConfig(ema_decay=0.5))
        averaging = assemble(averaging, list(parts.devices))
        average = averaging.restore(reader)[0].copies["ema"]
    compared = lambda a, b: np.testing.assert_array_equal(key_data(a), key_data(b))
    jax.tree.map(compared, jax.device_get(restored), expected)
    jax.tree.map(compared, jax.device_get(again), jax.device_get(state))
    jax.tree.map(compared, *jax.device_get((average, state.params)))
    shardings = lambda tree: jax.tree.map(lambda x: x.sharding, tree)
    assert shardings(average) == shardings(averaging.step_state().copies["ema"])


def key_data(x):
    return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def test_the_run_uses_the_chosen_virtual_stages():
    train = TrainConfig(global_batch_size=8, seq_len=16, num_microbatches=8)
    chosen, named = (
        RunConfig(
            model=SMALL,
            mesh=MeshConfig(shape="pp=4"),
            train=train,
            pipeline=PipelineConfig(num_virtual_stages=virtual, layers_per_stage=depths),
        )
        for virtual, depths in ((0, "auto"), (0, "1,1,1,1,1,1,1,1"))
    )
    for config in (chosen, named):
        config.check_mesh(MeshSpec.parse("pp=4"))
        parts = assemble(config, jax.devices()[:4])
        assert parts.plan.layers.depths == (1,) * 8
        assert parts.pipeline_schedule.num_virtual_stages == 2
        job = Job.of(config, MeshSpec.parse("pp=4"), parse_gpus("h100:4")[0])
        assert job.stages.report.bubble == pytest.approx(3 / 19)
    wrong = dataclasses.replace(named.pipeline, layers_per_stage="1,1,1,1,1,1,2")
    problems = dataclasses.replace(named, pipeline=wrong).mesh_problems(MeshSpec.parse("pp=4"))
    assert "pipeline.layers_per_stage=1,1,1,1,1,1,2" in problems[0]


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
