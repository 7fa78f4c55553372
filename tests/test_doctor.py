"""The doctor: what broken machines look like is an argument; what works is really tried."""

import itertools
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import ROOT, environment, run

from jaxdist import collectives
from jaxdist.doctor import devices, directory, gpus, host, network, slurm, software, variables
from jaxdist.doctor.findings import Finding, error, exit_code, merge, note, ok, warning
from jaxdist.doctor.settings import read_doctor
from jaxdist.doctor.text import text_of
from jaxdist.mesh import MeshSpec
from jaxdist.types import ConfigError

GIB = 1 << 30


def severities(findings: list[Finding]) -> list[str]:
    return [finding.severity for finding in findings]


# -- findings --------------------------------------------------------------------------------------


def test_equal_findings_of_many_processes_are_one_and_keep_their_hosts():
    shm = warning("shared memory", "64 MiB", "more")
    said = merge([("a", [ok("disk", "1 GB/s"), shm]), ("a", [shm]), ("b", [ok("disk", "2 GB/s")])])
    assert [(s.finding.text, s.processes, s.hosts) for s in said] == [
        ("1 GB/s", (0,), ("a",)),
        ("2 GB/s", (2,), ("b",)),
        ("64 MiB", (0, 1), ("a",)),
    ]
    text = text_of(said, num_processes=3)
    assert "WARN  shared memory      64 MiB [process 0, 1 on a]" in text
    assert "2 GB/s" not in text  # what is fine is told once
    assert text.endswith("1 warning: a run works, but see the warnings first")


@pytest.mark.parametrize(
    ("findings", "strict", "code"),
    [
        ([ok("a", "t"), note("b", "t")], True, 0),
        ([warning("a", "t", "f")], False, 0),
        ([warning("a", "t", "f")], True, 1),
        ([warning("a", "t", "f"), error("b", "t", "f")], False, 1),
    ],
)
def test_exit_code_is_one_for_errors_and_by_wish_for_warnings(findings, strict, code):
    assert exit_code(merge([("a", findings)]), strict=strict) == code


def test_a_warning_without_a_fix_is_a_mistake_of_ours():
    with pytest.raises(ValueError, match="without a fix"):
        warning("disk", "slow", "")


