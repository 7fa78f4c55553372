"""Batch scripts: their text, and what they do on a real SLURM started for the test."""

import json
import os
import shlex
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import real_slurm

from jaxdist.tools.launch.slurm import main
from jaxdist.tools.launch.slurm_script import BatchPlan, batch_script

ROOT = Path(__file__).parent.parent


def plan(**fields) -> BatchPlan:
    return BatchPlan(**{"args": [], "time": "1:00:00", **fields})


def test_script_asks_for_what_the_flags_say():
    text = batch_script(
        plan(
            name="llama",
            nodes=2,
            gpus_per_node=8,
            cpus_per_task=16,
            partition="gpu",
            account="physics",
            modules=("cuda/13",),
            setup=("source .venv/bin/activate",),
            sbatch=("--exclusive",),
            args=["--config", "a b.toml", "--mesh=fsdp=16"],
        )
    )
    lines = text.splitlines()
    for line in (
        "#SBATCH --job-name=llama",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=1",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --cpus-per-task=16",
        "#SBATCH --partition=gpu",
        "#SBATCH --account=physics",
        "#SBATCH --signal=B:USR1@180",
        "#SBATCH --requeue",
        "#SBATCH --exclusive",
        "module load cuda/13",
        "source .venv/bin/activate",
    ):
        assert line in lines
    assert "--config 'a b.toml' \\" in text
    assert "--qos" not in text and "--mem" not in text


@pytest.mark.parametrize(
    ("container", "text"),
    [
        ("image.sif", "apptainer exec --nv image.sif python -m jaxdist.train"),
        ("nvcr.io#nvidia/jax:26.01", "--container-image='nvcr.io#nvidia/jax:26.01'"),
        ("", "\n    python -m jaxdist.train"),
    ],
)
def test_containers(container, text):
    assert text in batch_script(plan(container=container))


