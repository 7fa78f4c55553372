"""Jax's kernels for experts: values in jax's interpreter, their check, the choice, the compiler."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import FAMILIES

from jaxdist.config import read_run
from jaxdist.core import trials
from jaxdist.core.attention.kernel_check import TOLERANCE, KernelCheck
from jaxdist.core.matmul import grouped, hopper
from jaxdist.core.matmul.grouped_check import (
    GroupedShapes,
    errors_by_expert,
    sample_sizes,
    validate_grouped,
)
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.sharding import Layout
from jaxdist.core.step import TrainConfig, kernel_trial
from jaxdist.core.step_plan import Device, choose_grouped
from jaxdist.hardware import GPUS, Cluster
from jaxdist.models import build
from jaxdist.plan.compiled.check import CompiledStep, compile_step, missing_compiler
from jaxdist.run.audit import audit_parts
from jaxdist.run.setup import assemble

SHAPES = GroupedShapes(rows=330, groups=5, widths=((64, 128), (128, 64)), dtype=jnp.bfloat16)
PASSED = KernelCheck(errors={}, rejection_reason="", use="grouped")
OLD = tuple(map(int, jax.__version__.split(".")[:2])) < (0, 11)
EXPERTS = [
    *("--model.d_model=128", "--model.mlp_dim=64", "--model.num_layers=2", "--model.num_heads=2"),
    *("--model.num_experts=4", "--model.experts_per_token=2", "--train.seq_len=64"),
    *("--train.global_batch_size=8", "--precision.compute_dtype=bfloat16"),
]


@pytest.fixture
def without_gpu():
    from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu as module

    hopper.emulate_gpu(132)
    yield
    module.jax = jax


@pytest.mark.smoke
@pytest.mark.skipif(OLD, reason="the interpreter of jax 0.10 has no transposed arrays")
@pytest.mark.parametrize("sizes", [(13, 0, 70, 1), (0, 64, 0, 5)])
def test_kernels_equal_one_product_per_group(sizes, without_gpu):
    """Rows after the last group give 0, also if their memory is not a number."""
    from jax.experimental.pallas import mosaic_gpu

    rng = np.random.default_rng(0)
    x, grad = (jnp.asarray(rng.normal(size=(100, width)), jnp.bfloat16) for width in (64, 128))
    w = jnp.asarray(rng.normal(size=(4, 64, 128)), jnp.bfloat16)
    hopper.emulate_gpu(1)
    dot = lambda x, w: grouped.make_grouped_dot("gpu", "mosaic")(x, w, jnp.array(sizes, jnp.int32))
    options = mosaic_gpu.InterpretGPUParams(out_of_bounds_reads="uninitialized")
    with mosaic_gpu.force_gpu_interpret_mode(options):
        out, pull_back = jax.vjp(dot, x, w)
        dx, dw = pull_back(grad)
    x, w, grad, out, dx, dw = (np.asarray(a, np.float64) for a in (x, w, grad, out, dx, dw))
    ends = np.cumsum(sizes)
    for group, end in enumerate(ends):
        rows = slice(end - sizes[group], end)
        for actual, expected in (
            (out[rows], x[rows] @ w[group]),
            (dx[rows], grad[rows] @ w[group].T),
            (dw[group], x[rows].T @ grad[rows]),
        ):
            limit = 2.0**-7 * np.abs(expected).max(initial=0)
            assert np.abs(actual - expected).max(initial=0) <= limit
    assert not out[ends[-1] :].any() and not dx[ends[-1] :].any()


def test_sizes_of_the_check_are_of_all_kinds():
    sizes = sample_sizes(81_927, 16)
    assert all(s.sum() <= 81_927 and s.min() >= 0 for s in sizes.values())
    assert len(set(sizes["balanced"])) == 1
    assert sizes["skewed"].max() > 40_000 and sizes["skewed"].min() == 2
    assert not sizes["empty"][::2].any() and sizes["empty"][1::2].all()
    assert all(sizes["unaligned"] % 2) and len(set(sizes["unaligned"])) > 8


def _fake(fault):
    """Return replacements of `hopper.dot` and `hopper.sum_products` with a fault."""
    blocks = grouped.make_grouped_dot("gpu")

    def moved(sizes):
        if fault != "offset":
            return sizes
        ends = jnp.maximum(jnp.cumsum(sizes) - 1, 0)  # each group begins one row early
        return jnp.diff(ends, prepend=0)

    def dot(x, w, sizes, *, transpose=False):
        out = blocks(x, w.swapaxes(1, 2) if transpose else w, moved(sizes))
        if fault == "unused rows":
            out = jnp.where(jnp.arange(len(x))[:, None] < jnp.sum(sizes), out, 1)
        if fault == "small expert":  # and small values
            end = jnp.sum(sizes)
            last = (jnp.arange(len(x)) >= end - sizes[-1]) & (jnp.arange(len(x)) < end)
            out = jnp.where(last[:, None], 1.5 * out, out)
        return out

    def sum_products(x, grad, sizes):
        w = jnp.zeros((len(sizes), x.shape[1], grad.shape[1]), x.dtype)
        out = jax.vjp(lambda w: blocks(x, w, moved(sizes)), w)[1](grad)[0]
        return jnp.where((sizes == 0)[:, None, None], 7, out) if fault == "empty" else out

    return dot, sum_products


@pytest.mark.parametrize(
    ("fault", "cases"),
    [
        ("", set()),
        ("offset", {"balanced", "skewed", "empty", "unaligned"}),
        ("empty", {"empty"}),
        ("unused rows", {"balanced", "skewed", "empty", "unaligned"}),
        ("small expert", {"balanced", "skewed", "unaligned"}),
    ],
)
def test_the_check_detects_faults_of_a_kernel(fault, cases, monkeypatch):
    dot, sum_products = _fake(fault)
    monkeypatch.setattr(hopper, "dot", dot)
    monkeypatch.setattr(hopper, "sum_products", sum_products)
    shapes = dataclasses.replace(SHAPES, rows=333)  # three rows are left if loads are equal
    check = validate_grouped(shapes, jax.devices()[0])
    wrong = {name.partition(", ")[2] for name, e in check.errors.items() if not e <= TOLERANCE}
    assert wrong == cases
    assert bool(check.rejection_reason) == bool(fault)


def test_errors_are_relative_to_the_peak_of_their_expert():
    expected = jnp.concatenate([jnp.full((6, 2), 1000.0), jnp.full((2, 2), 1.0), jnp.zeros((1, 2))])
    actual = expected.at[6].set(1.5)
    assert jnp.max(jnp.abs(actual - expected)) < TOLERANCE * 1000  # of the array's peak
    assert list(errors_by_expert(actual, expected, np.array([6, 2]))) == [0, 0.5, 0]
    assert list(errors_by_expert(actual.at[8].set(1), expected, np.array([6, 2])))[2] == np.inf
    assert np.isnan(errors_by_expert(actual.at[0].set(jnp.nan), expected, np.array([6, 2]))).any()


def test_kernel_that_fails_in_its_child_is_rejected(tmp_path):
    """On a CPU jax cannot lower the kernels; the child's answer is kept."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    gpu = SimpleNamespace(device_kind="a GPU", platform="gpu", local_hardware_id=0)
    check = trials.try_kernel("grouped", SHAPES, gpu)
    jax.config.update("jax_compilation_cache_dir", before)
    assert check.rejection_reason.startswith("jax's Mosaic kernel failed")
    assert "plain JAX instead" in check.describe() and len(list(tmp_path.iterdir())) == 1