# -- environment variables -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "severity", "words"),
    [
        ({"JAX_PLATFORMS": "cpu"}, "error", "would not use the 8 GPU"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "error", "hides the 8 GPU"),
        ({"JAX_DISABLE_JIT": "1"}, "error", "nothing is compiled"),
        ({"JAX_DEBUG_NANS": "True"}, "warning", "every result is fetched"),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, "warning", "fragments"),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, "warning", "allocator"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}, "warning", "memory_fraction"),
        ({"NCCL_P2P_DISABLE": "1"}, "warning", "through its memory"),
        ({"NCCL_IB_DISABLE": "1"}, "warning", "TCP"),
        ({"NCCL_SOCKET_IFNAME": "ib0"}, "error", "names no interface"),
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
        ({"http_proxy": "http://p:3128"}, "note", "catch the coordinator node1:29400"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_variable_that_hurts_is_named_with_its_fix(environ, severity, words):
    (finding,) = variables.judge(
        environ, num_gpus=8, coordinator="node1:29400", num_hosts=2, interfaces=["lo", "eth0"]
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
def test_variables_that_do_no_harm_are_left_alone(environ):
    found = variables.judge(
        environ, num_gpus=8, coordinator="node1:29400", num_hosts=2, interfaces=["lo", "eth0"]
    )
    assert severities(found) == ["ok"]


def test_settings_of_gpus_do_not_matter_on_a_laptop_or_in_a_simulation():
    environ = {"NCCL_P2P_DISABLE": "1", "JAX_PLATFORMS": "cpu"}
    assert severities(variables.judge(environ, num_gpus=0)) == ["ok"]
    assert severities(variables.judge(environ, num_gpus=8, simulated=True)) == ["ok"]


def test_libraries_that_shadow_those_of_jax_are_named(tmp_path):
    (tmp_path / "libcudnn.so.9").touch()
    environ = {"LD_LIBRARY_PATH": f"/nowhere:{tmp_path}"}
    (finding,) = variables.judge(environ, num_gpus=1)
    assert str(tmp_path) in finding.text and "libcudnn.so.9" in finding.text


def test_a_flag_that_xla_does_not_know_is_found_in_a_child():
    clean = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    assert variables.unreadable_flags(clean) == []
    (finding,) = variables.unreadable_flags({**clean, "XLA_FLAGS": "--xla_gpu_graph_level=0"})
    assert finding.severity == "error"
    assert "xla_gpu_graph_level" in finding.text and "nknown flag" in finding.text


# -- software --------------------------------------------------------------------------------------

GOOD = {"jax": "0.10.2", "jaxlib": "0.10.2"}
CUDA = {"jax-cuda13-plugin": "0.10.2", "jax-cuda13-pjrt": "0.10.2", "driver": "580.65.06"}


@pytest.mark.parametrize(
    ("versions", "nvidia", "words"),
    [
        (GOOD, {**CUDA, "jax-cuda13-plugin": "0.9.0"}, "jax-cuda13-plugin 0.9.0 beside"),
        (GOOD, {**CUDA, "driver": "570.86.10"}, "driver 570.86.10 is too old for CUDA 13"),
        (GOOD, {**CUDA, "jax-cuda12-plugin": "0.10.2"}, "CUDA 12 and 13 are installed together"),
        ({**GOOD, "jax": "0.11.2"}, {}, "jax 0.11.2 with jaxlib 0.10.2"),
    ],
)
def test_versions_that_do_not_go_together_are_errors(versions, nvidia, words):
    facts, finding = software.judge_versions(versions, nvidia)
    assert facts.severity == "ok" and finding.severity == "error"
    assert words in finding.text


def test_versions_that_go_together_are_fine():
    assert severities(software.judge_versions(GOOD, CUDA)) == ["ok"]


def test_the_digest_of_the_code_sees_one_byte_and_one_name(tmp_path):
    (tmp_path / "sub").mkdir()
    file = tmp_path / "sub" / "a.py"
    file.write_text("x = 1\n")
    (tmp_path / "notes.txt").write_text("not code")
    before = software.code_digest(tmp_path)
    (tmp_path / "notes.txt").write_text("other")
    assert software.code_digest(tmp_path) == before
    file.write_text("x = 2\n")
    changed = software.code_digest(tmp_path)
    file.write_text("x = 1\n")
    assert software.code_digest(tmp_path) == before != changed
    file.rename(tmp_path / "sub" / "b.py")
    assert software.code_digest(tmp_path) not in (before, changed)


def test_the_process_with_other_code_is_named():
    same = {"code": "aaa", "jax": "0.10.2", "tokenizers": "1"}
    everyone = [("n0", same), ("n1", {**same, "code": "bbb"}), ("n2", {**same, "tokenizers": "2"})]
    found = software.compare(everyone)
    assert severities(found) == ["error", "warning"]
    assert "the code of jaxdist is aaa in 2 processes, but bbb in process 1 on n1" in found[0].text
    assert severities(software.compare([("n0", same), ("n1", same)])) == ["ok"]


# -- GPUs, from recorded text ----------------------------------------------------------------------

HEALTHY = "0, NVIDIA H100 80GB HBM3, GPU-aa, 580.65.06, 81559, 4, 31, 0, 16, 16\n"


def test_a_query_of_healthy_gpus_reads_back():
    rows = gpus.read_query(HEALTHY + HEALTHY.replace("0, N", "1, N", 1).replace("aa", "bb"))
    assert [row["uuid"] for row in rows] == ["GPU-aa", "GPU-bb"]
    (finding,) = gpus.judge_gpus(rows)
    assert finding.text == "2 × NVIDIA H100 80GB HBM3, driver 580.65.06"
    assert gpus.read_query("No devices were found\n") == gpus.read_query("") == []


@pytest.mark.parametrize(
    ("line", "severity", "words"),
    [
        (HEALTHY.replace(" 4,", " 30211,"), "warning", "30,211 MiB of GPU 0 (GPU-aa) are already"),
        (HEALTHY.replace(" 0, 16", " 2, 16"), "error", "2 memory error(s)"),
        (HEALTHY.replace("16, 16", "8, 16"), "warning", "8 of 16 PCIe lanes"),
        (HEALTHY.replace(" 31,", " 85,"), "warning", "85 °C"),
    ],
)
def test_an_ill_gpu_is_named(line, severity, words):
    found = gpus.judge_gpus(gpus.read_query(line))
    assert [f.severity for f in found[1:]] == [severity]
    assert words in found[1].text


def test_what_a_gpu_does_not_tell_is_no_finding():
    line = HEALTHY.replace(" 0, 16, 16", " [N/A], [Not Supported], [N/A]")
    assert severities(gpus.judge_gpus(gpus.read_query(line))) == ["ok"]


LEGEND = "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe and the interconnect\n"


def matrix(link, num_gpus: int, nics: tuple[str, ...] = ()) -> str:
    """Text as `nvidia-smi topo -m` prints it: tabs, underlined header, legend below."""
    names = [f"GPU{i}" for i in range(num_gpus)] + [f"NIC{i}" for i in range(len(nics))]
    head = "\t\x1b[4m" + "\t".join([*names, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])
    rows = []
    for i in range(num_gpus):
        cells = [" X " if i == j else link(i, j) for j in range(num_gpus)]
        rows.append("\t".join([f"GPU{i}", *cells, *nics, "0-51,104-155", "0", "", "N/A"]))
    for i, nic in enumerate(nics):
        cells = [nic] * num_gpus + [" X " if i == j else "SYS" for j in range(len(nics))]
        rows.append("\t".join([f"NIC{i}", *cells]))
    return head + "\x1b[0m\n" + "\n".join(rows) + "\n" + LEGEND


def test_a_full_nvlink_host_is_read_and_fine():
    topology = gpus.read_topology(matrix(lambda i, j: "NV18", 8, ("PXB", "SYS")))
    assert topology.gpus == tuple(f"GPU{i}" for i in range(8))
    assert set(topology.links.values()) == {"NV18"} and len(topology.links) == 28
    assert topology.nics == dict.fromkeys(topology.gpus, "PXB")
    (finding,) = gpus.judge_topology(topology)
    assert (finding.severity, finding.text) == ("ok", "NV18 between all 8 GPUs")


@pytest.mark.parametrize(
    ("link", "severity", "words"),
    [
        (lambda i, j: "NODE" if i // 2 == j // 2 else "SYS", "note", "no NVLink between the 4"),
        (
            lambda i, j: "NV4" if i // 2 == j // 2 else "SYS",
            "warning",
            "NVLink joins only GPU0+GPU1 and GPU2+GPU3",
        ),
        (lambda i, j: "NV16" if 2 in (i, j) else "NV18", "warning", "GPU2 is in 3 of them"),
    ],
    ids=["pcie", "bridged_pairs", "lame_gpu"],
)
def test_links_that_are_missing_or_lame_are_named(link, severity, words):
    (finding,) = gpus.judge_topology(gpus.read_topology(matrix(link, 4)))
    assert finding.severity == severity
    assert words in finding.text


def test_no_topology_says_nothing():
    assert gpus.judge_topology(gpus.read_topology("")) == []
    assert gpus.judge_topology(gpus.read_topology("NVIDIA-SMI has failed")) == []
    assert gpus.judge_topology(gpus.read_topology(matrix(lambda i, j: "", 1))) == []


# -- host ------------------------------------------------------------------------------------------


def test_the_disk_test_reads_what_it_wrote_and_leaves_nothing(tmp_path):
    found = host.examine_disk(tmp_path, 3 << 20)
    assert found[-1].check == "disk speed" and found[-1].severity in ("ok", "warning")
    assert found[-1].numbers["write_bytes_per_s"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_gives_other_bytes_back_is_an_error(tmp_path, monkeypatch):
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda fd, n, at: real(fd, n, at)[:-1] + b"\0\0"[:1])
    monkeypatch.setattr(os, "urandom", lambda n: b"\1" * n)
    assert host.examine_disk(tmp_path, 1 << 20)[-1].severity == "error"


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "open", refuse)
    finding = host.examine_disk(tmp_path, 1 << 20)[-1]
    assert finding.severity == "error" and "Read-only file system" in finding.text


@pytest.mark.parametrize(
    ("finding", "severity"),
    [
        (host.judge_disk(Path("/r"), 500 * GIB, 900 * GIB, 0)[0], "ok"),
        (host.judge_disk(Path("/r"), 5 * GIB, 900 * GIB, 0)[0], "warning"),
        (host.judge_disk(Path("/r"), 500 * GIB, 900 * GIB, 600 * GIB)[0], "error"),
        (host.judge_disk(Path("/r"), 500 * GIB, 900 * GIB, 400 * GIB)[0], "warning"),
        (host.judge_disk(Path("/r"), 500 * GIB, 900 * GIB, 0, free_files=12)[1], "warning"),
        (host.judge_speed(Path("/r"), 10**8, 4.0, 0.1, True), "warning"),
        (host.judge_shared_memory(64 << 20, 64 << 20, num_gpus=8), "error"),
        (host.judge_shared_memory(64 << 20, 64 << 20, num_gpus=0), "warning"),
        (host.judge_shared_memory(16 * GIB, 16 * GIB, num_gpus=8), "ok"),
        (host.judge_files(1024, 524288), "warning"),
        (host.judge_files(65536, 524288), "ok"),
        (host.judge_locked(64 << 10), "warning"),
        (host.judge_cores(8, num_gpus=8), "warning"),
        (host.judge_cores(1, num_gpus=0), "ok"),
    ],
)
def test_what_a_host_gives_is_judged_by_what_a_run_needs(finding, severity):
    assert finding.severity == severity


def test_the_fix_for_few_files_depends_on_the_hard_limit():
    assert host.judge_files(1024, 524288).fix == "ulimit -n 65536"
    assert "hard limit" in host.judge_files(1024, 4096).fix


# -- SLURM, from recorded text ---------------------------------------------------------------------

SCONTROL = """Configuration data as of 2026-08-01T10:00:00
JobRequeue              = 1
KillOnBadExit           = 0
KillWait                = 30 sec
SlurmdTimeout           = 300 sec
SLURM_VERSION           = 24.11.5

Slurmctld(primary) at ctl is UP
"""


def test_the_clusters_settings_are_read_and_told():
    config = slurm.read_config(SCONTROL)
    assert config["KillWait"] == "30 sec" and config["SLURM_VERSION"] == "24.11.5"
    found = slurm.judge(config)
    assert severities(found) == ["note", "note"]
    assert found[0].numbers["kill_wait_s"] == 30 and "300 s" in found[1].text


def test_a_cluster_that_does_not_requeue_is_a_warning():
    found = slurm.judge(slurm.read_config(SCONTROL.replace("= 1\n", "= 0\n", 1)))
    assert severities(found)[0] == "warning" and "--requeue" in found[0].fix
    assert severities(slurm.judge({"KillWait": "UNLIMITED", "SlurmdTimeout": "60 sec"})) == ["ok"]


def test_outside_a_job_slurm_is_not_asked(monkeypatch):
    monkeypatch.setattr(slurm.subprocess, "run", lambda *_, **__: pytest.fail("asked"))
    assert slurm.examine_slurm({}) == []


# -- network ---------------------------------------------------------------------------------------


def test_clocks_are_compared_over_a_real_connection(monkeypatch):
    near, far = network.Listener(), network.Listener()
    visit = network.visit([("127.0.0.1", 1), near.address, far.address], own=0)
    near.close()
    far.close()
    assert visit["failed"] == {}
    assert all(abs(offset) < 0.2 for offset in visit["offset_s"].values())


class Elsewhen:
    """A peer whose clock is wrong by a known amount."""

    def __init__(self, offset_s: float):
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = self.socket.getsockname()
        threading.Thread(target=self.serve, args=(offset_s,), daemon=True).start()

    def serve(self, offset_s: float) -> None:
        import time

        while True:
            peer, _ = self.socket.accept()
            with peer:
                peer.sendall(json.dumps({"time": time.time() + offset_s}).encode())


@pytest.mark.parametrize(("offset_s", "severity"), [(0.0, "ok"), (-3.0, "warning"), (70, "error")])
def test_a_clock_that_is_wrong_is_measured(offset_s, severity):
    visit = network.visit([("127.0.0.1", 1), Elsewhen(offset_s).address], own=0)
    assert visit["offset_s"][1] == pytest.approx(offset_s, abs=0.2)
    back = {"failed": {}, "offset_s": {0: -offset_s}, "rtt_s": {0: 0.001}}
    pairs, clocks = network.judge([visit, back], ["a", "b"])
    assert pairs.severity == "ok"
    assert clocks.severity == severity and "on a and b" in clocks.text


def test_a_pair_that_cannot_meet_is_named():
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()
    visit = network.visit([("127.0.0.1", 1), closed], own=0)
    pairs, clocks = network.judge([visit, {"failed": {}, "offset_s": {}, "rtt_s": {}}], ["a", "b"])
    assert pairs.severity == "error"
    assert "process 0 on a cannot reach process 1 on b" in pairs.text
    assert "1 of 2 ways" in pairs.text
    assert clocks.text == "not compared: no other process was reached"


# -- shared directory ------------------------------------------------------------------------------


def look(folders: list[Path]) -> list[Finding]:
    """What processes with these run directories find."""
    failed = {i: why for i, f in enumerate(folders) if (why := directory.leave_token(f, "x", i))}
    writers = [i for i in range(len(folders)) if i not in failed]
    views = {i: directory.read_tokens(f, "x", writers, 0.2) for i, f in enumerate(folders)}
    for i, folder in enumerate(folders):
        directory.take_token(folder, "x", i)
    return directory.judge(views, ["a", "b", "c"], folders[0], failed)


def test_one_directory_is_one_and_is_left_as_it_was(tmp_path):
    assert severities(look([tmp_path] * 3)) == ["ok"]
    assert list(tmp_path.iterdir()) == []


def test_directories_of_the_same_name_on_each_host_are_found_out(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    (finding,) = look([tmp_path / "a", tmp_path / "a", tmp_path / "b"])
    assert finding.severity == "error"
    assert finding.numbers["groups"] == [[0, 1], [2]]
    assert "process 2 on c sees files of 1 of 3 (2)" in finding.text


def test_a_host_without_the_right_to_write_is_named(tmp_path):
    found = look([tmp_path, tmp_path / "missing"])
    assert "process 1 on b cannot write" in found[0].text
    assert "No such file" in found[0].text


def test_a_token_that_comes_late_is_waited_for(tmp_path):
    late = threading.Timer(0.3, directory.leave_token, (tmp_path, "x", 0))
    late.start()
    assert directory.read_tokens(tmp_path, "x", [0], patience_s=5) == [0]


# -- devices ---------------------------------------------------------------------------------------


def test_simulated_devices_compute_the_same_bits():
    alone = devices.compute(jax.devices()[:3], 32)
    assert len({digest for device in alone for digest in device["digests"]}) == 1
    assert severities(devices.judge_compute([alone], ["a"], simulated=True)) == ["ok"]


def test_a_device_that_computes_other_bits_once_is_named():
    good = {"seconds": 1.0, "digests": [7, 7, 7]}
    bad = {"seconds": 1.0, "digests": [7, 9, 7]}
    (finding,) = devices.judge_compute([[good, good], [good, bad]], ["a", "b"], simulated=False)
    assert finding.severity == "error"
    assert "device 1 of process 1 on b" in finding.text and "1 of 3" in finding.text


def test_a_slow_device_is_named_but_not_in_a_simulation():
    times = [[{"seconds": s, "digests": [7]} for s in (1.0, 1.02, 1.7, 0.99)]]
    (finding,) = devices.judge_compute(times, ["a"], simulated=False)
    assert finding.severity == "warning"
    assert "device 2 of process 0 on a needs 1.7 times as long" in finding.text
    assert severities(devices.judge_compute(times, ["a"], simulated=True)) == ["ok"]


def test_every_axis_is_timed_in_all_its_groups_and_the_sum_is_right():
    mesh = MeshSpec(data=2, tensor=4).build(jax.devices())
    timed = json.loads(json.dumps(devices.time_axes(mesh, 1 << 12)))
    groups = devices.groups_of(mesh, [timed])
    assert list(groups) == ["data", "tensor"]
    assert [g.members for g in groups["tensor"]] == [
        tuple((0, i) for i in range(4)),
        tuple((0, i) for i in range(4, 8)),
    ]
    assert [g.members for g in groups["data"]] == [((0, i), (0, i + 4)) for i in range(4)]
    assert all(g.right and g.seconds > 0 for g in itertools.chain(*groups.values()))


def test_the_whole_group_adds_up_and_nobody_else(monkeypatch):
    mesh = MeshSpec(data=2, tensor=2).build(jax.devices()[:4])
    seen = []
    monkeypatch.setattr(
        devices, "_time_all_reduce", lambda members, _: seen.append([d.id for d in members])
    )
    devices.time_axes(mesh, 4)
    assert seen == [[0, 2], [1, 3], [0, 1], [2, 3]]


def test_a_collective_that_loses_a_summand_is_found_out(monkeypatch):
    real = collectives.all_reduce
    monkeypatch.setattr(
        collectives,
        "all_reduce",
        lambda x, axis: real(jnp.where(jax.lax.axis_index(axis) == 1, 0 * x, x), axis),
    )
    assert devices._time_all_reduce(np.array(jax.devices()[:4]), 64)[1] is False


def group(first: int, seconds: float, right: bool = True) -> devices.Group:
    return devices.Group(((first // 8, first % 8), (first // 8, first % 8 + 1)), seconds, right)


def judge_axis(groups, **changes):
    given = {"num_bytes": 256 << 20, "hosts": ["a", "b"], "simulated": False} | changes
    return devices.judge_axis("tensor", groups, **given)


def test_bandwidth_is_what_goes_over_each_link():
    four = devices.Group(tuple((0, i) for i in range(4)), 0.001, True)
    # Each of four devices sends a quarter of its bytes three times to add up, and three to share.
    (finding,) = judge_axis([four])
    assert finding.numbers["bytes_per_s"] == pytest.approx(6 * 64 * 2**20 / 0.001)


def test_a_slow_group_is_named_by_host_and_devices():
    found = judge_axis([group(0, 0.001), group(2, 0.00101), group(8, 0.0016), group(10, 0.001)])
    assert severities(found) == ["note", "warning"]
    assert "devices 0,1 of process 1 on b" in found[1].text


def test_groups_of_a_simulation_are_not_compared():
    assert severities(judge_axis([group(0, 0.001), group(2, 1.0)], simulated=True)) == ["ok"]


def test_a_wrong_sum_is_an_error_whatever_the_speed():
    found = judge_axis([group(0, 0.001), group(2, 0.001, right=False)], simulated=True)
    assert found[0].severity == "error" and "devices 2,3 of process 0 on a" in found[0].text


def test_links_far_below_their_figure_are_told():
    found = judge_axis([group(0, 0.01)], device_kind="NVIDIA H100 80GB HBM3")  # 27 GB/s
    assert severities(found) == ["note", "warning"]
    assert "NCCL_DEBUG=INFO" in found[1].fix
    assert severities(judge_axis([group(0, 0.001)], device_kind="NVIDIA H100 80GB HBM3")) == ["ok"]


# -- the command -----------------------------------------------------------------------------------


def test_settings_without_meaning_are_refused_together():
    with pytest.raises(ConfigError) as refused:
        read_doctor(["--disk_mib=-1", "--wait_s=0", "--num_processes=2"])
    text = str(refused.value)
    assert "disk_mib=-1" in text and "wait_s=0" in text and "runtime.coordinator" in text


def test_room_for_checkpoints_is_asked_for_the_models_size():
    config = read_doctor(["--config", str(ROOT / "configs" / "llama3_8b.toml")])
    kept = config.checkpoint.keep_newest + config.checkpoint.keep_best + 2  # written, midway
    one = config.model.num_params * (4 + config.optim.moment_bytes)
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
    assert list(folder.iterdir()) == []  # nothing is left in the run directory's place


@pytest.mark.slow
def test_a_job_that_cannot_start_ends_with_one_and_says_why(tmp_path):
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
        address = f"127.0.0.1:{other.getsockname()[1]}"
        flags = ["--coordinator", address, "--num-processes=2", "--process-index=0"]
        done = run("doctor", "--simulate=2", "--disk_mib=0", "--json", *flags)
    assert done.returncode == 1, done.stderr
    (wrong,) = [f for f in json.loads(done.stdout)["findings"] if f["severity"] == "error"]
    assert wrong["check"] == "job" and "another job may run there" in wrong["text"]


def processes(tmp_path: Path, *, shared: bool, **environ: str):
    """Two doctors with the environment of a local launch, on one directory or on two."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    started = []
    for i in range(2):
        folder = tmp_path / ("runs" if shared else f"runs{i}")
        folder.mkdir(exist_ok=True)
        words = ["--simulate", "2", "--mesh", "dp=2,tp=2", "--run-dir", str(folder), "--json"]
        flags = ["--coordinator", address, "--num-processes", "2", "--process-index", str(i)]
        started.append(
            subprocess.Popen(
                [sys.executable, "-m", "jaxdist.doctor", *words, *flags, "--disk_mib=1"],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                env={**environment(), **environ},
            )
        )  # fmt: skip
    said = [process.communicate(timeout=120) for process in started]
    assert said[1][0].strip() == ""  # process 0 speaks for all
    return [p.returncode for p in started], json.loads(said[0][0]), said


@pytest.mark.slow
def test_two_real_processes_meet_compare_and_add_up(tmp_path):
    # A proxy that leads nowhere must not keep them apart.
    codes, record, said = processes(tmp_path, shared=True, http_proxy="http://127.0.0.1:1")
    assert codes == [0, 0], said
    checks = {f["check"]: f for f in record["findings"]}
    assert "all 2 ways" in checks["network"]["text"]
    assert checks["clocks"]["numbers"]["skew_s"] < 0.2
    assert "one directory for 2 processes" in checks["shared directory"]["text"]
    assert checks["same software"]["severity"] == "ok"
    between = checks["all-reduce data"]["numbers"]["groups"]
    assert [g["members"] for g in between] == [[[0, 0], [1, 0]], [[0, 1], [1, 1]]]
    assert any("would catch the coordinator" in f["text"] for f in record["findings"])
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.slow
def test_two_real_processes_with_two_directories_both_end_with_one(tmp_path):
    codes, record, said = processes(tmp_path, shared=False)
    assert codes == [1, 1], said
    (wrong,) = [f for f in record["findings"] if f["severity"] == "error"]
    assert wrong["check"] == "shared directory" and wrong["numbers"]["groups"] == [[0], [1]]
    assert "process 0" not in said[1][1]  # an exit code of all is no failure of one
