"""Trials of a GPU's kernels in a child process: verdicts, their cache, and children that die."""

import dataclasses
import json
import os
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from jaxdist.core import trials
from jaxdist.core.attention import AttentionPlan, AttentionRequest, choose_kernel, cudnn, zigzag
from jaxdist.core.attention.kernel_check import KernelCheck, Shapes
from jaxdist.core.matmul import grouped, hopper
from jaxdist.run import start_checks
from jaxdist.settings import ConfigError
from jaxdist.tools.doctor import devices

SHAPES = Shapes(
    rows=1, seq_len=8, heads=2, kv_heads=1, head_dim=8, windows=(0,), dtype=jnp.bfloat16
)
GPU = SimpleNamespace(device_kind="a GPU", platform="gpu", local_hardware_id=0)


@pytest.fixture
def cache(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path / "trials"
    jax.config.update("jax_compilation_cache_dir", before)


def replace_python(monkeypatch, tmp_path, script):
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))


@pytest.mark.smoke
def test_real_child_compares_operations_once(cache, monkeypatch, tmp_path):
    assert trials.wrong_operations(GPU) == []
    (kept,) = cache.iterdir()
    result = json.loads(kept.read_text())["result"]
    assert len(result) == 3 * len(trials._OPERATIONS)
    replace_python(monkeypatch, tmp_path, "exit 1")  # a second child would fail
    assert trials.wrong_operations(GPU) == []
    other = SimpleNamespace(**vars(GPU) | {"device_kind": "another GPU"})
    assert len(trials.wrong_operations(other)) == 1


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("sum", lambda x, y, i: jnp.sum(x * x) * 1.1),
        ("product", lambda x, y, i: x @ y.T[:, ::-1]),
        ("gather", lambda x, y, i: x[i - 1]),
        ("loop that writes rows", lambda x, y, i: (x + y).at[0].set(0)),
        ("exponential", lambda x, y, i: jnp.exp(x).at[0, 0].set(jnp.nan)),
    ],
)
def test_planted_faults_of_operations_are_reported(cache, monkeypatch, name, wrong):
    right, factor = trials._OPERATIONS[name]
    run = lambda m, *inputs: wrong(*inputs) if m is jnp else right(m, *inputs)
    monkeypatch.setitem(trials._OPERATIONS, name, (run, factor))
    errors = trials.operation_errors()
    monkeypatch.setattr(trials, "_in_child", lambda *_: json.loads(json.dumps(errors)))
    lines = trials.wrong_operations(GPU)
    dtypes = ("float32", "bfloat16", "float16")
    assert [line.partition(":")[0] for line in lines] == [f"{name} in {d}" for d in dtypes]
    reported = devices.check_operations([[], lines], ["a", "b"])
    assert [one.severity for one in reported] == 3 * ["error"]
    monkeypatch.setattr(jax, "local_devices", lambda: [GPU])
    with pytest.raises(ConfigError) as caught:
        start_checks.check_operations()
    assert len(caught.value.problems) == 3
    assert all("override=operations" in problem for problem in caught.value.problems)


def test_child_without_a_gpu_rejects_the_kernel(cache):
    check = trials.try_kernel("plain", SHAPES, GPU)
    assert check.use == "plain" and check.errors == {} and check.rejection_reason
    assert len(list(cache.iterdir())) == 1


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("kill -SEGV $$", "signal 11"),
        ("echo 'CUDA_ERROR_ILLEGAL_ADDRESS' >&2; exit 3", "exit code 3: CUDA_ERROR_ILLEGAL"),
        ("echo no JSON", "exit code 0"),
        ("exec sleep 60", "no result after"),
    ],
)
def test_child_that_dies_rejects_the_kernel_for_this_start_only(
    cache, monkeypatch, tmp_path, script, reason
):
    monkeypatch.setattr(trials, "TIMEOUT_S", 2)
    replace_python(monkeypatch, tmp_path, script)
    check = trials.try_kernel("packed", SHAPES, GPU)
    assert reason in check.rejection_reason and not cache.exists()
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert trials.try_kernel("packed", SHAPES, GPU).rejection_reason


def test_kernel_is_compared_in_this_process_if_a_child_has_no_memory(cache, monkeypatch, tmp_path):
    replace_python(
        monkeypatch, tmp_path, "echo 'RESOURCE_EXHAUSTED: 1 GiB' >&2; echo x >&2; exit 1"
    )
    here = KernelCheck(errors={"output": 0.001}, rejection_reason="", use="ring")
    monkeypatch.setattr(trials.kernel_check, "validate_kernel", lambda *_: here)
    assert trials.try_kernel("ring", SHAPES, GPU) is here and not cache.exists()


def test_verdict_depends_on_the_request_and_survives_a_damaged_file(cache, monkeypatch):
    calls = []

    def child(kind, request, environ):
        calls.append(request)
        return dataclasses.asdict(KernelCheck(errors={}, rejection_reason="", use=request["use"]))

    monkeypatch.setattr(trials, "_in_child", child)
    for shapes in (SHAPES, SHAPES, dataclasses.replace(SHAPES, head_dim=16)):
        assert trials.try_kernel("packed", shapes, GPU).rejection_reason == ""
    assert [request["head_dim"] for request in calls] == [8, 16]
    for path in cache.iterdir():
        path.write_text("{")
    trials.try_kernel("packed", SHAPES, GPU)
    assert len(calls) == 3
    for module in (cudnn, zigzag, grouped, hopper):  # a verdict holds for one version of the code
        monkeypatch.setattr(module, "__file__", __file__)
        trials.try_kernel("packed", SHAPES, GPU)
    assert len(calls) == 7


@pytest.mark.parametrize(
    ("visible", "index", "own"),
    [("", 0, "0"), ("", 3, "3"), ("4,5", 1, "5"), ("GPU-a,GPU-b", 0, "GPU-a"), ("2", 7, "7")],
)
def test_child_uses_the_same_gpu_and_reserves_no_memory(monkeypatch, visible, index, own):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    environ = trials._child_environ(SimpleNamespace(local_hardware_id=index))
    assert environ["CUDA_VISIBLE_DEVICES"] == own
    assert environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert environ["PATH"] == os.environ["PATH"]


def test_rejected_plain_kernel_falls_back_or_raises():
    plan = AttentionPlan("gpu", "9.0", plain_rejection="differs")
    request = AttentionRequest(jnp.bfloat16, 64, 512)
    assert choose_kernel(request, plan) == ("xla", "differs")
    assert choose_kernel(request, plan._replace(plain_rejection=""))[0] == "cudnn"
    assert choose_kernel(request._replace(packed=True), plan)[0] == "cudnn"
    with pytest.raises(ConfigError):
        choose_kernel(request._replace(kernel="cudnn"), plan)
