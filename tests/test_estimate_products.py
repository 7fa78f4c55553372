"""Rates of products compared with kernel measurements, and the products and traffic of Muon."""

import dataclasses
import itertools

import jax
import pytest
from published_engine import PUBLISHED, published_engine
from test_estimate import LLAMA, job
from test_estimate_traffic import moved
from test_traffic import traffic
from tiny import Case, initial_state, layout_of, make_update, model_of

from jaxdist.core.precision import PrecisionConfig
from jaxdist.hardware import GPUS, Cluster, read_hardware
from jaxdist.optim import OptimConfig, make_optimizer
from jaxdist.plan.estimate import products
from jaxdist.plan.estimate.job import with_section
from jaxdist.plan.estimate.products import orthogonalization_flops
from jaxdist.plan.estimate.software import OURS, attention_share
from jaxdist.plan.estimate.time import estimate_time

MEASURED = {
    "a100-80": 267.9, "h100": 806.0, "h100-pcie": 499.5, "l4": 91.4, "a10g": 69.7,
    "rtx-3090": 78.0, "rtx-4090": 178.8,
}  # fmt: skip
"""TFLOP/s of the best product on each GPU (github.com/mag-/gpu_benchmark)."""


def achieved_tflops(gpu, dtype: str = "bfloat16", shape=(16384, 16384, 8192)) -> float:
    """Return TFLOP/s of one such product, if tiles reach the full rate of a multiprocessor."""
    peak = gpu.peak_flops[dtype]
    busy = products.busy_share(shape, gpu.num_sms, products.half_inner(gpu))
    return 1e-12 * peak * busy * products.clock(gpu, peak, dtype, busy)


@pytest.mark.parametrize(("name", "tflops"), MEASURED.items())
def test_best_gemm_rates_match_measurements(name, tflops):
    assert achieved_tflops(GPUS[name]) == pytest.approx(tflops, rel=0.12)


def test_only_geforce_cards_exceed_their_boost_clock():
    clocks = {
        name: products.clock(gpu, gpu.peak_flops["float16"], "float16", 0.5)
        for name, gpu in GPUS.items()
    }
    assert {name for name, share in clocks.items() if share > 1} == {"rtx-3090", "rtx-4090"}


def test_clock_follows_the_cube_root_of_the_power_limit():
    h100 = GPUS["h100"]
    peak = h100.peak_flops["bfloat16"]
    clocks = [
        products.clock(dataclasses.replace(h100, power_w=w), peak, "bfloat16", 0.9)
        for w in (350, 500, 700, 5000)
    ]
    assert clocks[1] / clocks[2] == pytest.approx((500 / 700) ** (1 / 3))
    assert clocks == sorted(clocks) and clocks[-1] == 1.0


def test_idle_matrix_units_leave_power_for_a_higher_clock():
    gpu = GPUS["h100"]
    clocks = [products.clock(gpu, gpu.peak_flops["bfloat16"], "bfloat16", b) for b in (0.4, 0.8)]
    assert clocks[0] > clocks[1]


def test_partial_wave_takes_as_long_as_a_full_one():
    """128 × 256 tiles: 132 tiles fill the multiprocessors once, 133 need two waves."""
    full, more = (products.busy_share((128 * n, 256, 4096), 132, 250) for n in (132, 134))
    assert more < 0.75 * full


def test_small_inner_dimensions_and_small_results_are_slow():
    by_inner = [products.busy_share((16384, 8192, k), 132, 250) for k in (64, 256, 1024, 8192)]
    assert by_inner == sorted(by_inner) and by_inner[0] < 0.3 < 0.9 < by_inner[-1]
    assert products.busy_share((256, 256, 8192), 132, 250) < 0.25


def test_results_are_written_at_memory_bandwidth():
    """A short inner dimension costs less if memory is fast relative to the matrix units."""
    h100, h200, a100 = (products.half_inner(GPUS[name]) for name in ("h100", "h200", "a100-80"))
    assert h100 / h200 == pytest.approx(4.8 / 3.35, rel=0.01)
    assert 0.5 < a100 / h100 < 0.55  # 312 and 989 TFLOP/s, 2.04 and 3.35 TB/s
    shape = (16384, 3072, 768)
    assert products.busy_share(shape, 108, a100) > 1.08 * products.busy_share(shape, 108, h100)


def test_gpus_wait_for_the_slowest_one():
    one, two = (
        dataclasses.replace(job(mesh, train={"global_batch_size": rows}), engine=published_engine())
        for mesh, rows in (("dp=1", 4), ("dp=2", 8))
    )
    alone, shared = (estimate_time(each).parts for each in (one, two))
    computed = sum(alone[kind] for kind in ("products", "attention", "memory-bound kernels"))
    waited = shared["launch gaps"] - alone["launch gaps"]
    assert waited == pytest.approx(PUBLISHED.idle * computed)


