"""Pods simulated by real processes in separate networks.

Runs of two pods survive events of a cluster and stay bit-identical to an undisturbed run.
`scripts/bench/kubernetes_pods.py` runs all of them on a bucket, on which a start after a crash
first watches the lock of the previous run for 30 s.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import network_hosts
import object_servers
import pytest
from commands import ROOT
from kubernetes_cases import config, job_set
from launched_job import training
from network_hosts import Hosts
from pods import DISK, PATIENCE_S, Cluster

from jaxdist.runtime.storage import locate

STEPS = 40
PACE_S = 0.05

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(network_hosts.missing()), reason=network_hosts.missing() or "-"),
]

TRAIN = training(
    f"--steps={STEPS}",
    "--checkpoint.save_interval_steps=10",
    "--checkpoint.local_interval_steps=4",
    "--runtime.heartbeat_timeout_s=10",
    "--runtime.join_timeout_s=120",
    "--resilience.step_timeout_s=60",
)
HANDED_ON = ("AWS_REGION", "JAX_PLATFORMS", "XLA_FLAGS")
"""What the processes of all runs share, or programs and bits would differ."""
PATHS = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}


@pytest.fixture
def hosts(tmp_path):
    with Hosts(tmp_path / "hosts") as running:
        yield running


@pytest.fixture
def bucket(hosts, monkeypatch):
    """Return the address of an S3 server that pods and this process can reach."""
    with (
        object_servers.s3(monkeypatch) as address,
        object_servers.passing_on(
            address, lambda request, ask: ask(request), hosts.listen_beside()
        ) as way,
    ):
        yield way


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return a function that waits for the bits of the same, undisturbed training by a launcher."""
    folder = tmp_path_factory.mktemp("undisturbed")
    command = [sys.executable, "-m", "jaxdist.launch", "--nproc-per-node=2", "--", *TRAIN]
    process = subprocess.Popen(
        [*command, f"--run-dir={folder / 'run'}"],
        env={**os.environ, **PATHS, "FAULT_FOLDER": str(folder)},
        stdout=subprocess.DEVNULL,
    )

    def bits() -> dict:
        assert process.wait(PATIENCE_S) == 0
        return bits_of(records_in(folder / "run"))

    yield bits
    process.kill()
    process.wait()


def cluster_for(hosts: Hosts, folder: Path, *flags: str, **fields) -> Cluster:
    """Return a cluster with a job of two pods, whose pace a file in `folder` sets."""
    own = [flag.partition("=")[0].replace("-", "_") for flag in flags]
    train = [flag for flag in TRAIN if flag.partition("=")[0].replace("-", "_") not in own]
    (folder / "pace").write_text(str(PACE_S))
    keys = {"id": "AWS_ACCESS_KEY_ID", "secret": "AWS_SECRET_ACCESS_KEY"}
    env = {
        **PATHS,
        "FAULT_FOLDER": str(folder),
        "JAXDIST_CACHE": os.environ.get("JAXDIST_CACHE", str(folder / "cache")),
        **{name: os.environ[name] for name in HANDED_ON if name in os.environ},
        **fields.pop("env", {}),
    }
    manifest = job_set(
        config(
            name="pods",
            nodes=2,
            python=sys.executable,
            env=tuple(f"{name}={value}" for name, value in env.items()),
            secret_env=tuple(f"{name}=keys:{key}" for key, name in keys.items()),
            arguments=[*train, *flags, f"--checkpoint.local_dir={DISK}/saves"],
            **fields,
        )
    )
    secret = {key: os.environ.get(name, "") for key, name in keys.items()}
    return Cluster(hosts, manifest, folder / "pods", {"keys": secret})


def records_in(run_dir) -> list[dict]:
    return [json.loads(line) for line in (locate(run_dir) / "metrics.jsonl").read().splitlines()]


def bits_of(records: list[dict]) -> dict[int, tuple[str, str]]:
    numbers = lambda r: tuple(float(r[name]).hex() for name in ("loss", "grad_norm"))
    return {r["step"]: numbers(r) for r in records if r["kind"] == "train"}


def restores_of(records: list[dict]) -> list[tuple[int, str]]:
    return [(r["step"], r.get("tier", "run")) for r in records if r.get("event") == "restore"]


def test_a_killed_container_and_a_lost_node_lose_only_unsaved_steps(hosts, tmp_path, undisturbed):
    """The run is on a volume; containers that restart in their pods find the local saves."""
    cluster = cluster_for(hosts, tmp_path, volume=("runs:/srv",))
    cluster.start()
    cluster.wait_for_line(0, r"local save of step 12")
    cluster.kill(0)
    cluster.restart_containers()
    cluster.wait_for_line(0, r"checkpoint 20 saved")
    cluster.lose(1, instead="node-7")
    cluster.settle()
    assert [line.partition(": R")[2] for line in cluster.log] == ["", "estartJobSet"]
    assert cluster.pods[1].environ["JAXDIST_FAILURE_DOMAIN"] == "node-7"
    (tmp_path / "pace").unlink()
    cluster.settle()
    assert cluster.log[2:] == ["{0: 0, 1: 0}: done"]
    records = records_in(tmp_path / "pods" / "runs" / "pods")
    (here, first), (there, second) = restores_of(records)
    assert (first, second) == ("local", "run") and here >= 12 and there >= 20
    assert bits_of(records) == undisturbed()
