"""Batch scripts: their text, and their behavior with stand-ins for SLURM's commands."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from launched import sizes_here
from refusals import refused

from jaxdist.settings import problems_of
from jaxdist.tools.launch import slurm
from jaxdist.tools.launch.slurm import Nodes, SlurmConfig, batch_script, main

ROOT = Path(__file__).parent.parent


def plan(**fields) -> SlurmConfig:
    return SlurmConfig(**{"time": "1:00:00", **fields})


@pytest.fixture
def no_child(monkeypatch):
    monkeypatch.setattr(slurm, "read_sizes", sizes_here)


def test_flags_without_an_example_reach_the_script():
    """Scripts in `scripts/slurm` are compared completely, see below."""
    text = batch_script(
        plan(
            partition="gpu",
            account="physics",
            module=("cuda/13",),
            sbatch=("--exclusive",),
            arguments=["--config", "a b.toml", "--mesh=fsdp=16"],
        )
    )
    added = {"#SBATCH --partition=gpu", "#SBATCH --account=physics", "#SBATCH --exclusive"}
    assert {*added, "module load cuda/13"} <= {*text.splitlines()}
    assert "--config 'a b.toml' \\" in text
    assert "--qos" not in text and "--mem" not in text


@pytest.mark.parametrize(
    ("container", "texts"),
    [
        (
            "image.sif",
            ["apptainer exec --nv --bind /data --bind '/a b:/inside' --bind /big/run image.sif "
             "python3.12 -m jaxdist.train"],
        ),
        (
            "image/",
            ["ch-run --write --set-env", "--bind /data --bind '/a b:/inside' --bind /big/run --cd",
             '--cd "$PWD" image/ -- python3.12 -m jaxdist.train'],
        ),
        (
            "nvcr.io#nvidia/jax:26.01",
            ["--container-image='nvcr.io#nvidia/jax:26.01'",
             "\"$PWD:$PWD\",/data:/data,'/a b:/inside',/big/run:/big/run"],
        ),
        ("", ["\n    python3.12 -m jaxdist.train"]),
    ],
)  # fmt: skip
def test_a_container_mounts_the_run_directory_and_the_configured_paths(container, texts):
    fields = dict(run_dir="/big/run", mount=("/data", "/a b:/inside"), python="python3.12")
    script = batch_script(plan(container=container, arguments=["--name", "it's"], **fields))
    assert [text for text in texts if text not in script] == []
    assert not subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr


@pytest.mark.parametrize("text", ["1-2", "1:2"])
def test_a_range_of_nodes_creates_an_elastic_job(capsys, no_child, text):
    flags = ["--nodes", text, "--tasks-per-node", "4", "--time", "60", "--dry-run"]
    assert main([*flags, "--gpus-per-node", "8", "--", "--mesh", "dp=16"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --nodes=1-2\n" in script and "--mesh.elastic=true" in script
    assert '--nodes="$nodes" --ntasks-per-node=4' in script
    # With a number of tasks in the header SLURM would allocate the fewest nodes.
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
        # One process may leave some devices idle, several may not.
        (elastic("--gpus-per-node=6", mesh="dp=24", batch=24), "1 2 4"),
        (elastic("--gpus-per-node=5", mesh="fsdp=8", batch=8), "1"),
        ([*elastic(mesh="dp=2,tp=2"), "--simulate=2"], "1 2"),
    ],
)
def test_the_script_of_an_elastic_job_lists_legal_numbers_of_nodes(
    capsys, no_child, command, counts
):
    assert main(command) == 0
    captured = capsys.readouterr()
    assert re.findall(r"^for count in (.*); do$", captured.out, re.M) == [counts]
    least, most = counts.split()[0], counts.split()[-1]
    assert f"#SBATCH --nodes={least}-{most}\n" in captured.out  # no node is allocated for nothing
    is_narrower = f"{least}-{most}" != command[1]
    assert (f"requests {least}-{most}." in captured.err) == is_narrower


@pytest.mark.parametrize(
    ("command", "facts"),
    [
        (elastic(nodes="3-3"), ["--nodes 3-3", "1 devices each", "1, 2, 4, 8 devices"]),
        (elastic("--gpus-per-node=3", nodes="2-3"), ["--gpus-per-node, --tasks-per-node"]),
    ],
)
def test_an_impossible_elastic_job_is_rejected(no_child, command, facts):
    with refused(*facts):
        main(command)


FAKES = {
    "srun": 'printf "%s\\n" "$@" >started; {srun}',
    "squeue": "echo {reason}",
    # SLURM ends the script of a job that it queues again.
    "scontrol": 'echo "$@" >requeued; kill -TERM $PPID',
}


def run_script(folder: Path, text: str, srun: str, reason: str = "None", **variables: object):
    """Run a batch script by bash in `folder`, with stand-ins for SLURM's commands.

    `srun` is the shell code that srun runs, `reason` the one that squeue prints for the job.
    Return the exit code, the words of `scontrol` ([] if it was not called), and the output.
    """
    for name, body in FAKES.items():
        (folder / name).write_text("#!/bin/bash\n" + body.format(srun=srun, reason=reason))
        (folder / name).chmod(0o755)
    requeued = folder / "requeued"
    requeued.unlink(missing_ok=True)
    slurm = {"JOB_ID": 1, "JOB_NAME": "it", "JOB_NUM_NODES": 1, "RESTART_COUNT": 0, **variables}
    environ = {f"SLURM_{name}": str(value) for name, value in slurm.items()}
    environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash"], input=text, capture_output=True, text=True, cwd=folder, env=environ, timeout=60
    )
    assert not done.stderr, done.stderr
    words = requeued.read_text().split() if requeued.exists() else []
    return done.returncode, words, done.stdout


class Script:
    """Batch script with the run directory `folder/run`; see `run_script`."""

    def __init__(
        self, folder: Path, srun: str, *, reason: str = "None", nodes: Nodes | None = None, **fields
    ):
        self.folder, self.stand_ins = folder, (srun, reason)
        self.text = batch_script(plan(run_dir=str(folder / "run"), **fields), nodes)

    def run(self, restarts: int = 0, nodes: int = 1) -> tuple[int, bool]:
        variables = {"JOB_NUM_NODES": nodes, "RESTART_COUNT": restarts}
        code, requeued, self.out = run_script(self.folder, self.text, *self.stand_ins, **variables)
        return code, bool(requeued)


@pytest.mark.parametrize(
    ("num_nodes", "used", "is_reported"),
    [(1, None, True), (2, 2, False), (3, 2, True), (4, 4, False), (7, 6, True), (12, 8, True)],
)
def test_a_job_uses_the_largest_legal_number_of_its_nodes(tmp_path, num_nodes, used, is_reported):
    script = Script(
        tmp_path,
        'echo 0 >"$JAXDIST_EXIT_CODE_FILE"',
        nodes=Nodes(most=8, least=2, legal=(2, 4, 6, 8)),
        tasks_per_node=3,
    )
    code, _ = script.run(nodes=num_nodes)
    assert code == (2 if used is None else 0)
    assert (f"{num_nodes} nodes allocated" in script.out) == is_reported
    started = tmp_path / "started"
    assert started.exists() == (used is not None)
    if used is not None:
        assert {f"--nodes={used}", "--ntasks-per-node=3"} <= {*started.read_text().split()}


EXIT_CODE = 'echo {} >"$JAXDIST_EXIT_CODE_FILE"; exit {}'


@pytest.mark.parametrize(
    ("srun", "reason", "expected"),
    [
        (EXIT_CODE.format(0, 0), "None", (0, False)),
        (EXIT_CODE.format(0, 1), "None", (0, False)),  # another process failed after the last save
        (EXIT_CODE.format(2, 2), "None", (2, False)),
        (EXIT_CODE.format(75, 75), "None", (75, True)),
        ("exit 1", "None", (75, True)),
        ("exit 0", "None", (0, False)),  # a program that writes no exit code, and succeeds
        ("exit 2", "None", (2, False)),
        (EXIT_CODE.format(85, 85), "None", (85, False)),
        (EXIT_CODE.format(87, 87), "None", (87, False)),
        (EXIT_CODE.format(130, 130), "None", (130, False)),
        # The time limit is near: USR1 is passed on, and srun's processes save.
        (
            "trap 'echo 75 >\"$JAXDIST_EXIT_CODE_FILE\"; exit 75' USR1; kill -USR1 $PPID; "
            "sleep 20 >&- 2>&- & wait",  # nor does it keep the script's output open
            "None",
            (75, True),
        ),
        # scancel: TERM alone, and SLURM does not name the time limit.
        ("kill -TERM $PPID; sleep 0.2; " + EXIT_CODE.format(75, 75), "None", (75, False)),
        ("kill -TERM $PPID; sleep 0.2; " + EXIT_CODE.format(75, 75), "TimeLimit", (75, True)),
    ],
)
def test_the_script_requeues_jobs_that_can_continue(tmp_path, srun, reason, expected):
    script = Script(tmp_path, srun, reason=reason)
    assert script.run() == expected
    if expected[0] == 0:  # SLURM 24.11 may start a finished job again
        (tmp_path / "started").unlink()
        assert script.run() == (0, False)
        assert not (tmp_path / "started").exists()


SAVES = """
at="run/checkpoints/1$SLURM_RESTART_COUNT"; mkdir -p "$at"; touch "$at/manifest.json"; exit 9
"""


def test_the_script_gives_up_after_crashes_without_a_new_checkpoint(tmp_path):
    script = Script(tmp_path, "exit 9", max_restarts=1)
    assert script.run() == (75, True)
    assert script.run(restarts=1) == (9, False)
    saves = Script(tmp_path, SAVES, max_restarts=1)
    assert saves.run(restarts=1) == (75, True)  # a new checkpoint: the count starts again
    assert saves.run(restarts=50) == (75, False)  # queued again 50 times: enough


FALLS_BACK = """
at="run/checkpoints/$((100 - SLURM_RESTART_COUNT))"; mkdir -p "$at"; touch "$at/manifest.json"
touch "run/checkpoints/100/CORRUPT"; exit 9
"""


def test_new_checkpoints_below_a_corrupt_one_count_for_the_script(tmp_path):
    script = Script(tmp_path, FALLS_BACK, max_restarts=1)
    for restarts in range(1, 4):
        (tmp_path / "run" / "checkpoints" / "100").mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / "checkpoints" / "100" / "manifest.json").touch()
        assert script.run(restarts=restarts) == (75, True)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"nodes": "0"}, "--nodes 0"),
        ({"nodes": "2-1"}, "--nodes 1:2"),
        ({"nodes": "all"}, "--nodes 'all'"),
        ({"signal_s": 10}, "signal_s=10"),
        ({"time": "1"}, "180 s"),
        ({"partition": "a\n#SBATCH --x"}, "contains a line break"),
        ({"gpus_per_node": 8, "tasks_per_node": 3}, "--gpus-per-node 8"),
        ({"name": "a b"}, "--name 'a b'"),
    ],
)
def test_problems_of_the_flags_are_reported(fields, text):
    assert any(text in line for line in problems_of(plan(**fields)))


@pytest.mark.parametrize(
    ("mesh", "warned"),
    [("tp=8", False), ("dp=2,tp=16", True), ("fsdp=2,tensor=3", True), ("fsdp=16", False)],
)
def test_a_tensor_axis_across_nodes_gives_a_warning(mesh, warned):
    warnings = list(plan(gpus_per_node=8, cpus_per_task=8, arguments=["--mesh", mesh]).warnings())
    assert len(warnings) == warned and all("nodes of 8 GPUs" in warning for warning in warnings)


def test_gpus_without_cores_give_a_warning():
    (warning,) = plan(gpus_per_node=2).warnings()
    assert "--cpus-per-task" in warning
    assert [*plan(gpus_per_node=2, cpus_per_task=1).warnings(), *plan().warnings()] == []


def test_dry_run_writes_nothing(tmp_path, monkeypatch, capsys, no_child):
    monkeypatch.chdir(tmp_path)
    assert main(["--time", "60", "--dry-run", "--", "--steps", "5"]) == 0
    assert "#SBATCH --time=60" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
    assert main(["--time", "60", "--name", "mine"]) == 0
    assert (tmp_path / "mine.sbatch").exists()
    assert "sbatch mine.sbatch" in capsys.readouterr().out
    with refused("--time is missing"):
        main(["--dry-run"])


def test_training_arguments_are_checked_when_the_script_is_written(capfd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["--time", "60", "--", "--stepz=3"]) == 2
    assert "--steps" in capfd.readouterr().err and not list(tmp_path.iterdir())


def test_an_interpreter_without_the_package_ends_the_job_at_once(tmp_path):
    (tmp_path / "bare").write_text("#!/bin/bash\nexit 1\n")
    (tmp_path / "bare").chmod(0o755)
    script = Script(tmp_path, "exit 0", python=str(tmp_path / "bare"))
    assert script.run() == (2, False)
    assert not (tmp_path / "started").exists()


def test_each_attempt_has_its_own_token(tmp_path):
    script = Script(tmp_path, 'echo "$JAXDIST_JOB_TOKEN" >>tokens; exit 9')
    script.run()
    script.run(restarts=1)
    first, second = (tmp_path / "tokens").read_text().split()
    assert first != second and re.fullmatch("[0-9a-f]{32}", first)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "scripts/slurm").glob("*.sbatch")), ids=lambda path: path.name
)
def test_checked_in_examples_equal_the_output_of_the_command(path, capsys, monkeypatch, no_child):
    monkeypatch.chdir(ROOT)
    text = path.read_text()
    command = next(line for line in text.splitlines() if line.startswith("# python -m"))
    assert main(["--dry-run", *shlex.split(command)[5:]]) == 0
    assert text.replace(command + "\n", "") == capsys.readouterr().out
