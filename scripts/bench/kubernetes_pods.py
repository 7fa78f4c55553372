"""Simulated pods of a job on a bucket: more scenarios than `tests/test_kubernetes_pods.py`.

    python -m pytest -s scripts/bench/kubernetes_pods.py      # as root; eight minutes on busy cores

Processes in separate network namespaces simulate the pods. After a crash, a start watches the old
lock for 30 s here, because locks on an object store do not end with their process.
"""

import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from test_kubernetes_pods import (  # noqa: E402, needs sys.path
    bits_of,
    bucket,  # noqa: F401, a fixture
    cluster_for,
    hosts,  # noqa: F401, a fixture
    records_in,
    restores_of,
    undisturbed,  # noqa: F401, a fixture
)

URL = "s3://bucket/run"


def on_bucket(hosts, bucket, folder, *flags: str):  # noqa: F811, fixtures
    """Return a cluster whose pods share only a bucket."""
    env = {"AWS_ENDPOINT_URL": bucket}
    return cluster_for(hosts, folder, *flags, volume=(), run_dir=URL, env=env)


def test_one_run_lives_through_all_of_it(hosts, bucket, tmp_path, undisturbed):  # noqa: F811
    """Equal bits after a preemption notice, a container restart, and a lost node."""
    cluster = on_bucket(hosts, bucket, tmp_path)
    cluster.start()
    cluster.wait_for_line(0, r"step 10/")
    began = time.monotonic()
    cluster.delete(1)
    cluster.settle()
    print(
        f"\nasked to leave: all saved, ended and made anew after {time.monotonic() - began:.1f} s"
    )
    cluster.wait_for_line(0, r"local save of step (1[6-9]|2)")
    began = time.monotonic()
    cluster.kill(0)
    cluster.restart_containers()
    print(f"a killed container: all ended after {time.monotonic() - began:.1f} s")
    cluster.wait_for_line(0, r"local save of step (2[4-9]|3)")
    began = time.monotonic()
    cluster.lose(1, instead="node-7")
    cluster.settle()
    print(f"a lost node: the other pod ended after {time.monotonic() - began:.1f} s")
    (tmp_path / "pace").unlink()
    cluster.settle()
    records = records_in(URL)
    print("\n".join([*cluster.log, f"restored: {restores_of(records)}"]))
    for record in records:
        if record.get("event") == "restart":
            parts = {k: round(v, 1) for k, v in record.items() if k.endswith("_s")}
            print(f"start of {sum(parts.values()):.1f} s: {parts}")
    assert [tier for _, tier in restores_of(records)] == ["run", "local", "run"]
    assert bits_of(records) == undisturbed()


def test_a_node_without_heir_is_named_until_the_job_gives_up(hosts, bucket, tmp_path):  # noqa: F811
    """A pod stays pending: the other pod names the missing one, and fails."""
    cluster = on_bucket(hosts, bucket, tmp_path, "--runtime.join-timeout-s=15")
    cluster.start()
    cluster.wait_for_line(0, r"step 10/")
    cluster.lose(1, instead="")
    cluster.settle()
    cluster.settle()
    print("\n".join(cluster.log))
    assert [line.rpartition(" ")[2] for line in cluster.log] == ["RestartJobSet"] * 2
    assert all(re.match(r"\{0: \d+\}", line) for line in cluster.log)
    consoles = sorted(cluster.folder.glob("console-*"))
    (named,) = [path for path in consoles if "process 1 of 2 has not joined" in path.read_text()]
    print(f"named in {named.name}")
