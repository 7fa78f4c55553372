"""Moments in 8 bits, compared with bitsandbytes, on meshes, and through checkpoints."""

import contextlib
import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import CONFIGS, Case, initial_state, layout_of, make_update, model_of

from jaxdist.checkpoint import CheckpointConfig, Checkpointer
from jaxdist.checkpoint.streaming_io import StoredArrays
from jaxdist.config import RunConfig
from jaxdist.core.block_weights import dynamic_map
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.parallel.pipeline.config import PipelineConfig
from jaxdist.core.sharding import MeshConfig
from jaxdist.core.state import state_shardings
from jaxdist.core.step import TrainConfig
from jaxdist.core.step.train_step import make_update as make_step_update
from jaxdist.core.types import Dims
from jaxdist.optim import OptimConfig, make_optimizer
from jaxdist.optim.int8 import BLOCK, dequantize, quantize
from jaxdist.run.setup import assemble

RECORDED = dict(np.load(Path(__file__).with_name("bitsandbytes_adamw.npz")))
"""Five steps of bitsandbytes 0.50.2, AdamW8bit on a CPU: lr 0.01, betas 0.9 and 0.95, decay 0.1."""


def fused(a, b, c):
    """Return a · b + c, float32, rounded once, as bitsandbytes' compiler does."""
    return (a.astype(np.float64) * b.astype(np.float64) + c).astype(np.float32)


@pytest.mark.parametrize("search", ["cpu", "default"])
def test_codes_equal_those_of_bitsandbytes(search, monkeypatch):
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda x, **ways: ways[search](x))
    moments = [(jnp.zeros(4608, jnp.uint8), jnp.zeros(18)) for _ in range(2)]
    p = RECORDED["p0"].copy()
    f = np.float32
    for t, g in enumerate(RECORDED["grads"], 1):
        m = np.asarray(dequantize(*moments[0], False, is_signed=True))
        v = np.asarray(dequantize(*moments[1], False, is_signed=False))
        m = fused(g, f(1 - 0.9), m * f(0.9))
        v = fused(f(1 - 0.95) * g, g, v * f(0.95))
        step = (m / f(1 - 0.9**t)) / (np.sqrt(v / f(1 - 0.95**t)) + f(1e-8))
        p = p * f(1 - 0.01 * 0.1) - f(0.01) * step
        moments = [
            quantize(jnp.asarray(m), False, is_signed=True),
            quantize(jnp.asarray(v), False, is_signed=False),
        ]
    for i, (codes, scales) in enumerate(moments, 1):
        np.testing.assert_array_equal(codes, RECORDED[f"state{i}"])
        np.testing.assert_array_equal(scales, RECORDED[f"absmax{i}"])
    np.testing.assert_allclose(p, RECORDED["p_after5"], atol=1e-6)  # order of the factors


def test_optimizer_differs_from_bitsandbytes_only_by_rounding():
    config = OptimConfig(moment_dtype="int8", beta1=0.9, beta2=0.95, weight_decay=0.0)
    rule = make_optimizer(config, {"w": Dims(("d_model",))})
    state = rule.init({"w": jnp.asarray(RECORDED["p0"])})
    for g in RECORDED["grads"]:
        _, state = make_update(rule)({"w": g}, state, {"w": g})
    for i, moment in enumerate((state[0].mu, state[0].nu), 1):
        # optax multiplies (1 - beta2) with g², bitsandbytes first with g.
        away = np.asarray(moment.codes["w"], int) - RECORDED[f"state{i}"]
        assert abs(away).max() <= 1 and (away != 0).sum() <= 2
        np.testing.assert_allclose(moment.scales["w"], RECORDED[f"absmax{i}"], rtol=1e-6)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("is_signed", [False, True])
def test_codes_follow_the_rule_of_the_grid(is_signed, platform, monkeypatch):
    """Compare the thresholds with the rule computed for each value."""
    if platform == "gpu":
        monkeypatch.setattr(jax.lax, "platform_dependent", lambda x, cpu, default: default(x))
    rng, values = np.random.default_rng(0), dynamic_map(is_signed).astype(np.float64)
    x = np.concatenate([rng.normal(size=2**17), rng.normal(size=2**17) ** 5]).astype(np.float32)
    x = x if is_signed else np.abs(x)
    blocks = x.reshape(-1, BLOCK)
    shares = blocks * (np.float32(1) / np.abs(blocks).max(1, keepdims=True))
    grid = np.floor((shares + np.float32(1)) * np.float32(32767.5) + np.float32(0.5))
    middles = (values[1:] + values[:-1]) / 2
    position = grid / np.float32(32767.5) - np.float32(1)
    expected = np.searchsorted(middles, position).reshape(-1)
    codes, _ = quantize(jnp.asarray(x), False, is_signed=is_signed)
    np.testing.assert_array_equal(codes, expected)


def test_small_parameters_zeros_and_incomplete_blocks():
    small, absent = quantize(jnp.ones((3, 4095)), True, is_signed=True)
    assert small.dtype == jnp.float32 and absent.shape == ()
    # Blocks do not cross layers, and zeros complete the last block of a layer.
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 17, 251)).astype(np.float32))
    x = x.at[1].set(0)
    codes, scales = quantize(x, True, is_signed=True)
    assert scales.shape == (2, 17, 1) and (scales[1] == 0).all()
    single, _ = quantize(x[0], False, is_signed=True)
    np.testing.assert_array_equal(codes[0], single)
    back = dequantize(codes, scales, True, is_signed=True)
    assert not back[1].any()
    error = np.abs(np.asarray(back - x))[0].reshape(-1)
    assert (
        error.max() <= (0.5 * 0.9 / 64 + 2**-16) * scales.max()
    )  # half of the widest gap, and the grid


