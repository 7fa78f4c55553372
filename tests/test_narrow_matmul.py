"""Products in 8 and 4 bits: rounding against ml_dtypes, products against float64, meshes."""

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
from jaxdist.core import matmul
from jaxdist.core.matmul import block_scaled, fp8
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
from jaxdist.run.setup import assemble

CONFIGS["deep"] = dataclasses.replace(
    CONFIGS["windowed"], num_heads=8, num_kv_heads=4, num_layers=4
)
KINDS = ("fp8", "mxfp8", "nvfp4")
FORMATS = {fp8.E4M3: (ml_dtypes.float8_e4m3fn, 448.0), fp8.E5M2: (ml_dtypes.float8_e5m2, 57344.0)}


def precision(matmul_dtype: str) -> PrecisionConfig:
    return PrecisionConfig(compute_dtype="float32", matmul_dtype=matmul_dtype)


def rounded(x: np.ndarray, dtype=fp8.E4M3) -> np.ndarray:
    kind, top = FORMATS[dtype]
    scale = 2.0 ** np.ceil(np.log2(np.max(np.abs(x)).astype(np.float64) / top))
    return (x.astype(np.float64) / scale).astype(np.float32).astype(kind).astype(np.float64) * scale


def rounded_in_blocks(x: np.ndarray, kind: str, axis: int = -1) -> np.ndarray:
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


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["float32", "bfloat16"])
def test_blocks_are_rounded_as_by_ml_dtypes(kind, dtype):
    x = spread(np.random.default_rng(0), 2, 3, 80).astype(dtype)
    x[0, 0, :32] = 0
    blocks = jax.jit(round_as, static_argnums=1)(x, kind)
    size = block_scaled.BLOCK[kind]
    assert blocks.scales.shape == (2, 3, -(-80 // size))
    wide = np.asarray(blocks.widen(jnp.dtype(dtype))).astype(np.float64)
    np.testing.assert_array_equal(wide[..., :80], rounded_in_blocks(x, kind))
    assert (wide[..., 80:] == 0).all()


def round_as(x: jax.Array, kind: str) -> block_scaled.Blocks:
    if kind == "mxfp8":
        return block_scaled.round_mxfp8(x)
    largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
    return block_scaled.round_nvfp4(x, block_scaled.scale_of_nvfp4(largest))


@pytest.mark.parametrize("kind", KINDS)
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


def test_the_compiler_keeps_the_rounding_of_bfloat16():
    x = jax.random.normal(jax.random.key(0), (8, 16), jnp.bfloat16)
    multiply = lambda x: fp8.make_dot((), "cpu")("a b, b c -> a c", x, jnp.eye(16, dtype=x.dtype))
    np.testing.assert_array_equal(jax.jit(multiply)(x), rounded(np.asarray(x)).astype(x.dtype))


@pytest.mark.parametrize("chooses", [False, True])
@pytest.mark.parametrize("kind", KINDS)
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
    forward = lambda array, axis: rounded_in_blocks(array, kind, axis)
    back = lambda array, axis: rounded_in_blocks(array, "mxfp8", axis)
    if kind == "fp8":
        forward = lambda array, _: rounded(array)
        back = lambda array, _: rounded(array, fp8.E5M2 if array is g2 else fp8.E4M3)
    expected = [
        (out, forward(x2, 1) @ forward(w2, 0)),
        (dx, back(g2, 1) @ back(w2, 1).T),
        (dw, back(x2, 0).T @ back(g2, 0)),
    ]
    for actual, right in expected:
        # Sums of at most 48 float32 products of exact numbers.
        bound = 4e-6 * np.abs(right).max()
        np.testing.assert_allclose(np.asarray(actual).reshape(right.shape), right, 0, bound)


@pytest.mark.parametrize("kind", KINDS)
def test_a_wide_layer_multiplies_unrounded_inputs(kind):
    x, w = (jax.random.normal(jax.random.key(i), (4, 4)) for i in (0, 1))
    dot = matmul.make_dot(kind, (), "cpu", is_wide=jnp.array(True))
    product = jax.value_and_grad(lambda x, w: dot("a b, b c -> a c", x, w).sum(), (0, 1))
    value, (_, dw) = product(x, w)
    np.testing.assert_array_equal(value, (x @ w).sum())
    np.testing.assert_allclose(dw, x.T @ jnp.ones((4, 4)), rtol=1e-6)


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


# Float32 sums in another order sometimes round a value to the neighboring narrow number. In 8 bits
# one value in 1e5 then differs by 1/8 or 1/4 of itself; in 4 bits neighbors differ by a third.
TOLERANCES = {"fp8": (1e-4, 1e-2), "mxfp8": (1e-4, 1e-2), "nvfp4": (2e-4, 5e-2)}


@functools.cache
def one_device(kind: str) -> Trace:
    return run(Case("deep", "1"), steps=2, precision=precision(kind))


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, case",
    [
        ("fp8", Case("deep", "fsdp=2,tp=2")),
        ("nvfp4", Case("deep", "fsdp=2,tp=2", microbatches=2, remat="dots")),
        *(
            pytest.param(kind, Case("deep", "pp=2", microbatches=4), marks=pytest.mark.product)
            for kind in KINDS[:2]
        ),
    ],
    ids=str,
)
def test_every_mesh_rounds_as_one_device_does(kind, case):
    losses, gradients = TOLERANCES[kind]
    alone, trace = one_device(kind), run(case, steps=2, precision=precision(kind))
    np.testing.assert_allclose(trace.losses, alone.losses, rtol=losses)
    assert distance(trace.grads, alone.grads) <= gradients * largest(alone.grads)


@pytest.mark.parametrize(
    ("kind", "layers", "platform", "capability", "refusals"),
    [
        *((kind, 3, "cpu", "", 0) for kind in KINDS),
        *((kind, 3, "gpu", "10.0", 0) for kind in KINDS),
        *((kind, 3, "gpu", "12.0", 0) for kind in KINDS[1:]),
        *((kind, 2, "gpu", "9.0", 2) for kind in KINDS[1:]),
        ("fp8", 3, "gpu", "8.9", 0),
        ("fp8", 3, "gpu", "8.0", 1),
        ("fp8", 2, "gpu", "7.5", 2),
        ("fp8", 0, "cpu", "", 1),
    ],
)
def test_a_format_is_refused_without_suitable_layer_or_hardware(
    kind, layers, platform, capability, refusals
):
    assert len(matmul.problems(kind, layers, platform, capability)) == refusals
    assert dataclasses.replace(precision(kind), compute_dtype="float16").problems()
    assert not precision(kind).problems()


def test_a_run_is_refused_before_anything_is_compiled():
    model = DecoderConfig(d_model=16, num_layers=2, num_heads=2, mlp_dim=32)
    config = RunConfig(model=model, precision=precision("fp8"))
    with refused("precision.matmul_dtype=fp8", "2 stacked layers"):
        assemble(config, jax.devices()[:1])


@pytest.mark.parametrize(
    "kind, gpus, capability",
    [("fp8", "a100:8", "8.0"), ("mxfp8", "h100:8", "9.0"), ("nvfp4", "h100:8", "9.0")],
)
def test_a_plan_is_refused_for_gpus_without_the_format(kind, gpus, capability):
    config = PlanConfig(precision=PrecisionConfig(matmul_dtype=kind))
    with refused(f"precision.matmul_dtype={kind}", f"capability {capability}"):
        make_plan(config, parse_gpus(gpus)[0], "")


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


def test_the_plan_counts_narrow_products_in_middle_layers_only():
    cluster = parse_gpus("b200:8")[0]
    jobs = {}
    for kind in ("auto", *KINDS):
        config = PlanConfig(
            model=DecoderConfig(d_model=4096, num_layers=10, num_heads=32, mlp_dim=14336),
            train=TrainConfig(global_batch_size=8, seq_len=4096, remat="none"),
            precision=PrecisionConfig(matmul_dtype=kind),
        )
        jobs[kind] = Job.of(config.run, MeshSpec(fsdp=8), cluster)
    seconds = {kind: estimate_time(job).parts["products"] for kind, job in jobs.items()}
    assert seconds["auto"] > seconds["fp8"] == seconds["mxfp8"] > seconds["nvfp4"]
    for kind in KINDS[1:]:  # weights are gathered, and activations kept, without rounding
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
