"""Estimates rank remat policies like compiled programs, and auto chooses the best."""

import contextlib
import dataclasses

import numpy as np
import pytest
from test_estimate import job
from test_estimate_budget import gpus, run, stats

from jaxdist.core.mesh import MeshSpec
from jaxdist.models import CnnConfig, DecoderConfig
from jaxdist.plan.estimate.memory_check import Budget
from jaxdist.plan.estimate.model_costs import costs_of
from jaxdist.plan.estimate.remat import POLICIES, RematChoice, policies_of
from jaxdist.plan.estimate.time import estimate_time, layer_backward
from jaxdist.settings import ConfigError

LLAMA = dict(vocab_size=128256)
GPT2 = DecoderConfig(
    vocab_size=50304, d_model=768, num_layers=12, num_heads=12, mlp_dim=3072,
    positions="learned", norm="layer", activation="gelu", tie_embeddings=True,
    bias=["qkv", "out", "mlp"],
)  # fmt: skip
SMALL = DecoderConfig(**LLAMA, d_model=2048, num_layers=24, num_heads=16, mlp_dim=5632)
LARGE = DecoderConfig(
    **LLAMA, d_model=4096, num_layers=32, num_heads=32, num_kv_heads=8, mlp_dim=14336
)
ROWS = [
    (GPT2, "dp=8", "h100:8", dict(seq_len=1024, global_batch_size=512, num_microbatches=4),
     {"none": 143.5, "dots": 156.0}),
    (SMALL, "dp=1", "h200:1", dict(seq_len=4096, global_batch_size=4),
     {"none": 304.5, "dots": 316.8, "full": 374.5}),
    (LARGE, "fsdp=8", "h100:8", dict(seq_len=8192, global_batch_size=8),
     {"dots": 772.7, "none": 820.2, "full": 900.1}),
]  # fmt: skip
"""Model, mesh, GPUs, train settings, and policy -> ms of the compiled step, fastest first,
by the roofline of `scripts/bench/gpu_program.py`. Layers that move nothing are unrolled, the others
run in a loop, in which what is kept is copied into stacks and back."""


@pytest.mark.parametrize(("model", "mesh", "cluster", "train", "compiled"), ROWS)
def test_remat_policies_rank_like_compiled_programs(model, mesh, cluster, train, compiled):
    """Saving everything is the fastest only if it needs no stacks."""
    seconds = [
        estimate_time(
            job(mesh, gpus=cluster, model=model, train={**train, "remat": policy})
        ).seconds
        for policy in compiled
    ]
    assert seconds == sorted(seconds) and len(set(seconds)) == len(seconds)


@pytest.mark.parametrize(
    ("limit_gib", "policy"),
    [
        *[(140, "dots"), (38, "dots"), (37, "names:qkv,attention,attention_out")],
        *[(30, "names:attention,attention_out"), (28, "names:attention"), (27, "full")],
        (8, "full"),
    ],
)
def test_auto_chooses_the_fastest_policy_that_fits(limit_gib, policy):
    """8B on 8 GPUs; less memory saves less; if nothing fits, the smallest policy is chosen."""
    config = run(remat="auto", num_microbatches=8)
    budget = Budget.of(config, MeshSpec(fsdp=8), gpus(8, limit_gib), None)
    choice = budget.remat
    assert budget.job.config.train.remat == choice.job.remat == policy
    assert budget.memory.total_bytes == choice.bytes[policy]
    assert min(choice.seconds, key=choice.seconds.get) == "dots"
    assert choice.fits(policy) == (limit_gib > 8)


def test_hosts_with_almost_equal_memory_choose_the_same_policy():
    config = run(remat="auto", num_microbatches=8)
    needed = Budget.of(config, MeshSpec(fsdp=8), gpus(8, 140), None).remat.bytes["dots"] / 2**30
    bound = np.ceil(needed * 1.05)
    chosen = [
        Budget.of(config, MeshSpec(fsdp=8), gpus(8, limit), None).job.remat
        for limit in (bound - 0.01, bound, bound + 0.01, bound + 0.99)
    ]
    assert chosen[0] != "dots" and chosen[1:] == ["dots", "dots", "dots"]