MESHES = ["dp=8", "fsdp=8", "tp=4", "pp=2,fsdp=4", "dp=2,fsdp=2,tp=2", "cp=2,tp=2"]


@functools.cache
def updated(optimizer, mesh, zero=0):
    case = Case("four", mesh, zero=zero)
    model, layout = model_of(case.model), layout_of(case)
    config = OptimConfig(optimizer=optimizer, moment_dtype="int8", freeze=[])
    moment_shardings = layout.shardings(layout.moment_specs(model.axes))
    rule = make_optimizer(config, model.axes, moment_shardings)
    start = initial_state(case.model)
    state = dataclasses.replace(start, opt_state=jax.jit(rule.init)(start.params))
    shardings = state_shardings(model, rule, layout, loss_scale={})
    state = jax.tree.map(lambda x, s: jax.device_put(jnp.array(x, copy=True), s), state, shardings)
    update = jax.jit(
        make_step_update(model, rule, layout, 0.0),
        out_shardings=(shardings.params, shardings.opt_state),
    )
    for seed in range(3):
        draw = np.random.default_rng(seed).normal
        grads = jax.tree.map(
            lambda p, draw=draw: draw(size=p.shape).astype("f4") ** 3, start.params
        )
        grads = jax.device_put(grads, layout.shardings(layout.gradient_specs(model.axes)))
        params, opt_state = update(state, grads, jnp.float32(1), jnp.float32(0.01))
        state = dataclasses.replace(state, params=params, opt_state=opt_state)
    return jax.tree.map(lambda x: np.array(x), (state.params, state.opt_state)), state.opt_state


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(m, marks=[pytest.mark.product] * (m in ("fsdp=8", "tp=4", "dp=8")))
        for m in MESHES
    ],
)
def test_codes_have_the_same_bits_on_every_mesh(mesh):
    expected, _ = updated("adamw", "1")
    result, opt_state = updated("adamw", mesh, zero=int("dp=" in mesh))
    assert_same_state(result, expected)
    moment = opt_state[0].nu
    up, scales = (tree["layers"]["mlp"]["up"] for tree in (moment.codes, moment.scales))
    assert up.dtype == jnp.uint8 and up.shape == (4, 32, 2, 64) and scales.shape == (4, 16, 1, 1)
    parts = lambda x: x.size / x.addressable_shards[0].data.size
    spec = MeshSpec.parse(mesh)
    assert parts(up) == spec.num_devices
    assert parts(scales) == spec.num_devices / spec["tensor"]  # a block contains the `mlp` dim


@pytest.mark.parametrize(
    "optimizer", ["lion", "muon", pytest.param("sgd", marks=pytest.mark.product)]
)
def test_momentum_has_the_same_bits_on_a_mesh(optimizer):
    expected, _ = updated(optimizer, "1")
    result, _ = updated(optimizer, "dp=2,fsdp=2,tp=2")
    dtypes = {x.dtype.name for x in jax.tree.leaves(result[1]) if x.ndim}
    assert dtypes == {"uint8", "float32"}
    assert_same_state(result, expected)


def assert_same_state(result, expected):
    jax.tree.map(np.testing.assert_array_equal, result[1], expected[1])
    # The compiler fuses lr · update differently on each mesh: an ulp, as with float32 moments.
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-6)
    jax.tree.map(close, result[0], expected[0])


def parts_of(mesh, virtual=1, moments="int8"):
    config = RunConfig(
        model=CONFIGS["four"],
        mesh=MeshConfig(shape=mesh),
        pipeline=PipelineConfig(num_virtual_stages=virtual),
        optim=OptimConfig(moment_dtype=moments, ema_decay=0.9),
        train=TrainConfig(global_batch_size=8, seq_len=16),
    )
    return assemble(config, jax.devices()[: MeshSpec.parse(mesh).num_devices])


def test_checkpoints_keep_every_bit_across_meshes(tmp_path):
    source = parts_of("fsdp=2,tp=2")
    opt_state = updated("adamw", "1")[0][1]
    state = source.init_state()
    filled = jax.tree.map(
        lambda x, new: jax.device_put(new, x.sharding), state.opt_state, opt_state
    )
    state = dataclasses.replace(state, opt_state=filled)
    keep = CheckpointConfig(max_to_keep=3)
    with contextlib.closing(Checkpointer(tmp_path, keep, log=lambda line: None)) as checkpoints:
        checkpoints.save(1, state, {}, force=True)
        for step, (mesh, virtual) in enumerate([("pp=2,dp=2", 2), ("tp=4", 1)], 2):
            parts = parts_of(mesh, virtual)
            state, _, _ = parts.restore(checkpoints, step - 1)
            if virtual > 1:  # layers 0, 2, 1, 3
                codes = state.opt_state[0].mu.codes["layers"]["mlp"]["up"]
                expected = opt_state[0].mu.codes["layers"]["mlp"]["up"]
                np.testing.assert_array_equal(codes, expected[[0, 2, 1, 3]])
            checkpoints.save(step, parts.in_model_order(state), {}, force=True)
        checkpoints.wait()
        stored = [StoredArrays(tmp_path / str(step)) for step in (1, 3)]
        assert any("scales" in name for name in stored[0].entries)
        for name in stored[0].entries:
            assert stored[0].read(name).tobytes() == stored[1].read(name).tobytes(), name
