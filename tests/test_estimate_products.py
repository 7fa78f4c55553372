"""Rates of products compared with kernel measurements, and the products and traffic of Muon."""

import dataclasses

import jax
import pytest
from test_estimate import job
from test_estimate_traffic import moved
from test_traffic import traffic
from tiny import Case, initial_state, layout_of, make_update, model_of

from jaxdist.core.precision import PrecisionConfig
from jaxdist.hardware import GPUS, Cluster, read_hardware
from jaxdist.optim import OptimConfig, make_optimizer
from jaxdist.plan.estimate import products
from jaxdist.plan.estimate.job import with_section
from jaxdist.plan.estimate.products import orthogonalization_flops
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


def test_results_are_written_at_memory_bandwidth():
    """A short inner dimension costs less if memory is fast relative to the matrix units."""
    h100, h200, a100 = (products.half_inner(GPUS[name]) for name in ("h100", "h200", "a100-80"))
    assert h100 / h200 == pytest.approx(4.8 / 3.35, rel=0.01)
    assert 0.5 < a100 / h100 < 0.55  # 312 and 989 TFLOP/s, 2.04 and 3.35 TB/s


def test_only_geforce_cards_exceed_their_boost_clock():
    clocks = {
        name: products.clock(gpu, gpu.peak_flops["float16"], "float16", 0.5)
        for name, gpu in GPUS.items()
    }
    assert {name for name, share in clocks.items() if share > 1} == {"rtx-3090", "rtx-4090"}


def test_partial_wave_takes_as_long_as_a_full_one():
    """128 × 256 tiles: 132 tiles fill the multiprocessors once, 133 need two waves."""
    full, more = (products.busy_share((128 * n, 256, 4096), 132, 250) for n in (132, 134))
    assert more < 0.75 * full


def test_small_inner_dimensions_and_small_results_are_slow():
    by_inner = [products.busy_share((16384, 8192, k), 132, 250) for k in (64, 256, 1024, 8192)]
    assert by_inner == sorted(by_inner) and by_inner[0] < 0.3 < 0.9 < by_inner[-1]
    assert products.busy_share((256, 256, 8192), 132, 250) < 0.25


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
