"""Training jobs on a real SLURM cluster that is started for the tests."""

import json
import os
import re
import sys
import time
from pathlib import Path

import pytest
import real_slurm
from commands import ROOT

from jaxdist.tools.launch.slurm import SlurmConfig, batch_script, main


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    reason = real_slurm.missing()
    if reason:
        if os.environ.get("JAXDIST_REQUIRE_SLURM"):
            pytest.fail(reason)
        pytest.skip(reason)
    with real_slurm.RealSlurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


TINY = [
    *("--simulate=1", "--model.num_layers=1", "--model.d_model=32", "--model.num_heads=2"),
    *("--model.num_kv_heads=2", "--train.global_batch_size=4", "--train.seq_len=32"),
    *("--eval.interval_steps=0", "--eval.final_max_batches=1"),
    "--monitoring.tracker=",
]
TRAINING = [*TINY, "--mesh=dp=2", "--steps=120", "--checkpoint.save-interval-steps=40"]


def submit(cluster, name: str) -> str:
    script = cluster.root / f"jobs/{name}.sbatch"
    settings = SlurmConfig(
        name=name, nodes="2", time="10", python=sys.executable, arguments=TRAINING
    )
    script.write_text(batch_script(settings))
    return cluster.submit(script, PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu")


def wait_for_checkpoint(cluster, job_id: str, run: Path) -> None:
    until = time.monotonic() + 120
    while not (run / "checkpoints/40").exists():
        has_ended = cluster.job(job_id)["JobState"] in real_slurm.ENDED
        assert not has_ended and time.monotonic() < until, cluster.output(job_id)
        time.sleep(0.1)


def losses(run: Path) -> dict[int, str]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {r["step"]: float(r["loss"]).hex() for r in records if r["kind"] == "train"}


@pytest.fixture(scope="module")
def uninterrupted(cluster) -> tuple[str, str, dict[int, str]]:
    job_id = submit(cluster, "whole")
    assert cluster.wait(job_id, timeout_s=300) == "COMPLETED", cluster.output(job_id)
    run = cluster.root / f"jobs/runs/whole-{job_id}"
    return cluster.output(job_id), cluster.job(job_id)["Restarts"], losses(run)


@pytest.mark.slow
def test_two_nodes_join_and_the_job_completes(uninterrupted):
    out, restarts, loss_by_step = uninterrupted
    assert "exit code 0, srun 0, signal none" in out and restarts == "0"
    assert re.search(r"^0 +n1 ", out, re.MULTILINE) and re.search(r"^1 +n2 ", out, re.MULTILINE)
    assert sorted(loss_by_step) == list(range(1, 121))


@pytest.mark.slow
def test_requeued_training_matches_an_uninterrupted_one(cluster, uninterrupted):
    job_id = submit(cluster, "parted")
    run = cluster.root / f"jobs/runs/parted-{job_id}"
    wait_for_checkpoint(cluster, job_id, run)
    # Equivalent to --signal=B:USR1@... before the time limit, which is minutes away.
    cluster.run("scancel", "--signal=USR1", "--batch", job_id)
    assert cluster.wait(job_id, timeout_s=300) == "COMPLETED", cluster.output(job_id)
    assert cluster.job(job_id)["Restarts"] == "1", cluster.output(job_id)
    assert losses(run) == uninterrupted[2]


@pytest.mark.slow
def test_job_in_a_container_is_requeued_and_completes(cluster):
    """Uses an image of `UNPACKED=DIR scripts/container/build.sh`, which `.ci/run` passes."""
    image = os.environ.get("JAXDIST_TEST_IMAGE")
    if not image:
        pytest.skip("needs JAXDIST_TEST_IMAGE=DIR/, and Charliecloud's ch-run")
    mounts = [f"--mount={path}" for path in os.environ.get("JAXDIST_TEST_MOUNTS", "").split()]
    script = cluster.root / "jobs/contained.sbatch"
    flags = ["--name=contained", "--nodes=2", "--time=10", f"--container={image}", *mounts]
    assert main([*flags, f"--script={script}", "--", *TRAINING]) == 0
    job_id = cluster.submit(script, JAX_PLATFORMS="cpu", HOME=str(cluster.root / "jobs"))
    run = cluster.root / f"jobs/runs/contained-{job_id}"
    wait_for_checkpoint(cluster, job_id, run)
    cluster.run("scancel", "--signal=USR1", "--batch", job_id)
    assert cluster.wait(job_id, timeout_s=300) == "COMPLETED", cluster.output(job_id)
    assert cluster.job(job_id)["Restarts"] == "1", cluster.output(job_id)
    out = cluster.output(job_id)
    assert "exit code 75" in out and "attempt 1 ended: exit code 0, srun 0" in out
    assert sorted(losses(run)) == list(range(1, 121))
    assert json.loads((run / "environment.json").read_text())["command"].startswith("/opt/python/")


@pytest.mark.slow
def test_elastic_job_trains_on_the_nodes_that_allow_a_legal_mesh(cluster):
    script = cluster.root / "jobs/uneven.sbatch"
    flags = ["--name=uneven", "--nodes=2-4", "--time=10", f"--python={sys.executable}"]
    args = [*TINY, "--mesh=dp=4", "--steps=5"]
    assert main([*flags, f"--script={script}", "--", *args]) == 0
    job_id = cluster.submit(script, PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu")
    assert cluster.wait(job_id, timeout_s=300) == "COMPLETED", cluster.output(job_id)
    out = cluster.output(job_id)
    assert "3 nodes allocated" in out and "using 2" in out
    assert re.search(r"\b2 of .* 4 .*dp=4", out)
    assert "attempt 0 ended: exit code 0, srun 0" in out
    run = cluster.root / f"jobs/runs/uneven-{job_id}"
    assert sorted(losses(run)) == [1, 2, 3, 4, 5]
