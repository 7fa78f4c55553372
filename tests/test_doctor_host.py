"""The doctor on one host and across processes and devices, healthy and broken."""

import errno
import itertools
import json
import os
import socket
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import missing

from jaxdist.core.mesh import MeshSpec
from jaxdist.tools.doctor import devices, gpus, host, processes
from jaxdist.tools.doctor.findings import Finding

GIB = 1 << 30


def severities(findings: list[Finding]) -> list[str]:
    return [finding.severity for finding in findings]


HEALTHY = "0, NVIDIA H100 80GB HBM3, GPU-aa, 580.65.06, 81559, 4, 31, 0, 16, 16\n"


def test_query_of_healthy_gpus_is_parsed():
    rows = gpus.read_query(HEALTHY + HEALTHY.replace("0, N", "1, N", 1).replace("aa", "bb"))
    assert [row["uuid"] for row in rows] == ["GPU-aa", "GPU-bb"]
    (finding,) = gpus.check_gpus(rows)
    assert finding.text == "2 × NVIDIA H100 80GB HBM3, driver 580.65.06"
    assert gpus.read_query("No devices were found\n") == gpus.read_query("") == []


@pytest.mark.parametrize(
    ("line", "severity", "words"),
    [
        (HEALTHY.replace(" 4,", " 30211,"), "warning", "29.5 GiB of GPU 0 (GPU-aa)"),
        (HEALTHY.replace(" 0, 16", " 2, 16"), "error", "2 uncorrectable memory error(s)"),
        (HEALTHY.replace("16, 16", "8, 16"), "warning", "8 of 16 PCIe lanes"),
        (HEALTHY.replace(" 31,", " 85,"), "warning", "85 °C"),
    ],
)
def test_bad_gpu_is_reported(line, severity, words):
    findings = gpus.check_gpus(gpus.read_query(line))
    assert [f.severity for f in findings[1:]] == [severity]
    assert words in findings[1].text


def test_unsupported_gpu_values_give_no_finding():
    line = HEALTHY.replace(" 0, 16, 16", " [N/A], [Not Supported], [N/A]")
    assert severities(gpus.check_gpus(gpus.read_query(line))) == ["ok"]


LEGEND = "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe and the interconnect\n"


def matrix(link, num_gpus: int, nics: tuple[str, ...] = ()) -> str:
    """Return text as `nvidia-smi topo -m` prints it: tabs, underlined header, legend below."""
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


def test_full_nvlink_host_is_parsed_without_findings():
    topology = gpus.read_topology(matrix(lambda i, j: "NV18", 8, ("PXB", "SYS")))
    assert topology.gpus == tuple(f"GPU{i}" for i in range(8))
    assert set(topology.links.values()) == {"NV18"} and len(topology.links) == 28
    assert topology.nics == dict.fromkeys(topology.gpus, "PXB")
    (finding,) = gpus.check_topology(topology)
    assert (finding.severity, finding.text) == ("ok", "NV18 between all 8 GPUs")


@pytest.mark.parametrize(
    ("link", "severity", "words"),
    [
        (lambda i, j: "NODE" if i // 2 == j // 2 else "SYS", "note", "no NVLink between the 4"),
        (
            lambda i, j: "NV4" if i // 2 == j // 2 else "SYS",
            "warning",
            "NVLink connects only GPU0+GPU1 and GPU2+GPU3",
        ),
        (lambda i, j: "NV16" if 2 in (i, j) else "NV18", "warning", "GPU2 is in 3 of them"),
    ],
    ids=["pcie", "bridged_pairs", "lame_gpu"],
)
def test_missing_or_slow_links_are_reported(link, severity, words):
    (finding,) = gpus.check_topology(gpus.read_topology(matrix(link, 4)))
    assert finding.severity == severity
    assert words in finding.text


def test_no_topology_gives_no_finding():
    assert gpus.check_topology(gpus.read_topology("")) == []
    assert gpus.check_topology(gpus.read_topology("NVIDIA-SMI has failed")) == []
    assert gpus.check_topology(gpus.read_topology(matrix(lambda i, j: "", 1))) == []


def test_disk_check_verifies_its_data_and_leaves_no_file(tmp_path):
    findings = host.examine_disk(tmp_path, 3 << 20)
    assert findings[-1].check == "disk speed" and findings[-1].severity in ("ok", "warning")
    assert findings[-1].numbers["write_bytes_per_s"] > 0
    assert list(tmp_path.iterdir()) == []


def test_disk_that_returns_wrong_bytes_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda fd: os.pwrite(fd, b"other", 1 << 19))
    assert host.examine_disk(tmp_path, 1 << 20)[-1].severity == "error"


def test_unwritable_directory_is_an_error(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "open", refuse)
    finding = host.examine_disk(tmp_path, 1 << 20)[-1]
    assert finding.severity == "error" and os.strerror(errno.EROFS) in finding.text


