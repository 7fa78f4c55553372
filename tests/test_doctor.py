"""Tests of the doctor: findings on variables and versions, and the command."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, Fork, environment, free_port, run
from refusals import missing

from jaxdist.models.weights import num_params
from jaxdist.runtime.distributed import code_digest
from jaxdist.settings import ConfigError
from jaxdist.tools.doctor import host, variables
from jaxdist.tools.doctor.checks import read_doctor
from jaxdist.tools.doctor.findings import (
    Finding,
    error,
    exit_code,
    merge,
    note,
    ok,
    text_of,
    warning,
)


def severities(findings: list[Finding]) -> list[str]:
    return [finding.severity for finding in findings]


def test_equal_findings_of_many_processes_are_merged_and_keep_their_hosts():
    shm = warning("shared memory", "64 MiB", "more")
    merged = merge(
        [("a", [ok("disk", "1 GB/s"), shm]), ("a", [shm]), ("b", [ok("disk", "2 GB/s")])]
    )
    assert [(s.finding.text, s.processes, s.hosts) for s in merged] == [
        ("1 GB/s", (0,), ("a",)),
        ("2 GB/s", (2,), ("b",)),
        ("64 MiB", (0, 1), ("a",)),
    ]
    text = text_of(merged, num_processes=3)
    assert "WARN  shared memory      64 MiB [process 0, 1 on a]" in text
    assert "2 GB/s" not in text  # a value that is fine is reported once
    assert text.splitlines()[-1].startswith("1 warning: ")


@pytest.mark.parametrize(
    ("findings", "strict", "code"),
    [
        ([ok("a", "t"), note("b", "t")], True, 0),
        ([warning("a", "t", "f")], False, 0),
        ([warning("a", "t", "f")], True, 1),
        ([warning("a", "t", "f"), error("b", "t", "f")], False, 1),
    ],
)
def test_exit_code_is_one_for_errors_and_with_strict_for_warnings(findings, strict, code):
    assert exit_code(merge([("a", findings)]), strict=strict) == code


@pytest.mark.parametrize(
    ("environ", "severity", "words"),
    [
        ({"JAX_PLATFORMS": "cpu"}, "error", "8 GPU"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "error", "8 GPU"),
        ({"JAX_DISABLE_JIT": "1"}, "error", "compiled"),
        ({"JAX_DEBUG_NANS": "True"}, "warning", "every result"),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, "warning", "fragments"),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, "warning", "allocator"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}, "warning", "0.92"),
        ({"NCCL_P2P_DISABLE": "1"}, "warning", "through host memory"),
        ({"NCCL_IB_DISABLE": "1"}, "warning", "TCP"),
        ({"NCCL_SOCKET_IFNAME": "ib0"}, "error", "matches no interface"),
        ({"NCCL_SOCKET_IFNAME": "lo"}, "error", "loopback"),
        (
            {"XLA_FLAGS": "--xla_gpu_autotune_level=0 --x=1"},
            "warning",
            "--xla_gpu_autotune_level=0",
        ),
        ({"XLA_FLAGS": "--xla_dump_to=/d"}, "warning", "disk"),
        (
            {"XLA_FLAGS": "--xla_gpu_enable_command_buffer=+COLLECTIVES"},
            "warning",
            "hang",
        ),
        (
            {"XLA_FLAGS": "--xla_gpu_experimental_use_ragged_dot_fusion=true"},
            "error",
            "ends the process",
        ),
        ({"http_proxy": "http://p:3128"}, "note", "node1:29400"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_harmful_variable_is_reported_with_its_fix(environ, severity, words):
    (finding,) = variables.check_variables(
        environ,
        num_gpus=8,
        coordinator_address="node1:29400",
        num_hosts=2,
        interfaces=["lo", "eth0"],
    )
    assert finding.severity == severity
    assert words in finding.text
    assert finding.fix


@pytest.mark.parametrize(
    "environ",
    [
        {"JAX_PLATFORMS": "cuda,cpu", "CUDA_VISIBLE_DEVICES": "0,1"},
        {"NCCL_SOCKET_IFNAME": "eth"},  # a prefix
        {"NCCL_SOCKET_IFNAME": "^docker,lo"},
        {"NCCL_P2P_DISABLE": "0", "NCCL_NET_GDR_LEVEL": "SYS"},
        {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.92", "JAX_DEBUG_NANS": "false"},
        {"XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=true"},
        {"http_proxy": "http://p:3128", "no_proxy": "localhost,node1"},
        {"https_proxy": "http://p:3128", "no_grpc_proxy": ".cluster,node1"},
    ],
    ids=lambda environ: next(iter(environ)),
)
def test_harmless_variables_are_not_reported(environ):
    findings = variables.check_variables(
        environ,
        num_gpus=8,
        coordinator_address="node1:29400",
        num_hosts=2,
        interfaces=["lo", "eth0"],
    )
    assert severities(findings) == ["ok"]


def test_settings_of_gpus_do_not_matter_on_a_laptop_or_in_a_simulation():
    environ = {"NCCL_P2P_DISABLE": "1", "JAX_PLATFORMS": "cpu"}
    assert severities(variables.check_variables(environ, num_gpus=0)) == ["ok"]
    assert severities(variables.check_variables(environ, num_gpus=8, simulated=True)) == ["ok"]


def test_libraries_that_shadow_those_of_jax_are_reported(tmp_path):
    (tmp_path / "libcudnn.so.9").touch()
    environ = {"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}"}
    (finding,) = variables.check_variables(environ, num_gpus=1)
    assert str(tmp_path) in finding.text and "libcudnn.so.9" in finding.text


def test_an_unknown_xla_flag_is_detected_in_a_child_process():
    clean = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    assert variables.unreadable_flags(clean) == []
    (finding,) = variables.unreadable_flags({**clean, "XLA_FLAGS": "--xla_gpu_graph_level=0"})
    assert finding.severity == "error"
    assert "xla_gpu_graph_level" in finding.text and "nknown flag" in finding.text


GOOD = {"jax": "0.10.2", "jaxlib": "0.10.2"}
CUDA = {"jax-cuda13-plugin": "0.10.2", "jax-cuda13-pjrt": "0.10.2", "driver": "580.65.06"}


@pytest.mark.parametrize(
    ("versions", "nvidia", "words"),
    [
        (GOOD, {**CUDA, "jax-cuda13-plugin": "0.9.0"}, "jax-cuda13-plugin 0.9.0"),
        (GOOD, {**CUDA, "driver": "570.86.10"}, "570.86.10"),
        (GOOD, {**CUDA, "jax-cuda12-plugin": "0.10.2"}, "CUDA 12 and 13"),
        ({**GOOD, "jax": "0.11.2"}, {}, "jax 0.11.2 with jaxlib 0.10.2"),
        ({**GOOD, "jax": "0.11.0", "jaxlib": "0.11.0"}, {}, "jax 0.11.0"),
    ],
)
def test_incompatible_versions_are_errors(versions, nvidia, words):
    facts, finding = host.check_versions(versions, nvidia)
    assert facts.severity == "ok" and finding.severity == "error"
    assert words in finding.text


def test_compatible_versions_are_fine():
    assert severities(host.check_versions(GOOD, CUDA)) == ["ok"]


def test_the_digest_of_the_code_depends_on_every_byte_and_name(tmp_path):
    (tmp_path / "sub").mkdir()
    file = tmp_path / "sub" / "a.py"
    file.write_text("x = 1\n")
    (tmp_path / "notes.txt").write_text("not code")
    before = code_digest(tmp_path)
    (tmp_path / "notes.txt").write_text("other")
    assert code_digest(tmp_path) == before
    file.write_text("x = 2\n")
    changed = code_digest(tmp_path)
    file.write_text("x = 1\n")
    assert code_digest(tmp_path) == before != changed
    file.rename(tmp_path / "sub" / "b.py")
    assert code_digest(tmp_path) not in (before, changed)


def test_the_process_with_different_code_is_reported():
    same = {"code": "aaa", "jax": "0.10.2", "tokenizers": "1"}
    everyone = [("n0", same), ("n1", {**same, "code": "bbb"}), ("n2", {**same, "tokenizers": "2"})]
    findings = host.compare(everyone)
    assert severities(findings) == ["error", "warning"]
    assert missing(findings[0].text, "aaa", "2 processes", "bbb", "process 1", "n1") == []
    assert severities(host.compare([("n0", same), ("n1", same)])) == ["ok"]


def test_invalid_settings_are_rejected_together():
    with pytest.raises(ConfigError) as refused:
        read_doctor(["--disk_mib=-1", "--wait_s=0", "--num_processes=2"])
    text = str(refused.value)
    assert "disk_mib=-1" in text and "wait_s=0" in text and "runtime.coordinator_address" in text


def test_space_for_checkpoints_depends_on_the_model_size():
    config = read_doctor(["--config", str(ROOT / "configs" / "llama3_8b.toml")])
    kept = config.checkpoint.max_to_keep + config.checkpoint.best[1] + 2  # written, halfway
    one = num_params(config.build_model()) * (4 + config.optim.moment_bytes)
    assert config.checkpoints_bytes == pytest.approx(one * kept, rel=1e-6)
    assert one > 60e9


@pytest.fixture(scope="module")
def simulated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doctor")
    words = ["--simulate", 4, "--mesh", "dp=2,tp=2", "--run-dir", folder / "runs" / "x", "--json"]
    return folder, run("doctor", *words, "--disk_mib=1", "--strict=false")


def test_the_command_reports_a_healthy_simulation_as_json(simulated):
    folder, done = simulated
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    checks = {f["check"]: f for f in record["findings"]}
    assert {"software", "disk space", "disk speed", "shared memory", "open files", "mesh",
            "devices", "all-reduce data", "all-reduce tensor"} <= checks.keys()  # fmt: skip
    assert record["worst"] != "error" and record["exit_code"] == 0
    assert checks["all-reduce data"]["numbers"]["bytes_per_s"] > 0
    assert list(folder.iterdir()) == []  # no files remain in the run directory's folder


@pytest.mark.slow
def test_a_job_that_cannot_start_exits_with_1_and_the_reason(tmp_path):
    environ = {**environment(), "XLA_FLAGS": "--xla_gpu_graph_level=0", "JAX_DISABLE_JIT": "1"}
    words = ["--simulate", "4", "--mesh", "dp=3", "--disk_mib=0"]
    done = subprocess.run(
        [sys.executable, "-m", "jaxdist.doctor", *words],
        capture_output=True, text=True, env=environ, cwd=tmp_path, timeout=200,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    text = " ".join(done.stdout.split())
    parts = ["JAX_DISABLE_JIT=1", "xla_gpu_graph_level", "Legal with 4 devices", "do not start"]
    assert [part for part in parts if part not in text] == []


@pytest.mark.slow
def test_a_job_that_cannot_be_joined_is_a_finding_with_its_fix():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        flags = [f"--coordinator-address=127.0.0.1:{port}", "--num-processes=2", "--process-id=0"]
        done = run("doctor", "--simulate=2", "--disk_mib=0", "--json", *flags)
    assert done.returncode == 1, done.stderr
    (wrong,) = [f for f in json.loads(done.stdout)["findings"] if f["severity"] == "error"]
    assert wrong["check"] == "job" and missing(wrong["text"], port, "another job") == []


def processes(tmp_path: Path, *, shared: bool, **environ: str):
    address = f"127.0.0.1:{free_port()}"
    started = []
    for i in range(2):
        folder = tmp_path / ("runs" if shared else f"runs{i}")
        folder.mkdir(exist_ok=True)
        words = ["--simulate", "2", "--mesh", "dp=2,tp=2", "--run-dir", str(folder), "--json"]
        flags = ["--coordinator-address", address, "--num-processes", "2", "--process-id", str(i)]
        started.append(Fork("jaxdist.doctor", *words, *flags, "--disk_mib=1", **environ))
    outputs = [process.communicate(timeout=120) for process in started]
    assert outputs[1][0].strip() == ""  # process 0 reports for all
    return [p.returncode for p in started], json.loads(outputs[0][0]), outputs


@pytest.mark.slow
def test_two_real_processes_connect_compare_and_reduce(tmp_path):
    # An unreachable proxy must not prevent the connection.
    codes, record, outputs = processes(tmp_path, shared=True, http_proxy="http://127.0.0.1:1")
    assert codes == [0, 0], outputs
    checks = {f["check"]: f for f in record["findings"]}
    assert "all 2 connections" in checks["network"]["text"]
    assert checks["clocks"]["numbers"]["skew_s"] < 0.2
    assert checks["shared directory"]["severity"] == "ok"
    assert checks["same software"]["severity"] == "ok"
    between = checks["all-reduce data"]["numbers"]["groups"]
    assert [g["members"] for g in between] == [[[0, 0], [1, 0]], [[0, 1], [1, 1]]]
    assert any("http_proxy=http://127.0.0.1:1" in f["text"] for f in record["findings"])
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.slow
def test_two_real_processes_with_two_directories_exit_with_1(tmp_path):
    codes, record, outputs = processes(tmp_path, shared=False)
    assert codes == [1, 1], outputs
    (wrong,) = [f for f in record["findings"] if f["severity"] == "error"]
    assert wrong["check"] == "shared directory" and wrong["numbers"]["groups"] == [[0], [1]]
    assert "process 0" not in outputs[1][1]  # an exit code of all is not one process's failure
