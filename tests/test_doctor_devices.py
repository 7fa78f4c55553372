"""The doctor across processes and devices: each check is run for real."""

import itertools
import json
import socket
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from refusals import missing

from jaxdist.core.mesh import MeshSpec
from jaxdist.tools.doctor import devices, processes
from jaxdist.tools.doctor.findings import Finding


def severities(findings: list[Finding]) -> list[str]:
    return [finding.severity for finding in findings]


# -- network ---------------------------------------------------------------------------------------


def test_clocks_are_compared_over_a_real_connection(monkeypatch):
    near, far = processes.Listener(), processes.Listener()
    visit = processes.visit({1: near.address, 2: far.address})
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


# -- shared directory ------------------------------------------------------------------------------


def check_directories(folders: list[Path]) -> list[Finding]:
    """Return the findings of processes with these run directories."""
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


# -- devices ---------------------------------------------------------------------------------------


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