def test_unrolled_layers_copy_no_activations_into_stacks():
    """One GPU unrolls up to 32 layers; a loop of 33 saves more, and copies it."""
    flat, loop = (
        job("dp=1", model=dataclasses.replace(SMALL, num_layers=n), train={"remat": "none"})
        for n in (32, 33)
    )
    assert flat.unrolls and not loop.unrolls
    assert not job("fsdp=8", model=SMALL).unrolls and not job("pp=2", model=SMALL).unrolls
    assert costs_of(flat).kept_per_layer() < 0.5 * costs_of(loop).kept_per_layer()
    per_layer = [layer_backward(one).memory_bytes for one in (flat, loop)]
    assert per_layer[1] - per_layer[0] == pytest.approx(3 * costs_of(loop).kept_per_layer())


def test_zero_2_keeps_layers_in_a_loop():
    """Unrolled, it would need more memory than ZeRO-1."""
    unrolls = [job("dp=2", zero=zero, model=SMALL).unrolls for zero in (0, 1, 2)]
    assert unrolls == [True, True, False]


def test_policies_are_limited_to_names_of_the_model():
    model = CnnConfig()
    assert policies_of(job(model=model)) == ["none", "dots", "full"]
    kept = [policy for policy in POLICIES if not policy.startswith("offload")]
    assert [policy for policy in policies_of(job()) if policy in kept] == kept


@pytest.mark.parametrize("name", ["attention", "attention_out"])
def test_saved_activations_of_a_split_layer_are_a_device_share(name):
    """With sequence parallelism the summed output is saved too: it is named after the sum."""
    one, four = (job(mesh, train={"remat": f"names:{name}"}) for mesh in ("dp=1", "tp=4"))
    assert costs_of(four).kept_per_layer() == costs_of(one).kept_per_layer() / 4


def fitted(budget, needs, agree=lambda _, own, decision: decision([own])):
    """Choose from policies whose steps are compiled, each of which needs so many bytes."""
    tried = []

    def compile_with(budget):
        tried.append(budget.job.remat)
        assert budget.memory.total_bytes == budget.remat.bytes[budget.job.remat]
        return stats(needs(budget))

    with contextlib.suppress(ConfigError):
        budget.fit(compile_with, agree)
        tried.append("fits")
    return tried


def test_step_that_does_not_fit_is_recompiled_with_fewer_saved_activations():
    budget = Budget.of(run(remat="auto"), MeshSpec(fsdp=8), gpus(8, 72), None)
    choice, estimate = budget.remat, lambda budget: budget.memory.total_bytes
    first = choice.job.remat
    assert fitted(budget, estimate) == [first, "fits"]
    # The estimate is too low by a fixed share: the next policy is the one that fits when corrected.
    scale = budget.limit_bytes / estimate(budget) * 1.01
    _, second, end = fitted(budget, lambda budget: scale * estimate(budget))
    assert end == "fits" and choice.bytes[second] < choice.bytes[first]
    rest = [p for p in choice.bytes if choice.bytes[p] * scale <= budget.limit_bytes]
    assert second == min(rest, key=choice.seconds.get)
    # Far off: the smallest policy is next, and then none is left.
    smallest = min(choice.bytes, key=choice.bytes.get)
    assert fitted(budget, lambda _: 1000 * budget.limit_bytes) == [first, smallest]


def test_at_most_three_steps_are_compiled():
    budget = Budget.of(run(remat="auto"), MeshSpec(fsdp=8), gpus(8, 140), None)
    names = iter(sorted(budget.remat.bytes, key=budget.remat.bytes.get, reverse=True)[1:])
    chosen = lambda self, *_: dataclasses.replace(
        self, job=self.job.changed("train", remat=next(names))
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RematChoice, "smaller", chosen)
        assert len(fitted(budget, lambda _: 2 * budget.limit_bytes)) == 3


def test_processes_agree_on_the_policy():
    """The step fits on this process, but not on another."""
    budget = Budget.of(run(remat="auto"), MeshSpec(fsdp=8), gpus(8, 72), None)
    estimate = lambda budget: budget.memory.total_bytes
    agree = lambda topic, own, decision: decision([own, [own[0], own[1] / 2]])
    expected = fitted(dataclasses.replace(budget, limit_bytes=budget.limit_bytes / 2), estimate)
    assert fitted(budget, estimate, agree) == expected != fitted(budget, estimate)
