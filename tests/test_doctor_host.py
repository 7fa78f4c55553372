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
from jaxdist.tools.doctor import devices, host, processes
from jaxdist.tools.doctor.findings import Finding

GIB = 1 << 30


def severities(findings: list[Finding]) -> list[str]:
    return [finding.severity for finding in findings]


HEALTHY = "0, NVIDIA H100 80GB HBM3, GPU-aa, 580.65.06, 81559, 4, 31, 0, 16, 16\n"


def test_query_of_healthy_gpus_is_parsed():
    rows = host.read_query(HEALTHY + HEALTHY.replace("0, N", "1, N", 1).replace("aa", "bb"))
    assert [row["uuid"] for row in rows] == ["GPU-aa", "GPU-bb"]
    (finding,) = host.check_gpus(rows)
    assert finding.text == "2 × NVIDIA H100 80GB HBM3, driver 580.65.06"
    assert host.read_query("No devices were found\n") == host.read_query("") == []


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
    findings = host.check_gpus(host.read_query(line))
    assert [f.severity for f in findings[1:]] == [severity]
    assert words in findings[1].text


def test_unsupported_gpu_values_give_no_finding():
    line = HEALTHY.replace(" 0, 16, 16", " [N/A], [Not Supported], [N/A]")
    assert severities(host.check_gpus(host.read_query(line))) == ["ok"]


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


def test_pair_that_cannot_connect_is_reported():
    listener = processes.Listener()
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()
    failed = processes.visit({1: ("127.0.0.1", listener.port), 2: closed})
    listener.close()
    assert [*failed] == [2]
    (finding,) = processes.check_visits(json.loads(json.dumps([failed, {}, {}])), ["a", "b", "c"])
    assert finding.severity == "error"
    assert missing(finding.text, "process 0 on a", "process 2 on c", "1 of 6") == []
    assert severities(processes.check_visits([{}, {}], ["a", "b"])) == ["ok"]


def check_directories(folders: list[Path]) -> list[Finding]:
    failed = {i: why for i, f in enumerate(folders) if (why := processes.Token(f, "x", i).write())}
    writers = [i for i in range(len(folders)) if i not in failed]
    views = [processes.read_tokens(f, "x", writers, 0.2) for f in folders]
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
    assert missing(finding.text, "process 0 on a sees no files of 2;", "2 on c", "of 0, 1") == []


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