@pytest.mark.parametrize(
    ("finding", "severity"),
    [
        (host.check_disk(Path("/r"), 500 * GIB, 900 * GIB, 0), "ok"),
        (host.check_disk(Path("/r"), 5 * GIB, 900 * GIB, 0), "warning"),
        (host.check_disk(Path("/r"), 500 * GIB, 900 * GIB, 600 * GIB), "error"),
        (host.check_disk(Path("/r"), 500 * GIB, 900 * GIB, 400 * GIB), "warning"),
        (host.check_speed(Path("/r"), 10**8, 4.0, 0.1, True), "warning"),
        (host.check_shared_memory(64 << 20, 64 << 20, num_gpus=8), "error"),
        (host.check_shared_memory(64 << 20, 64 << 20, num_gpus=0), "warning"),
        (host.check_shared_memory(16 * GIB, 16 * GIB, num_gpus=8), "ok"),
        (host.check_files(1024, 524288), "warning"),
        (host.check_files(65536, 524288), "ok"),
        (host.check_locked(64 << 10, has_rdma=True), "warning"),
        (host.check_locked(64 << 10, has_rdma=False), "ok"),
        (host.check_cores(8, num_gpus=8), "warning"),
        (host.check_cores(1, num_gpus=0), "ok"),
    ],
)
def test_host_resources_are_rated_by_the_needs_of_a_run(finding, severity):
    assert finding.severity == severity


def test_the_fix_for_few_files_depends_on_the_hard_limit():
    assert host.check_files(1024, 524288).fix == "ulimit -n 65536"
    assert "hard limit" in host.check_files(1024, 4096).fix


SCONTROL = """Configuration data as of 2026-08-01T10:00:00
JobRequeue              = 1
KillOnBadExit           = 0
KillWait                = 30 sec
SlurmdTimeout           = 300 sec
SLURM_VERSION           = 24.11.5

Slurmctld(primary) at ctl is UP
"""


def test_cluster_settings_are_reported():
    findings = host.check_slurm(SCONTROL)
    assert severities(findings) == ["note", "note"]
    assert findings[0].numbers["kill_wait_s"] == 30 and "300 s" in findings[1].text


def test_cluster_without_requeue_is_a_warning():
    findings = host.check_slurm(SCONTROL.replace("= 1\n", "= 0\n", 1))
    assert severities(findings)[0] == "warning" and "--requeue" in findings[0].fix
    assert severities(host.check_slurm("KillWait = UNLIMITED\nSlurmdTimeout = 60 sec\n")) == ["ok"]


def test_outside_a_job_slurm_is_not_queried(monkeypatch):
    monkeypatch.setattr(host.subprocess, "run", lambda *_, **__: pytest.fail("asked"))
    assert host.examine_slurm({}) == []


def test_clocks_are_compared_over_a_real_connection(monkeypatch):
    near, far = processes.Listener(), processes.Listener()
    visit = processes.visit({i: ("127.0.0.1", one.port) for i, one in ((1, near), (2, far))})
    near.close()
    far.close()
    assert visit["failed"] == {}
    assert all(abs(offset) < 0.2 for offset in visit["offset_s"].values())


class PeerWithWrongClock:
    """A peer whose clock is wrong by `offset_s` seconds."""

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
def test_a_wrong_clock_is_measured(offset_s, severity):
    visit = processes.visit({1: PeerWithWrongClock(offset_s).address})
    assert visit["offset_s"][1] == pytest.approx(offset_s, abs=0.2)
    back = {"failed": {}, "offset_s": {0: -offset_s}, "rtt_s": {0: 0.001}}
    pairs, clocks = processes.check_visits([visit, back], ["a", "b"])
    assert pairs.severity == "ok"
    assert clocks.severity == severity and "on a and b" in clocks.text


def test_a_pair_that_cannot_connect_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()
    visit = processes.visit({1: closed})
    pairs, clocks = processes.check_visits(
        [visit, {"failed": {}, "offset_s": {0: 0.0}, "rtt_s": {0: 0.001}}], ["a", "b"]
    )
    assert pairs.severity == "error"
    assert missing(pairs.text, "process 0 on a", "process 1 on b", "1 of 2") == []
    assert clocks.text.startswith("not compared")


def check_directories(folders: list[Path]) -> list[Finding]:
    failed = {i: why for i, f in enumerate(folders) if (why := processes.Token(f, "x", i).write())}
    writers = [i for i in range(len(folders)) if i not in failed]
    views = {i: processes.read_tokens(f, "x", writers, 0.2) for i, f in enumerate(folders)}
    for i, folder in enumerate(folders):
        processes.Token(folder, "x", i).delete()
    return processes.check_views(views, ["a", "b", "c"], folders[0], failed)


def test_shared_directory_is_accepted_and_left_unchanged(tmp_path):
    assert severities(check_directories([tmp_path] * 3)) == ["ok"]
    assert list(tmp_path.iterdir()) == []


