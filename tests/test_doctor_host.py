"""The doctor on one host and in a job's environment; arguments simulate broken machines."""

import errno
import os
from pathlib import Path

import pytest

from jaxdist.tools.doctor import gpus, host
from jaxdist.tools.doctor.findings import Finding

GIB = 1 << 30


def severities(findings: list[Finding]) -> list[str]:
    return [finding.severity for finding in findings]


# -- GPUs, from recorded text ----------------------------------------------------------------------

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


# -- host ------------------------------------------------------------------------------------------


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
        (host.check_disk(Path("/r"), 500 * GIB, 900 * GIB, 0)[0], "ok"),
        (host.check_disk(Path("/r"), 5 * GIB, 900 * GIB, 0)[0], "warning"),
        (host.check_disk(Path("/r"), 500 * GIB, 900 * GIB, 600 * GIB)[0], "error"),
        (host.check_disk(Path("/r"), 500 * GIB, 900 * GIB, 400 * GIB)[0], "warning"),
        (host.check_disk(Path("/r"), 500 * GIB, 900 * GIB, 0, free_files=12)[1], "warning"),
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


# -- SLURM, from recorded text ---------------------------------------------------------------------

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
