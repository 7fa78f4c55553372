"""Run jobs on a real SLURM in more scenarios than `tests/test_slurm_jobs.py`.

    python -m pytest scripts/bench/slurm_scenarios.py      # as root; about four minutes

They cover GPU allocation, elastic jobs, a lost node, cancellation, and the array of a sweep. The
test suite checks the rules of the batch script with commands that simulate SLURM.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import real_slurm  # noqa: E402, needs sys.path
from test_slurm import plan  # noqa: E402
from test_slurm_jobs import TINY, TRAINING, losses  # noqa: E402

from jaxdist.tools.launch.slurm import batch_script  # noqa: E402


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Start a SLURM cluster of three nodes."""
    assert not real_slurm.missing(), real_slurm.missing()
    with real_slurm.RealSlurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


def submit(cluster, name: str, body: str, **fields) -> str:
    """Submit a job of two nodes whose program's `main` is `body`; return the job id."""
    jobs = cluster.root / "jobs"
    code = "import os, sys, time, signal\nfrom pathlib import Path\nfrom jaxdist import runtime\n"
    code += "RUN = Path(sys.argv[1].partition('=')[2])\n"
    code += "ATTEMPT = int(os.environ.get('SLURM_RESTART_COUNT', 0))\n\ndef main():\n"
    code += textwrap.indent(textwrap.dedent(body), "    ") + "\n\nruntime.run_command(main)\n"
    (jobs / f"{name}.py").write_text(code)
    program = f"{sys.executable} {jobs / name}.py"
    settings = {"nodes": "2", "time": "10", "program": program, **fields}
    (jobs / f"{name}.sbatch").write_text(batch_script(plan(name=name, **settings)))
    return cluster.submit(jobs / f"{name}.sbatch", PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu")


def wait_for(path: Path, cluster, job_id: str) -> None:
    """Wait until the job has created a file."""
    until = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < until, cluster.output(job_id)
        time.sleep(0.1)


JOIN = """
runtime.simulate(1)
job = runtime.join()
import jax
from jax.experimental import multihost_utils
"""


def test_gpus_are_handed_out_as_the_resolver_expects(cluster):
    """Test full nodes, tasks that share GPUs, and GPUs bound to tasks."""
    body = """
    plan = runtime.resolve(os.environ)
    print("took", plan.process_id, os.environ["CUDA_VISIBLE_DEVICES"], plan.local_device_ids)
    """
    programs = {
        "node": ({"gpus_per_node": 2}, {"0 0,1 None", "1 0,1 None"}),
        "gpu": (
            {"gpus_per_node": 2, "tasks_per_node": 2},
            {"0 0,1 (0,)", "1 0,1 (1,)", "2 0,1 (0,)", "3 0,1 (1,)"},
        ),
        "task": (
            {"tasks_per_node": 2, "sbatch": ("--gpus-per-task=1",)},
            {"0 0 None", "1 1 None", "2 0 None", "3 1 None"},
        ),
    }
    for name, (fields, lines) in programs.items():
        job_id = submit(cluster, f"gpus-{name}", body, **fields)
        assert cluster.wait(job_id) == "COMPLETED", cluster.output(job_id)
        output_lines = cluster.output(job_id).splitlines()
        assert {line[5:] for line in output_lines if line.startswith("took ")} == lines


def test_an_elastic_job_gets_all_nodes_that_are_idle_and_its_tasks_on_each(cluster):
    """Three of four nodes are available: each runs two tasks."""
    body = "print('task', os.environ['SLURMD_NODENAME'], os.environ['SLURM_LOCALID'])"
    fields = {"nodes": "2-4", "tasks_per_node": 2, "cpus_per_task": 2}
    job_id = submit(cluster, "idle", body, **fields)
    assert cluster.wait(job_id) == "COMPLETED", cluster.output(job_id)
    lines = {line for line in cluster.output(job_id).splitlines() if line.startswith("task ")}
    assert lines == {f"task n{node} {local}" for node in (1, 2, 3) for local in (0, 1)}


def test_a_job_whose_node_is_lost_goes_on_with_another(tmp_path_factory):
    """The job continues on an idle node."""
    body = """
    stop = runtime.Preemption()
    (RUN / f"on-{job.host}-{ATTEMPT}").touch()
    for step in range(100000):
        multihost_utils.process_allgather(jax.numpy.ones(1))
        (RUN / f"running-{ATTEMPT}").touch()
        if ATTEMPT:
            return 0
        time.sleep(0.05)
    """
    with real_slurm.RealSlurm(tmp_path_factory.mktemp("lost")) as cluster:
        job_id = submit(cluster, "lost", JOIN + textwrap.dedent(body))
        run = cluster.root / f"jobs/runs/lost-{job_id}"
        wait_for(run / "running-0", cluster, job_id)
        cluster.power_off(2)
        wait_for(run / "running-1", cluster, job_id)
        assert cluster.wait(job_id) == "COMPLETED", cluster.output(job_id)
        assert {path.name for path in run.glob("on-*-1")} == {"on-n1-1", "on-n3-1"}


def test_a_cancelled_job_stays_cancelled(cluster):
    """The job is not requeued."""
    body = """
    stop = runtime.Preemption()
    RUN.mkdir(parents=True, exist_ok=True)
    (RUN / "running-0").touch()
    while not stop.preempted():
        time.sleep(0.05)
    return runtime.EXIT_PREEMPTED
    """
    job_id = submit(cluster, "cancel", body, nodes="1")
    wait_for(cluster.root / f"jobs/runs/cancel-{job_id}/running-0", cluster, job_id)
    cluster.run("scancel", job_id)
    assert cluster.wait(job_id) == "CANCELLED"
    time.sleep(8)  # a requeued job would run again after 7 s here
    assert cluster.job(job_id)["JobState"] == "CANCELLED"


def train(cluster, name: str) -> tuple[Path, str]:
    """Submit training on two nodes; return its run directory and the job id."""
    run, script = cluster.root / f"jobs/runs/{name}", cluster.root / f"jobs/{name}.sbatch"
    settings = {"nodes": "2", "time": "10", "python": sys.executable, "run_dir": str(run)}
    script.write_text(batch_script(plan(name=name, arguments=TRAINING, **settings)))
    return run, cluster.submit(script, PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu")


@pytest.fixture(scope="module")
def uninterrupted(cluster) -> dict[int, str]:
    """Return the losses of uninterrupted training."""
    run, job_id = train(cluster, "whole")
    assert cluster.wait(job_id, timeout_s=300) == "COMPLETED", cluster.output(job_id)
    assert max(losses(run)) == 120
    return losses(run)


def test_training_that_was_cancelled_goes_on_when_it_is_submitted_again(cluster, uninterrupted):
    """Cancel training on two nodes and resubmit the script: the losses are bit-identical."""
    run, first = train(cluster, "parted")
    wait_for(run / "checkpoints/40", cluster, first)
    cluster.run("scancel", first)
    assert cluster.wait(first) == "CANCELLED"
    assert 40 <= max(losses(run)) < 120, "it had ended before it was cancelled"
    _, job_id = train(cluster, "parted")
    assert cluster.wait(job_id, timeout_s=300) == "COMPLETED", cluster.output(job_id)
    assert losses(run) == uninterrupted


@pytest.mark.parametrize("number", [0, 1])
def test_training_of_which_a_process_is_killed_is_queued_again(cluster, uninterrupted, number):
    """After SIGKILL of one process the job requeues itself; the losses are bit-identical."""
    run, job_id = train(cluster, f"killed-{number}")
    wait_for(run / "checkpoints/40", cluster, job_id)
    os.kill(process_of(job_id, number), signal.SIGKILL)
    assert cluster.wait(job_id, timeout_s=300) == "COMPLETED", cluster.output(job_id)
    assert cluster.job(job_id)["Restarts"] == "1", cluster.output(job_id)
    assert losses(run) == uninterrupted


def process_of(job_id: str, number: int) -> int:
    """Return the pid of a training process, by its number in the job."""
    variables = {f"SLURM_JOB_ID={job_id}", f"SLURM_PROCID={number}"}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_text().split("\0")
            if "jaxdist.train" in words and "srun" not in words[0]:
                environ = set((process / "environ").read_text(errors="replace").split("\0"))
                if variables <= environ:
                    return int(process.name)
    raise LookupError(f"no training process {number} of job {job_id}")


def test_the_runs_of_a_sweep_are_the_tasks_of_an_array(cluster):
    """Train two learning rates on one node each; the sweep then has no unfinished run."""
    script, runs = cluster.root / "jobs/sweep.sbatch", cluster.root / "jobs/sweep"
    flags = [*TINY, "--steps=5", "--grid=optim.peak_lr=1e-4,1e-3", f"--run-dir={runs}"]
    slurm = ["time=10", "name=sweep", f"python={sys.executable}", f"script={script}"]
    sweep = [sys.executable, "-m", "jaxdist.sweep", *flags]
    array = [*sweep, *(f"--slurm={flag}" for flag in slurm)]
    done = subprocess.run(array, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    job_id = cluster.submit(script, PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu")
    tasks = [f"{job_id}_{task}" for task in range(2)]
    for task in tasks:
        assert cluster.wait(task, timeout_s=300) == "COMPLETED", cluster.output(task)
    files = sorted(runs.glob("*/metrics.jsonl"))
    assert [sorted(losses(path.parent)) for path in files] == [[1, 2, 3, 4, 5]] * 2
    ended = [json.loads((path.parent / "summary.json").read_text()) for path in files]
    assert {summary["exit_reason"] for summary in ended} == {"finished"}
    done = subprocess.run(sweep, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("already finished") == 2, done.stdout