def test_choice_of_the_kernel_and_its_reason():
    config = read_run(EXPERTS, command="test").model
    layout = Layout(mesh=MeshSpec(expert=2).build(jax.devices()[:2]))
    model = build(config, seq_len=64)
    described, here = Device("gpu", "9.0", is_described=True), Device("gpu", "9.0")
    narrow = build(dataclasses.replace(config, mlp_dim=96), seq_len=64)
    rejected = dataclasses.replace(PASSED, rejection_reason="differs")
    for own, device, dtype, check, kernel, reason in (
        (model, described, jnp.bfloat16, None, "mosaic", "without a copy"),
        (model, here, jnp.float16, PASSED, "mosaic", "without a copy"),
        (model, here, jnp.bfloat16, None, "blocks", "not compared"),
        (model, here, jnp.bfloat16, rejected, "blocks", "differs"),
        (model, described, jnp.float32, None, "blocks", "float32"),
        (narrow, described, jnp.bfloat16, None, "blocks", "[96]"),
        (model, Device("gpu", "8.0"), jnp.bfloat16, PASSED, "blocks", "Hopper"),
        (model, Device("cpu"), jnp.bfloat16, PASSED, "blocks", "Hopper"),
        (build(FAMILIES["llama2"], seq_len=16), here, jnp.bfloat16, PASSED, "blocks", "no experts"),
    ):
        assert (chosen := choose_grouped(own, layout, device, dtype, check))[0] == kernel
        assert reason in chosen[1]


