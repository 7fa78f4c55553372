"""What a real SLURM does to a job beyond the three jobs of `tests/test_slurm_jobs.py`.

    python -m pytest scripts/bench/slurm_scenarios.py      # as root; about two minutes

How it hands out GPUs, gives nodes to an elastic job, takes a lost node away, and cancels. The test
suite has the rules of the batch script with commands that play SLURM.
"""

import sys
import textwrap
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import real_slurm  # noqa: E402, after the path
from test_slurm import plan  # noqa: E402

from jaxdist.tools.launch.slurm_script import batch_script  # noqa: E402


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A SLURM of three nodes."""
    assert not real_slurm.missing(), real_slurm.missing()
    with real_slurm.RealSlurm(tmp_path_factory.mktemp("slurm")) as slurm:
        yield slurm


def submit(cluster, name: str, body: str, **fields) -> str:
    """Submit a job of two nodes whose program's `main` is `body`; returns the job id."""
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
    """Wait until the job has made a file."""
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
    """Whole nodes, tasks that share GPUs, and GPUs bound to tasks."""
    body = """
    plan = runtime.resolve(os.environ)
    print("took", plan.process_id, os.environ["CUDA_VISIBLE_DEVICES"], plan.local_device_ids)
    """
    wanted = {
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
    for name, (fields, lines) in wanted.items():
        job_id = submit(cluster, f"gpus-{name}", body, **fields)
        assert cluster.wait(job_id) == "COMPLETED", cluster.output(job_id)
        said = cluster.output(job_id).splitlines()
        assert {line[5:] for line in said if line.startswith("took ")} == lines


def test_an_elastic_job_gets_all_nodes_that_are_idle_and_its_tasks_on_each(cluster):
    """Three of four nodes are there: two tasks on each."""
    body = "print('task', os.environ['SLURMD_NODENAME'], os.environ['SLURM_LOCALID'])"
    fields = {"nodes": "2-4", "tasks_per_node": 2, "cpus_per_task": 2}
    job_id = submit(cluster, "idle", body, **fields)
    assert cluster.wait(job_id) == "COMPLETED", cluster.output(job_id)
    said = {line for line in cluster.output(job_id).splitlines() if line.startswith("task ")}
    assert said == {f"task n{node} {local}" for node in (1, 2, 3) for local in (0, 1)}


def test_a_job_whose_node_is_lost_goes_on_with_another(tmp_path_factory):
    """The job goes on with a node that was idle."""
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
    """It is not queued again."""
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
