"""Products in 8 bits: rounding against ml_dtypes, products against float64, meshes against one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from refusals import refused
from tiny import CONFIGS, Case, Trace, distance, largest, run

from jaxdist.config import RunConfig
from jaxdist.core.matmul import fp8, problems
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.precision import PrecisionConfig
from jaxdist.core.step import TrainConfig
from jaxdist.hardware import parse_gpus
from jaxdist.models import DecoderConfig
from jaxdist.plan.estimate.job import Job
from jaxdist.plan.estimate.memory import estimate_memory
from jaxdist.plan.estimate.time import estimate_time
from jaxdist.plan.estimate.traffic import flows_of
from jaxdist.plan.options import PlanConfig
from jaxdist.plan.planner import make_plan
from jaxdist.run.setup import assemble

CONFIGS["deep"] = dataclasses.replace(
    CONFIGS["windowed"], num_heads=8, num_kv_heads=4, num_layers=4
)
FP8 = PrecisionConfig(compute_dtype="float32", matmul_dtype="fp8")
FORMATS = {fp8.E4M3: (ml_dtypes.float8_e4m3fn, 448.0), fp8.E5M2: (ml_dtypes.float8_e5m2, 57344.0)}


def rounded(x: np.ndarray, dtype=fp8.E4M3) -> np.ndarray:
    kind, top = FORMATS[dtype]
    scale = 2.0 ** np.ceil(np.log2(np.max(np.abs(x)).astype(np.float64) / top))
    return (x.astype(np.float64) / scale).astype(np.float32).astype(kind).astype(np.float64) * scale


@pytest.mark.parametrize("dtype", FORMATS, ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_values_are_rounded_as_by_ml_dtypes(dtype, kind):
    reference, _ = FORMATS[dtype]
    grid = np.arange(256, dtype=np.uint8).view(reference).astype(np.float32)
    grid = np.unique(grid[np.isfinite(grid)])  # subnormals and both ends among them
    middle = (grid[1:] + grid[:-1]) / 2
    beside = [np.nextafter(middle, np.float32(side)) for side in (-np.inf, np.inf)]
    x = np.concatenate([grid, middle, *beside]).astype(kind)
    for scale in (1.0, 2.0**-9, 2.0**20):
        near = jax.jit(fp8.narrow, static_argnums=2)(x * kind(scale), jnp.float32(scale), dtype)
        np.testing.assert_array_equal(np.asarray(near), x.astype(reference))
        wide = fp8.widen(near, jnp.float32(scale), jnp.dtype(kind))
        np.testing.assert_array_equal(wide, x.astype(reference).astype(kind) * kind(scale))


@pytest.mark.parametrize("dtype", FORMATS, ids=["e4m3", "e5m2"])
def test_the_largest_value_fits_and_uses_the_last_bit_of_the_range(dtype):
    top = np.float32(FORMATS[dtype][1])
    tops = top * np.float32(2.0) ** np.arange(-60, 60, 7, dtype=np.float32)
    values = np.concatenate([tops, np.nextafter(tops, np.float32(np.inf)), np.float32([1, 3e-7])])
    scales = np.asarray(fp8.scale_of(jnp.asarray(values), dtype))
    assert (np.frexp(scales)[0] == 0.5).all()  # powers of two
    assert ((values / scales <= top) & (values / scales > top / 2)).all()
    assert (scales[: len(tops)] == tops / top).all()


def test_zeros_have_a_scale_and_non_finite_values_stay_visible():
    scales = fp8.scale_of(jnp.array([0.0, np.inf, np.nan], jnp.float32), fp8.E4M3)
    np.testing.assert_array_equal(scales, [1, np.nan, np.nan])
    dot = fp8.make_dot((), "cpu")
    w = jnp.ones((4, 3))
    assert (dot("a b, b c -> a c", jnp.zeros((2, 4)), w) == 0).all()
    for bad in (np.inf, np.nan):
        out = dot("a b, b c -> a c", jnp.ones((2, 4)).at[0, 1].set(bad), w)
        assert jnp.isnan(out).all()
        pull = jax.vjp(lambda x: dot("a b, b c -> a c", x, w), jnp.ones((2, 4)))[1]
        assert jnp.isnan(pull(jnp.ones((2, 3)).at[1, 1].set(bad))[0]).all()


def test_the_compiler_keeps_the_rounding_of_bfloat16():
    x = jax.random.normal(jax.random.key(0), (8, 16), jnp.bfloat16)
    multiply = lambda x: fp8.make_dot((), "cpu")("a b, b c -> a c", x, jnp.eye(16, dtype=x.dtype))
    np.testing.assert_array_equal(jax.jit(multiply)(x), rounded(np.asarray(x)).astype(x.dtype))


@pytest.mark.parametrize("chooses", [False, True])
def test_a_product_equals_that_of_rounded_values_forward_and_backward(chooses):
    rng = np.random.default_rng(0)
    # Values over many powers of two, so that some are subnormal in 8 bits.
    spread = lambda *shape: (rng.normal(size=shape) * np.exp(rng.normal(size=shape) * 3)).astype(
        "f"
    )
    x, w, g = map(jnp.asarray, (spread(3, 5, 8), spread(8, 2, 4), spread(3, 5, 2, 4)))
    dims = "batch seq d, d ways mlp -> batch seq ways mlp"
    dot = fp8.make_dot((), "cpu", is_wide=jnp.array(False) if chooses else None)
    out, pull = jax.vjp(lambda x, w: dot(dims, x, w), x, w)
    dx, dw = pull(g)
    x8, w8, g8 = rounded(np.asarray(x)), rounded(np.asarray(w)), rounded(np.asarray(g), fp8.E5M2)
    expected = [
        np.einsum("abc,cde->abde", x8, w8),
        np.einsum("abde,cde->abc", g8, w8),
        np.einsum("abc,abde->cde", x8, g8),
    ]
    for actual, right in zip((out, dx, dw), expected, strict=True):
        # Sums of at most 15 float32 products of exact numbers.
        np.testing.assert_allclose(actual, right, rtol=0, atol=2e-6 * np.abs(right).max())


def test_a_wide_layer_multiplies_unrounded_inputs():
    x, w = (jax.random.normal(jax.random.key(i), (4, 4)) for i in (0, 1))
    product = lambda dot: jax.value_and_grad(
        lambda x, w: dot("a b, b c -> a c", x, w).sum(), (0, 1)
    )
    wide = product(fp8.make_dot((), "cpu", is_wide=jnp.array(True)))(x, w)
    np.testing.assert_array_equal(wide[0], (x @ w).sum())
    np.testing.assert_allclose(wide[1][1], x.T @ jnp.ones((4, 4)), rtol=1e-6)


def test_a_weight_rounds_itself_and_a_plain_array_is_rounded_by_the_product():
    first, second, unknown = (jnp.full((4, 4), value) for value in (1.0, 3.0, 5.0))
    near = lambda w: fp8.RoundedWeight(w, (w.astype(fp8.E4M3), jnp.float32(2)))
    multiply = lambda w: fp8.make_dot((), "cpu")("a b, b c -> a c", jnp.eye(4), w)
    # The weight that was rounded before represents twice the values.
    for w, value in ((near(first), 2), (near(second), 6), (unknown, 5)):
        assert (multiply(w) == value).all()


def test_every_device_scales_by_the_largest_value_of_all():
    mesh = MeshSpec(fsdp=2, tensor=2).build(jax.devices()[:4])
    x = np.geomspace(1e-6, 1e3, 64, dtype=np.float32).reshape(4, 16)
    w = np.geomspace(1e3, 1e-6, 64, dtype=np.float32).reshape(1, 16, 4)
    spec, gathered = P("fsdp", "tensor"), P(None, "tensor", "fsdp")

    def both(x, w):
        own = fp8.round_weights(w, P("tensor", "fsdp"), True, jnp.float32)
        near = jax.tree.map(lambda leaf: leaf[0], own)
        float32 = jnp.dtype("float32")
        w = fp8.gather(w[0], near, P(None, "fsdp"), float32, reduce_dtype=float32)
        multiply = functools.partial(fp8.make_dot(("fsdp", "tensor"), "cpu"), "a b, b c -> a c")
        out, pull = jax.vjp(multiply, x, w.values)
        dx, dw = pull(x[:, :4])
        outs = jax.lax.psum((out, multiply(x, w)), "tensor")
        return *outs, dx, jax.lax.psum(dw, "fsdp"), own[1]

    out_specs = (P("fsdp"), P("fsdp"), spec, P("tensor"), P())
    split = jax.shard_map(both, mesh=mesh, in_specs=(spec, gathered), out_specs=out_specs)
    out, same, dx, dw, scale = jax.jit(split)(x, w)
    x8, w8 = rounded(x), rounded(w[0])
    assert scale == 4.0
    np.testing.assert_array_equal(out, same)
    np.testing.assert_allclose(out, x8 @ w8, rtol=1e-6)
    for half in (slice(0, 8), slice(8, 16)):  # of the contracted dim, one for each tensor device
        g8 = rounded(x[:, [*range(4), *range(8, 12)]], fp8.E5M2)[:, half.start // 2 :][:, :4]
        np.testing.assert_allclose(dx[:, half], g8 @ w8[half].T, rtol=1e-6)
        np.testing.assert_allclose(dw[half], x8[:, half].T @ g8, rtol=1e-6)


# Float32 sums in another order sometimes round a value to the neighboring 8-bit number: one value
# in 1e5 then differs by 1/8 or 1/4 of itself.
LOSSES, GRADIENTS = 1e-4, 1e-2


@pytest.fixture(scope="module")
def one_device() -> Trace:
    return run(Case("deep", "1"), steps=2, precision=FP8)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Case("deep", "fsdp=2,tp=2"), marks=pytest.mark.slow),
        pytest.param(Case("deep", "pp=2", microbatches=4), marks=pytest.mark.product),
    ],
    ids=str,
)
def test_every_mesh_rounds_as_one_device_does(case, one_device):
    trace = run(case, steps=2, precision=FP8)
    np.testing.assert_allclose(trace.losses, one_device.losses, rtol=LOSSES)
    assert distance(trace.grads, one_device.grads) <= GRADIENTS * largest(one_device.grads)


@pytest.mark.parametrize(
    ("layers", "platform", "capability", "refusals"),
    [
        (3, "cpu", "", 0),
        (3, "gpu", "8.9", 0),
        (3, "gpu", "10.0", 0),
        (3, "gpu", "8.0", 1),
        (2, "gpu", "7.5", 2),
        (0, "cpu", "", 1),
    ],
)
def test_fp8_is_refused_without_suitable_layer_or_hardware(layers, platform, capability, refusals):
    assert len(problems("fp8", layers, platform, capability)) == refusals


def test_a_run_is_refused_before_anything_is_compiled():
    model = DecoderConfig(d_model=16, num_layers=2, num_heads=2, mlp_dim=32)
    config = RunConfig(model=model, precision=FP8)
    with refused("precision.matmul_dtype=fp8", "2 stacked layers"):
        assemble(config, jax.devices()[:1])
    assert dataclasses.replace(FP8, compute_dtype="float16").problems()
    assert not FP8.problems()


def job(matmul_dtype: str, **train) -> Job:
    config = RunConfig(
        model=DecoderConfig(d_model=1024, num_layers=10, num_heads=16, mlp_dim=4096),
        train=TrainConfig(global_batch_size=8, seq_len=1024, **train),
        precision=PrecisionConfig(matmul_dtype=matmul_dtype),
    )
    return Job.of(config, MeshSpec(fsdp=8), parse_gpus("h100:8")[0])


def test_the_plan_counts_8_bits_in_middle_layers_only():
    plain, narrow = job("auto", remat="none"), job("fp8", remat="none")
    weights = 1024 * (4 * 1024 + 3 * 4096)
    # Eight of ten layers gather a byte an element, forward and backward.
    moved = [sum(f.bytes for f in flows_of(j) if f.kind == "all-gather") for j in (plain, narrow)]
    assert moved[0] - moved[1] == 2 * 8 * weights
    # Inputs of products: those after both norms and in the MLP; attention's output is not rounded.
    kept = [estimate_memory(j).phases["loss"]["kept activations"] for j in (plain, narrow)]
    assert kept[0] - kept[1] == 8 * 1024 * (2 * 1024 + 4096 - 1024)
    seconds = [estimate_time(j).parts["products"] for j in (plain, narrow)]
    assert 1 < seconds[0] / seconds[1] < 2


def test_a_plan_is_refused_for_gpus_without_fp8():
    config = PlanConfig(precision=PrecisionConfig(matmul_dtype="fp8"))
    with refused("capability 8.0"):
        make_plan(config, parse_gpus("a100:8")[0], "")
