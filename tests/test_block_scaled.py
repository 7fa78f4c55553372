"""mxfp8 and nvfp4: rounding against ml_dtypes, products against float64, meshes against one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from refusals import refused
from tiny import CONFIGS, Case, Trace, distance, largest, run

from jaxdist.core import matmul
from jaxdist.core.matmul import block_scaled
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.precision import PrecisionConfig
from jaxdist.core.step import TrainConfig
from jaxdist.hardware import GPUS, parse_gpus
from jaxdist.models import DecoderConfig
from jaxdist.plan.advice import advise
from jaxdist.plan.estimate.job import Job
from jaxdist.plan.estimate.memory import estimate_memory
from jaxdist.plan.estimate.time import estimate_time
from jaxdist.plan.estimate.traffic import flows_of
from jaxdist.plan.options import PlanConfig
from jaxdist.plan.planner import make_plan, narrow_problems

CONFIGS["deep"] = dataclasses.replace(
    CONFIGS["windowed"], num_heads=8, num_kv_heads=4, num_layers=4
)
FORMATS = ("mxfp8", "nvfp4")


def precision(matmul_dtype: str) -> PrecisionConfig:
    return PrecisionConfig(compute_dtype="float32", matmul_dtype=matmul_dtype)


def rounded(x: np.ndarray, kind: str, axis: int = -1) -> np.ndarray:
    x = np.moveaxis(x.astype(np.float64), axis, -1)
    size = {"mxfp8": 32, "nvfp4": 16}[kind]
    length = x.shape[-1]
    blocks = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -length % size)])
    blocks = blocks.reshape(*x.shape[:-1], -1, size)
    tops = np.abs(blocks).max(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        if kind == "mxfp8":
            scale, dtype = 2.0 ** np.ceil(np.log2(tops / 448)), ml_dtypes.float8_e4m3fn
        else:
            tensor_scale = 2.0 ** np.ceil(np.log2(tops.max() / 6 / 448))
            near = (tops / tensor_scale / 6).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
            scale, dtype = near.astype(np.float64) * tensor_scale, ml_dtypes.float4_e2m1fn
        top = float(ml_dtypes.finfo(dtype).max)
        values = np.clip((blocks / scale).astype(np.float32), -top, top).astype(dtype)
    kept = np.where(tops == 0, 0, values.astype(np.float64) * scale)
    return np.moveaxis(kept.reshape(*x.shape[:-1], -1)[..., :length], -1, axis)


def spread(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Return values over many powers of two, so that blocks of one array have different scales."""
    return (rng.normal(size=shape) * np.exp(2 * rng.normal(size=shape))).astype(np.float32)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_values_are_rounded_as_by_ml_dtypes(kind, dtype):
    x = spread(np.random.default_rng(0), 2, 3, 80).astype(dtype)
    x[0, 0, :32] = 0
    blocks = jax.jit(round_as, static_argnums=1)(x, kind)
    size = block_scaled.BLOCK[kind]
    assert blocks.scales.shape == (2, 3, -(-80 // size))
    wide = np.asarray(blocks.widen(jnp.dtype(dtype))).astype(np.float64)
    np.testing.assert_array_equal(wide[..., :80], rounded(x, kind))
    assert (wide[..., 80:] == 0).all()


def round_as(x: jax.Array, kind: str) -> block_scaled.Blocks:
    if kind == "mxfp8":
        return block_scaled.round_mxfp8(x)
    largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
    return block_scaled.round_nvfp4(x, block_scaled.scale_of_nvfp4(largest))


@pytest.mark.parametrize("kind", FORMATS)
def test_non_finite_values_stay_visible(kind):
    dot = matmul.make_dot(kind, (), "cpu")
    w = jnp.ones((40, 3))
    multiply = jax.jit(lambda x: dot("a b, b c -> a c", x, w))
    pull = jax.jit(lambda x, g: jax.vjp(multiply, x)[1](g)[0])
    one, other = np.ones((2, 40), np.float32), np.ones((2, 3), np.float32)
    assert (multiply(0 * one) == 0).all()
    for bad in (np.inf, np.nan):
        x, g = one.copy(), other.copy()
        x[0, 1] = g[1, 1] = bad
        assert jnp.isnan(multiply(x)[0]).all()
        assert jnp.isnan(pull(one, g)[1]).all()


@pytest.mark.parametrize("chooses", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_product_equals_that_of_rounded_values_forward_and_backward(kind, chooses):
    rng = np.random.default_rng(0)
    x, w, g = spread(rng, 3, 5, 40), spread(rng, 40, 2, 24), spread(rng, 3, 5, 2, 24)
    dims = "batch seq d, d ways mlp -> batch seq ways mlp"
    dot = matmul.make_dot(kind, (), "cpu", is_wide=jnp.array(False) if chooses else None)

    @jax.jit
    def product(x: jax.Array, w: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        out, pull = jax.vjp(lambda x, w: dot(dims, x, w), x, w)
        return out, *pull(g)

    out, dx, dw = product(x, w, g)
    x2, w2, g2 = x.reshape(15, 40), w.reshape(40, 48), g.reshape(15, 48)
    back = lambda array, axis: rounded(array, "mxfp8", axis)
    expected = [
        (out, rounded(x2, kind, 1) @ rounded(w2, kind, 0)),
        (dx, back(g2, 1) @ back(w2, 1).T),
        (dw, back(x2, 0).T @ back(g2, 0)),
    ]
    for actual, right in expected:
        # Sums of at most 48 float32 products of exact numbers.
        bound = 4e-6 * np.abs(right).max()
        np.testing.assert_allclose(np.asarray(actual).reshape(right.shape), right, 0, bound)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_wide_layer_multiplies_unrounded_inputs(kind):
    x, w = (jax.random.normal(jax.random.key(i), (4, 4)) for i in (0, 1))
    dot = matmul.make_dot(kind, (), "cpu", is_wide=jnp.array(True))
    product = jax.value_and_grad(lambda x, w: dot("a b, b c -> a c", x, w).sum(), (0, 1))
    value, (_, dw) = product(x, w)
    np.testing.assert_array_equal(value, (x @ w).sum())
    np.testing.assert_allclose(dw, x.T @ jnp.ones((4, 4)), rtol=1e-6)


# Float32 sums in another order sometimes round a value to the neighboring narrow number. In 4 bits
# neighbors differ by a third of the value, so that one such value is visible.
TOLERANCES = {"mxfp8": (1e-4, 1e-2), "nvfp4": (2e-4, 5e-2)}


@functools.cache
def one_device(kind: str) -> Trace:
    return run(Case("deep", "1"), steps=2, precision=precision(kind))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, case",
    [
        pytest.param("mxfp8", Case("deep", "pp=2", microbatches=4), marks=pytest.mark.product),
        ("nvfp4", Case("deep", "fsdp=2,tp=2", microbatches=2, remat="dots")),
    ],
    ids=str,
)
def test_every_mesh_rounds_as_one_device_does(kind, case):
    losses, gradients = TOLERANCES[kind]
    alone, trace = one_device(kind), run(case, steps=2, precision=precision(kind))
    np.testing.assert_allclose(trace.losses, alone.losses, rtol=losses)
    assert distance(trace.grads, alone.grads) <= gradients * largest(alone.grads)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(
    ("layers", "platform", "capability", "refusals"),
    [(3, "cpu", "", 0), (3, "gpu", "10.0", 0), (3, "gpu", "12.0", 0), (2, "gpu", "9.0", 2)],
)
def test_block_scaling_is_refused_without_suitable_layer_or_hardware(
    kind, layers, platform, capability, refusals
):
    assert len(matmul.problems(kind, layers, platform, capability)) == refusals
    assert dataclasses.replace(precision(kind), compute_dtype="float16").problems()


@pytest.mark.parametrize("kind", FORMATS)
def test_a_plan_is_refused_for_gpus_without_block_scaling(kind):
    config = PlanConfig(precision=PrecisionConfig(matmul_dtype=kind))
    with refused(f"precision.matmul_dtype={kind}", "capability 9.0"):
        make_plan(config, parse_gpus("h100:8")[0], "")
    with refused("precision.matmul_dtype=fp8", "capability 8.0"):
        wide = PlanConfig(precision=PrecisionConfig(matmul_dtype="fp8"))
        make_plan(wide, parse_gpus("a100:8")[0], "")


def test_the_plan_counts_narrow_products_in_middle_layers_only():
    cluster = parse_gpus("b200:8")[0]
    jobs = {}
    for kind in ("auto", "fp8", *FORMATS):
        config = PlanConfig(
            model=DecoderConfig(d_model=4096, num_layers=10, num_heads=32, mlp_dim=14336),
            train=TrainConfig(global_batch_size=8, seq_len=4096, remat="none"),
            precision=PrecisionConfig(matmul_dtype=kind),
        )
        jobs[kind] = Job.of(config.run, MeshSpec(fsdp=8), cluster)
    seconds = {kind: estimate_time(job).parts["products"] for kind, job in jobs.items()}
    assert seconds["auto"] > seconds["fp8"] == seconds["mxfp8"] > seconds["nvfp4"]
    for kind in FORMATS:  # weights are gathered, and activations kept, without rounding
        assert flows_of(jobs[kind]) == flows_of(jobs["auto"])
        kept = lambda job: estimate_memory(job).phases["loss"]["kept activations"]
        assert kept(jobs[kind]) == kept(jobs["auto"])


@pytest.mark.parametrize("gpus, num_remarks", [("b200:8", 1), ("a100:8", 0)])
def test_the_plan_reports_when_fewer_bits_are_faster(gpus, num_remarks):
    config = PlanConfig(
        model=DecoderConfig(d_model=4096, num_layers=8, num_heads=32, mlp_dim=14336),
        train=TrainConfig(global_batch_size=64, seq_len=4096),
        compile=False,
    )
    plan = make_plan(config, parse_gpus(gpus)[0], "fsdp=8")
    topics = [item.topic for item in advise(plan, config, GPUS)]
    assert topics.count("number format") == num_remarks


def test_a_user_defined_gpu_without_the_rate_is_refused():
    gpu = GPUS["b200"]
    peaks = {name: peak for name, peak in gpu.peak_flops.items() if name != "float4"}
    own = dataclasses.replace(gpu, name="own", peak_flops=peaks)
    assert not narrow_problems("mxfp8", 3, own)
    assert len(narrow_problems("nvfp4", 3, own)) == 1
