"""Muon by the estimate: each device's share of the matrices, their products and their traffic."""

import dataclasses

import jax
from test_estimate import job
from test_estimate_traffic import moved
from test_traffic import traffic
from tiny import Case, initial_state, layout_of, make_update, model_of

from jaxdist.optim import OptimConfig, make_optimizer
from jaxdist.plan.estimate.job import with_section
from jaxdist.plan.estimate.time import estimate_time, orthogonalization_flops


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