@pytest.mark.parametrize("text", ["1-2", "1:2"])
def test_a_range_of_nodes_makes_an_elastic_job(capsys, text):
    flags = ["--nodes", text, "--tasks-per-node", "4", "--time", "60", "--dry-run"]
    assert main([*flags, "--gpus-per-node", "8", "--", "--mesh", "dp=16"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --nodes=1-2\n" in script and "--mesh.elastic=true" in script
    assert '--nodes="$nodes" --ntasks-per-node=4' in script
    # A number of tasks in the header would get the fewest nodes, however many are idle.
    assert "#SBATCH --mincpus=4\n" in script and "#SBATCH --ntasks" not in script
    assert main([*flags, "--gpus-per-node", "8", "--program", "./a.out"]) == 0
    script = capsys.readouterr().out
    assert '--nodes="$SLURM_JOB_NUM_NODES" --ntasks-per-node=4' in script
    assert "elastic" not in script and "legal" not in script
    assert main(["--nodes", "2", "--time", "60", "--dry-run"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --nodes=2\n" in script and "elastic" not in script
    assert "NUM_NODES" not in script and "legal" not in script


def elastic(*words: str, nodes: str = "1-8", mesh: str = "dp=8", batch: int = 8) -> list[str]:
    """The command that writes an elastic job, its flags before the dashes."""
    train = [f"--mesh={mesh}", f"--train.global_batch_size={batch}"]
    return ["--nodes", nodes, "--time", "60", "--dry-run", *words, "--", *train]


@pytest.mark.parametrize(
    ("command", "counts"),
    [
        (elastic(), "1 2 4 8"),
        (elastic(nodes="2-7"), "2 4"),  # seven were never used
        (elastic(mesh="dp=12", batch=12, nodes="3-12"), "3 4 6 12"),
        (elastic("--tasks-per-node=2"), "1 2 4"),
        (elastic("--gpus-per-node=4", mesh="dp=16", batch=16), "1 2 4"),
        # Of one process some devices may be idle, of several not.
        (elastic("--gpus-per-node=6", mesh="dp=24", batch=24), "1 2 4"),
        (elastic("--gpus-per-node=5", mesh="fsdp=8", batch=8), "1"),
        ([*elastic(mesh="dp=2,tp=2"), "--simulate=2"], "1 2"),
    ],
    ids=["cpu", "range", "batch12", "tasks", "gpus", "six", "idle", "simulated"],
)
def test_an_elastic_job_knows_its_legal_numbers_of_nodes(capsys, command, counts):
    assert main(command) == 0
    said = capsys.readouterr()
    assert f"\nfor count in {counts}; do\n" in said.out
    least, most = counts.split()[0], counts.split()[-1]
    assert f"#SBATCH --nodes={least}-{most}\n" in said.out  # no node is paid for in vain
    is_narrower = f"{least}-{most}" != command[1]
    assert (f"SLURM is asked for {least}-{most}." in said.err) == is_narrower


@pytest.mark.parametrize(
    ("command", "texts"),
    [
        (
            elastic(nodes="3-3"),
            ["--nodes 3-3 with 1 devices on each never makes", "with 1, 2, 4, 8 devices. Use a"],
        ),
        (elastic("--gpus-per-node=3", nodes="2-3"), ["Change --gpus-per-node, --tasks-per-node"]),
        (elastic("--sbatch=--gpus-per-task=1"), ["without --gpus-per-node: how many devices"]),
        (elastic(mesh="dp=3"), ["global_batch_size=8 is not a multiple of 3"]),
        (elastic(mesh="auto"), ["mesh.elastic with mesh.shape='auto'"]),
        ([*elastic("--time=soon"), "--no-such=1"], ["--time 'soon'", "--no_such is not a setting"]),
    ],
    ids=["nodes", "devices", "hidden", "mesh", "sizes", "both"],
)
def test_what_an_elastic_job_can_never_run_is_refused_when_it_is_written(capfd, command, texts):
    assert main(command) == 2
    said = capfd.readouterr()
    assert all(text in said.err for text in texts), said.err
    assert said.out == ""


@pytest.mark.parametrize(
    ("given", "used", "line"),
    [
        (1, None, "slurm: 1 nodes given, no mesh is legal for them: at least 2 are needed"),
        (2, 2, ""),
        (3, 2, "slurm: 3 nodes given, no mesh is legal for them: using 2"),
        (4, 4, ""),
        (7, 6, "slurm: 7 nodes given, no mesh is legal for them: using 6"),
        (8, 8, ""),
        (12, 8, "slurm: 12 nodes given, no mesh is legal for them: using 8"),
    ],
)
def test_a_job_runs_on_the_most_legal_nodes_of_those_given(tmp_path, given, used, line):
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/bash\necho "$@" >started\necho 0 >"$JAXDIST_VERDICT_FILE"\n')
    srun.chmod(0o755)
    text = batch_script(plan(nodes=8, min_nodes=2, node_counts=(2, 4, 6, 8), tasks_per_node=3))
    environ = {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "it", "SLURM_JOB_NUM_NODES": str(given)}
    done = subprocess.run(
        ["bash"],
        input=text,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        timeout=60,
    )
    said = [one for one in done.stdout.splitlines() if "nodes given" in one]
    assert said == ([line] if line else []), done.stderr
    assert done.returncode == (2 if used is None else 0)
    started = tmp_path / "started"
    assert started.exists() == (used is not None)
    if used is not None:
        assert f"--nodes={used} --ntasks-per-node=3 " in started.read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("2-1", "--nodes 2:1: MAX is smaller than MIN. Use --nodes 1:2."),
        ("0-2", "--nodes 0:2: MIN is 0. Use MIN ≥ 1"),
        ("all", "--nodes 'all' is neither a number nor a range"),
    ],
)
def test_a_bad_range_of_nodes_says_what_is_allowed(capsys, text, message):
    assert main(["--nodes", text, "--time", "60"]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("container", ["", "image.sif", "nvcr.io/jax:1"])
def test_script_is_valid_shell(container):
    text = batch_script(plan(container=container, args=["--name", "it's"]))
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"time": ""}, "--time '' is not a time limit"),
        ({"time": "tomorrow"}, "--time 'tomorrow' is not a time limit"),
        ({"nodes": 0}, "--nodes 0 is too small"),
        ({"signal_s": 10}, "--signal-s 10 is too short"),
        ({"gpus_per_node": 8, "tasks_per_node": 3}, "cannot share --gpus-per-node 8 equally"),
        ({"name": "a b"}, "--name 'a b' is not a job name"),
    ],
)
def test_a_plan_names_what_is_wrong(fields, text):
    assert any(text in line for line in plan(**fields).problems())


@pytest.mark.parametrize(
    ("mesh", "warned"),
    [("tp=8", False), ("dp=2,tp=16", True), ("fsdp=2,tensor=3", True), ("fsdp=16", False)],
)
def test_a_tensor_axis_across_nodes_is_warned_about(mesh, warned):
    remarks = plan(gpus_per_node=8, args=["--mesh", mesh]).remarks()
    assert bool(remarks) == warned
    assert all("crosses nodes of 8 GPUs" in line for line in remarks)