@pytest.mark.parametrize("obstacle", ["", "differs"])
def test_shapes_of_the_check_are_those_of_the_exchange(monkeypatch, obstacle):
    """Four devices share 4 experts: each sends 1.25 / 4 of its 2 choices of each of 128 tokens."""
    compared = []
    monkeypatch.setattr(
        trials, "try_kernel", lambda use, shapes, _: compared.append(shapes) or PASSED
    )
    parts = assemble(read_run([*EXPERTS, "--mesh=ep=4"], command="test"), jax.devices()[:4])
    plan = dataclasses.replace(parts.plan, device=Device("gpu", "9.0"))
    agree = lambda name, text, decision: decision([text, obstacle])
    check = kernel_trial.check_grouped(
        parts.model, parts.layout, plan, TrainConfig(global_batch_size=8, seq_len=64), agree
    )
    assert obstacle in check.rejection_reason and bool(check.rejection_reason) == bool(obstacle)
    widths = ((128, 128), (64, 128))
    assert compared == [GroupedShapes(rows=320, groups=1, widths=widths, dtype=jnp.bfloat16)]
    described = dataclasses.replace(plan, device=Device("gpu", "9.0", is_described=True))
    train = parts.config.train
    assert kernel_trial.check_grouped(parts.model, parts.layout, described, train, agree) is None


def test_audit_accepts_a_step_with_the_kernels(without_gpu):
    """Jax's types call their results equal on all devices."""
    parts = assemble(read_run([*EXPERTS, "--mesh=fsdp=2,ep=2"], command="test"), jax.devices()[:4])
    vars(parts)["plan"] = dataclasses.replace(parts.plan, grouped="mosaic")
    assert "mpmd_map" in str(parts.step.train.trace(
        parts.step_state(), parts.abstract_batch(), float("inf")
    ).jaxpr)  # fmt: skip
    assert audit_parts(parts).violations == []


@pytest.mark.skipif(missing_compiler() is not None, reason="the extra `plan` is not installed")
@pytest.mark.parametrize(("gpu", "products"), [("h100", 2 + 2 + 4), ("a100-80", 0)])
def test_compiled_step_has_the_kernels(gpu, products):
    """Forward, again in backward, and two gradients of each of two products."""
    config = read_run([*EXPERTS, "--mesh=ep=2", "--train.remat=full"], command="test")
    cluster = Cluster.of(GPUS[gpu], 2)
    step = compile_step(config, MeshSpec(expert=2), cluster, timeout_s=300)
    assert isinstance(step, CompiledStep), step
    assert step.program.count('custom_call_target="mosaic_gpu') >= products
    assert ("mosaic_gpu" in step.program) == bool(products)