def test_directories_of_the_same_name_on_each_host_are_detected(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    (finding,) = check_directories([tmp_path / "a", tmp_path / "a", tmp_path / "b"])
    assert finding.severity == "error"
    assert finding.numbers["groups"] == [[0, 1], [2]]
    assert missing(finding.text, "process 2 on c", "1 of 3 (2)") == []


def test_a_host_without_write_access_is_reported(tmp_path):
    results = check_directories([tmp_path, tmp_path / "missing"])
    assert "process 1 on b cannot write" in results[0].text
    assert "No such file" in results[0].text


def test_late_token_is_awaited(tmp_path):
    late = threading.Timer(0.3, processes.Token(tmp_path, "x", 0).write)
    late.start()
    assert processes.read_tokens(tmp_path, "x", [0], patience_s=5) == [0]


def test_simulated_devices_compute_the_same_bits():
    alone = devices.compute(jax.devices()[:3], 32)
    assert len({digest for device in alone for digest in device["digests"]}) == 1
    assert severities(devices.check_compute([alone], ["a"], simulated=True)) == ["ok"]


def test_device_that_once_computes_different_bits_is_reported():
    good = {"seconds": 1.0, "digests": [7, 7, 7]}
    bad = {"seconds": 1.0, "digests": [7, 9, 7]}
    (finding,) = devices.check_compute([[good, good], [good, bad]], ["a", "b"], simulated=False)
    assert finding.severity == "error"
    assert "device 1 of process 1 on b" in finding.text and "1 of 3" in finding.text


def test_slow_device_is_reported_except_in_a_simulation():
    times = [[{"seconds": s, "digests": [7]} for s in (1.0, 1.02, 1.7, 0.99)]]
    (finding,) = devices.check_compute(times, ["a"], simulated=False)
    assert finding.severity == "warning"
    assert missing(finding.text, "device 2 of process 0 on a", "1.7 times") == []
    assert severities(devices.check_compute(times, ["a"], simulated=True)) == ["ok"]


def test_every_axis_is_timed_in_all_its_groups_and_the_sum_is_correct():
    mesh = MeshSpec(data=2, context=4).build(jax.devices())
    timed = json.loads(json.dumps(devices.time_axes(mesh, 1 << 12)))
    groups = devices.groups_of(mesh, [timed])
    assert list(groups) == ["data", "context"]
    assert [g.members for g in groups["context"]] == [
        tuple((0, i) for i in range(4)),
        tuple((0, i) for i in range(4, 8)),
    ]
    assert [g.members for g in groups["data"]] == [((0, i), (0, i + 4)) for i in range(4)]
    assert all(g.right and g.seconds > 0 for g in itertools.chain(*groups.values()))


def test_the_sum_covers_exactly_the_group(monkeypatch):
    mesh = MeshSpec(data=2, tensor=2).build(jax.devices()[:4])
    seen = []
    monkeypatch.setattr(
        devices, "_time_all_reduce", lambda members, _: seen.append([d.id for d in members])
    )
    devices.time_axes(mesh, 4)
    assert seen == [[0, 2], [1, 3], [0, 1], [2, 3]]


def test_collective_that_drops_an_operand_is_detected(monkeypatch):
    real = devices.all_reduce
    monkeypatch.setattr(
        devices,
        "all_reduce",
        lambda x, axis: real(jnp.where(jax.lax.axis_index(axis) == 1, 0 * x, x), axis),
    )
    assert devices._time_all_reduce(np.array(jax.devices()[:4]), 64)[1] is False


def group(first: int, seconds: float, right: bool = True) -> devices.DeviceGroup:
    return devices.DeviceGroup(
        ((first // 8, first % 8), (first // 8, first % 8 + 1)), seconds, right
    )


def check_axis(groups, **changes):
    settings = {"num_bytes": 256 << 20, "hosts": ["a", "b"], "simulated": False} | changes
    return devices.check_axis("tensor", groups, **settings)


def test_bandwidth_counts_the_bytes_over_each_link():
    four = devices.DeviceGroup(tuple((0, i) for i in range(4)), 0.001, True)
    # Each of four devices sends a quarter of its bytes three times to reduce, and three to gather.
    (finding,) = check_axis([four])
    assert finding.numbers["bytes_per_s"] == pytest.approx(6 * 64 * 2**20 / 0.001)


def test_a_slow_group_is_reported_with_hosts_and_devices():
    results = check_axis([group(0, 0.001), group(2, 0.00101), group(8, 0.0016), group(10, 0.001)])
    assert severities(results) == ["note", "warning"]
    assert "devices 0,1 of process 1 on b" in results[1].text


def test_groups_of_a_simulation_are_not_compared():
    assert severities(check_axis([group(0, 0.001), group(2, 1.0)], simulated=True)) == ["ok"]


def test_wrong_sum_is_an_error_at_any_speed():
    results = check_axis([group(0, 0.001), group(2, 0.001, right=False)], simulated=True)
    assert results[0].severity == "error" and "devices 2,3 of process 0 on a" in results[0].text


def test_links_far_below_their_bandwidth_are_reported():
    results = check_axis([group(0, 0.01)], device_kind="NVIDIA H100 80GB HBM3")  # 27 GB/s
    assert severities(results) == ["note", "warning"]
    assert "NCCL_DEBUG=INFO" in results[1].fix
    assert severities(check_axis([group(0, 0.001)], device_kind="NVIDIA H100 80GB HBM3")) == ["ok"]