def test_dry_run_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["--time", "60", "--dry-run", "--", "--steps", "5"]) == 0
    assert "#SBATCH --time=60" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert main(["--time", "60", "--name", "mine"]) == 0
    assert (tmp_path / "mine.sbatch").exists()
    assert "sbatch mine.sbatch" in capsys.readouterr().out


def test_bad_flags_end_with_2(capsys):
    assert main(["--time", "never", "--nodes", "0"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.mark.parametrize(
    "path", sorted((ROOT / "scripts/slurm").glob("*.sbatch")), ids=lambda path: path.name
)
def test_checked_in_examples_are_what_the_command_writes(path):
    text = path.read_text()
    command = next(line for line in text.splitlines() if line.startswith("# python -m"))
    words = shlex.split(command[2:])
    done = subprocess.run(
        [sys.executable, *words[1:4], "--dry-run", *words[4:]],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert text.replace(command + "\n", "") == done.stdout


# --- on a real SLURM ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    reason = real_slurm.missing()
    if reason:
        if os.environ.get("JAXDIST_REQUIRE_SLURM"):
            pytest.fail(reason)
        pytest.skip(reason)
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
    settings = {"nodes": 2, "time": "10", "program": f"{sys.executable} {jobs / name}.py", **fields}
    (jobs / f"{name}.sbatch").write_text(batch_script(plan(name=name, **settings)))
    return cluster.submit(jobs / f"{name}.sbatch", PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu")


def wait_for(path: Path, cluster, job_id: str) -> None:
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


@pytest.mark.slow
def test_two_nodes_join_and_the_job_is_done(cluster):
    body = JOIN + "print(job.table())\nprint(multihost_utils.process_allgather(jax.numpy.ones(1)))"
    job_id = submit(cluster, "join", body)
    assert cluster.wait(job_id) == "COMPLETED", cluster.output(job_id)
    out = cluster.output(job_id)
    assert "verdict 0, srun 0, signal none" in out
    assert "0        n1" in out and "1        n2" in out


@pytest.mark.slow
def test_gpus_are_handed_out_as_the_resolver_expects(cluster):
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


@pytest.mark.slow
def test_a_job_that_is_told_of_its_limit_saves_and_queues_itself_again(cluster):
    body = """
    stop = runtime.Preemption()
    saved = max([int(p.name) for p in (RUN / "checkpoints").glob("*")], default=0)
    for step in range(saved + 1, 100000):
        multihost_utils.process_allgather(jax.numpy.ones(1))
        (RUN / f"running-{ATTEMPT}").touch()
        if ATTEMPT and step > saved + 3:
            return 0
        if stop.preempted():
            (RUN / "checkpoints" / str(step) / "manifest.json").mkdir(parents=True, exist_ok=True)
            print("saved", step)
            return runtime.EXIT_PREEMPTED
        time.sleep(0.05)
    """
    job_id = submit(cluster, "limit", JOIN + textwrap.dedent(body))
    run = cluster.root / f"jobs/runs/limit-{job_id}"
    wait_for(run / "running-0", cluster, job_id)
    # What --signal=B:USR1@... does ahead of the limit, which itself is minutes away.
    cluster.run("scancel", "--signal=USR1", "--batch", job_id)
    assert cluster.wait(job_id, timeout_s=240) == "COMPLETED", cluster.output(job_id)
    out = cluster.output(job_id)
    assert "attempt 0 ended: verdict 75" in out and "signal USR1" in out
    assert "queueing again from checkpoint" in out
    assert "attempt 1 ended: verdict 0" in out


TINY = [
    *("--model.num_layers=1", "--model.d_model=32", "--model.num_heads=2"),
    *("--model.num_kv_heads=2", "--train.global_batch_size=4", "--train.seq_len=32"),
    *("--eval.interval_steps=0", "--eval.final_max_batches=1"),
]


@pytest.mark.slow
def test_training_that_is_queued_again_ends_with_the_bits_of_one_that_was_not(cluster):
    args = ["--simulate=1", "--mesh=dp=2", "--steps=120", *TINY]
    args += ["--checkpoint.save_interval_steps=40"]
    found = {}
    for name in ("whole", "parted"):
        script = cluster.root / f"jobs/{name}.sbatch"
        settings = plan(name=name, nodes=2, time="10", python=sys.executable, args=args)
        script.write_text(batch_script(settings))
        job_id = cluster.submit(script, PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu")
        run = cluster.root / f"jobs/runs/{name}-{job_id}"
        if name == "parted":
            wait_for(run / "checkpoints/40", cluster, job_id)
            cluster.run("scancel", "--signal=USR1", "--batch", job_id)
        assert cluster.wait(job_id, timeout_s=300) == "COMPLETED", cluster.output(job_id)
        found[name] = losses(run)
        restarts = cluster.job(job_id)["Restarts"]
        assert restarts == ("1" if name == "parted" else "0"), cluster.output(job_id)
    assert len(found["whole"]) == 120
    assert found["parted"] == found["whole"]


@pytest.mark.slow
def test_an_elastic_job_gets_all_nodes_that_are_idle_and_its_tasks_on_each(cluster):
    body = "print('task', os.environ['SLURMD_NODENAME'], os.environ['SLURM_LOCALID'])"
    fields = {"nodes": 4, "min_nodes": 2, "tasks_per_node": 2, "cpus_per_task": 2}
    job_id = submit(cluster, "idle", body, **fields)
    assert cluster.wait(job_id) == "COMPLETED", cluster.output(job_id)
    said = {line for line in cluster.output(job_id).splitlines() if line.startswith("task ")}
    assert said == {f"task n{node} {local}" for node in (1, 2, 3) for local in (0, 1)}


@pytest.mark.slow
def test_a_job_given_a_number_of_nodes_without_a_mesh_trains_on_fewer(cluster):
    script = cluster.root / "jobs/uneven.sbatch"
    flags = ["--name=uneven", "--nodes=2-4", "--time=10", f"--python={sys.executable}"]
    args = ["--simulate=1", "--mesh=dp=4", "--steps=5", *TINY]
    assert main([*flags, f"--script={script}", "--", *args]) == 0
    job_id = cluster.submit(script, PYTHONPATH=str(ROOT), JAX_PLATFORMS="cpu")
    assert cluster.wait(job_id, timeout_s=300) == "COMPLETED", cluster.output(job_id)
    out = cluster.output(job_id)
    assert "slurm: 3 nodes given, no mesh is legal for them: using 2" in out
    assert "2 of the 4 devices of dp=4 are there" in out
    assert "attempt 0 ended: verdict 0, srun 0" in out
    run = cluster.root / f"jobs/runs/uneven-{job_id}"
    assert sorted(losses(run)) == [1, 2, 3, 4, 5]


def losses(run: Path) -> dict[int, str]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {r["step"]: float(r["loss"]).hex() for r in records if r["kind"] == "train"}


@pytest.mark.slow
def test_a_job_whose_node_is_lost_goes_on_with_another(tmp_path_factory):
    reason = real_slurm.missing()
    if reason:
        pytest.skip(reason)
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


@pytest.mark.slow
def test_a_cancelled_job_stays_cancelled(cluster):
    body = """
    stop = runtime.Preemption()
    RUN.mkdir(parents=True, exist_ok=True)
    (RUN / "running-0").touch()
    while not stop.preempted():
        time.sleep(0.05)
    return runtime.EXIT_PREEMPTED
    """
    job_id = submit(cluster, "cancel", body, nodes=1)
    wait_for(cluster.root / f"jobs/runs/cancel-{job_id}/running-0", cluster, job_id)
    cluster.run("scancel", job_id)
    assert cluster.wait(job_id) == "CANCELLED"
    time.sleep(8)  # a requeued job would run again after 7 s here
    assert cluster.job(job_id)["JobState"] == "CANCELLED"


@pytest.mark.slow
def test_bad_configuration_ends_the_job_and_crashes_are_counted(cluster):
    bad = "from jaxdist.core.types import ConfigError\nraise ConfigError(['mesh dp=3 is bad'])"
    job_id = submit(cluster, "bad", bad, nodes=1)
    assert cluster.wait(job_id) == "FAILED"
    assert "verdict 2" in cluster.output(job_id) and cluster.job(job_id)["Restarts"] == "0"
    job_id = submit(cluster, "crash", "raise OSError('boom')", nodes=1, max_crashes=1)
    assert cluster.wait(job_id) == "FAILED", cluster.output(job_id)
    assert cluster.job(job_id)["Restarts"] == "1"
    assert "2 crashes without a new checkpoint: giving up" in cluster.output(job_id)