def test_large_layers_run_at_600_to_750_tflops_on_an_h100():
    """Rate of dense 16-bit products at 700 W; published software is slower than ours."""
    wide = dataclasses.replace(LLAMA, d_model=4096, num_heads=32, mlp_dim=14336)
    ours = job(model=wide, train={"global_batch_size": 16})
    other = dataclasses.replace(ours, engine=published_engine())
    assert [each.engine.software for each in (ours, other)] == [OURS, PUBLISHED]
    fast, slow = (1e-12 * products.rate(one, 989.4e12, "bfloat16") for one in (ours, other))
    assert 600 < slow < fast < 750


def test_attention_is_slow_on_short_rows_and_narrow_heads():
    for software, capability in itertools.product((OURS, PUBLISHED), ("8.0", "9.0")):
        share = [attention_share(software, capability, n, 128) for n in (256, 1024, 8192)]
        assert share == sorted(share) and share[0] < 0.6 * software.attention[capability]
        assert attention_share(software, capability, 1024, 64) < share[1]


@pytest.mark.parametrize(("gpu", "keys"), [("a100-80", 4096), ("h100", 16384)])
def test_attention_time_depends_on_the_attention_kernel(gpu, keys):
    one = job(gpus=f"{gpu}:1", train={"global_batch_size": 1, "seq_len": keys})
    slow, typical, fast = (
        estimate_time(dataclasses.replace(one, engine=published_engine("", kernel)))
        for kernel in ("flash1", "", "flash2")
    )
    times = [each.parts["attention"] for each in (slow, typical, fast)]
    assert times == sorted(times, reverse=True)
    assert times[0] / times[2] == pytest.approx(1.4, abs=0.02)  # 0.50 and 0.36 of the peak
    assert slow.parts["products"] == fast.parts["products"]


def test_gpu_with_another_peak_does_not_inherit_the_power_limit(tmp_path):
    file = tmp_path / "own.toml"
    file.write_text(
        '[fast]\nlike = "l4"\npeak_tflops = { bfloat16 = 165, float32 = 82 }\n'
        '[cool]\nlike = "h100"\npower_w = 500\n'
        '[eager]\nlike = "rtx-4090"\nmax_clock = 1.05\n'
        '[other]\nlike = "rtx-4090"\npeak_tflops = { bfloat16 = 165, float32 = 82 }\n'
    )
    own = read_hardware(file)
    assert own["fast"].power_w == 0 and own["cool"].power_w == 500
    assert own["eager"].max_clock == 1.05 and own["other"].max_clock == 1
    cool, usual = (
        estimate_time(dataclasses.replace(job("fsdp=8"), cluster=Cluster.of(gpu, 8)))
        for gpu in (own["cool"], GPUS["h100"])
    )
    assert 1.05 < cool.parts["products"] / usual.parts["products"] < 1.15


def test_t4_has_an_mfu():
    for dtype in ("float16", "bfloat16"):
        one = job(gpus="t4:1", precision=dict(compute_dtype=dtype))
        assert one.config.precision == PrecisionConfig(compute_dtype=dtype)
        assert 0.05 < estimate_time(one).mfu < 0.7


def test_muon_matrices_are_divided_over_shards_and_multiplied_in_float32():
    """16 layers: 8 devices divide the matrices of each stack evenly; replicas repeat them."""
    muon = {"optim": {"optimizer": "muon"}}
    alone, divided = job("dp=8", **muon), job("fsdp=8", **muon)
    work = orthogonalization_flops(alone)
    assert orthogonalization_flops(divided) == work / 8
    wide, narrow = (
        estimate_time(dataclasses.replace(alone, config=with_section(
            alone.config, "precision", compute_dtype=dtype))).parts["optimizer"]
        for dtype in ("float32", "bfloat16")
    )  # fmt: skip
    assert wide == narrow > work / alone.cluster.gpu.peak_flops["float32"]
    assert orthogonalization_flops(job("fsdp=8")) == 0


def test_muon_exchanges_its_matrices_and_no_device_gets_all():
    """The compiled update; two layers, so that most of what eight devices send is padding."""
    case, config = Case("rotary", "fsdp=8"), OptimConfig(optimizer="muon")
    layout, axes = layout_of(case), model_of("rotary").axes
    placed = layout.shardings(layout.moment_specs(axes))
    rule = make_optimizer(config, axes, placed)
    params = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        initial_state("rotary").params,
        placed,
    )
    state = jax.eval_shape(rule.init, params)
    text = make_update(rule).lower(params, state, params).compile().as_text()
    read = traffic(text, layout.mesh.shape)
    estimated = moved(case, optim=config)
    key = ("all-to-all", "fsdp")
    assert {key: amount for key, (_, amount) in read.items()} == {key: estimated[key]}
