"""A sweep: all combinations are checked before the first starts, trained once, and compared."""

import json
import signal
import sys
from pathlib import Path

import pytest
from commands import ROOT, tiny
from refusals import missing, refused
from test_report import make_run
from test_slurm import run_script

from jaxdist.config import read_run
from jaxdist.runtime.storage import ObjectLocation
from jaxdist.settings import ConfigError, write_toml
from jaxdist.tools.sweep import __main__ as command
from jaxdist.tools.sweep.__main__ import Trial, read_sweep


def trials_of(argv):
    return read_sweep(argv)[0]


MILLION = [f"--grid={name}={','.join(map(str, range(1, 1001)))}" for name in ("seed", "steps")]
RATES = "--grid=optim.peak_lr=1e-4,3e-4,1e-3"


@pytest.fixture(autouse=True)
def working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_every_combination_is_a_separate_run():
    trials = trials_of(
        ["--steps=7", "--grid", "optim.peak_lr=1e-4,3e-4", "--grid=train.global-batch-size=16,32"]
    )
    assert [trial.name for trial in trials] == [
        "optim.peak_lr=1e-4,train.global_batch_size=16",
        "optim.peak_lr=1e-4,train.global_batch_size=32",
        "optim.peak_lr=3e-4,train.global_batch_size=16",
        "optim.peak_lr=3e-4,train.global_batch_size=32",
    ]
    values = [(t.config.optim.peak_lr, t.config.train.global_batch_size) for t in trials]
    assert values == [(1e-4, 16), (1e-4, 32), (3e-4, 16), (3e-4, 32)]
    assert {trial.config.train.steps for trial in trials} == {7}
    assert [str(trial.path) for trial in trials] == [f"runs/default/{t.name}" for t in trials]
    assert [trial.config.run_dir for trial in trials] == [str(trial.path) for trial in trials]


def test_values_may_contain_commas_and_characters_illegal_in_names(tmp_path):
    Path("text.txt").write_text("some text\n" * 100)
    trials = trials_of(
        [
            '--grid=mesh=["dp=2,tp=2","fsdp=4"]',
            f"--grid=data.sources=stdlib,{tmp_path}/text.txt",
            "--simulate=4",
            "--run_dir",
            "all",
        ]
    )
    assert [trial.config.mesh.shape for trial in trials] == ["dp=2,tp=2"] * 2 + ["fsdp=4"] * 2
    assert trials[1].config.data.sources == [f"{tmp_path}/text.txt"]
    assert {str(trial.path.parent) for trial in trials} == {"all"}
    assert not any("/" in trial.name for trial in trials)


@pytest.mark.parametrize(
    ("flags", "facts"),
    [
        ([], ["--grid"]),
        (["--grid=optim.peak_lr"], ["'optim.peak_lr'", "SETTING=VALUE"]),
        (["--grid=seed=1,1"], ["'seed=1,1'", "twice"]),
        (["--grid=seed=1", "--grid=seed=2"], ["'seed=2'", "twice"]),
        (["--grid=run_dir=a,b"], ["run_dir"]),
        (['--grid=seed=["a'], ["seed="]),
        (["--grid=optim.peek_lr=1e-4"], ["--optim.peek-lr", "--optim.peak-lr"]),
        ([RATES, "--optim.peak_lr=1"], ["optim.peak_lr", "set twice"]),
        ([RATES, "--resume=runs/x"], ["resume='runs/x'"]),
        ([RATES, "--stepz=3"], ["--stepz"]),
        (["--grid=name=a,b"], ["name"]),
        (
            [
                f"--grid=train.{name}={','.join(map(str, range(1, 1001)))}"
                for name in ("steps", "seq_len")
            ],
            ["1000000", "10000"],
        ),
    ],
)
def test_an_invalid_grid_is_rejected(flags, facts):
    with refused("jaxdist.sweep", *facts):
        trials_of(flags)


def test_problems_of_all_combinations_are_reported_before_any_run_starts(monkeypatch):
    monkeypatch.setattr(command, "train", lambda trial: pytest.fail("a run was started"))
    flags = ["--grid=train.global_batch_size=15,16,17", "--mesh=dp=2", "--simulate=2"]
    with pytest.raises(ConfigError) as caught:
        command.main([*flags, "--optim.warmup_steps=-1"])
    problems = caught.value.problems
    assert len(problems) == 3  # two batch sizes, and the problem of every run once
    facts = ["train.global_batch_size=15", "train.global_batch_size=17", "optim.warmup_steps=-1"]
    assert missing("\n".join(problems), *facts) == []
    assert "train.global_batch_size=16" not in "\n".join(problems)


def finish(trial: Trial, loss: float, steps: int | None = None) -> None:
    steps, end = (steps, "preempted") if steps else (trial.config.train.steps, "finished")
    text, evals = write_toml(trial.config), [(steps, loss)]
    make_run(trial.path.parent, trial.name, [5.0] * steps, evals=evals, end=end, config=text)


@pytest.fixture
def trained(monkeypatch) -> list[str]:
    names: list[str] = []
    losses = {"1e-4": 3.5, "3e-4": 2.25, "1e-3": 3.0}

    def train(trial: Trial) -> tuple[int, bool]:
        names.append(trial.name)
        rate = trial.name.partition("=")[2]
        if rate == "3e-4" and names.count(trial.name) == 1:
            return 1, False
        finish(trial, losses[rate])
        return 0, False

    monkeypatch.setattr(command, "train", train)
    return names


def test_only_a_failed_run_is_repeated(trained, capfd):
    names = [f"optim.peak_lr={rate}" for rate in ("1e-4", "3e-4", "1e-3")]
    assert command.main([RATES, "--steps=3"]) == 1
    lines = capfd.readouterr().out.splitlines()
    assert trained == names
    best, failed = lines[-2:]
    assert missing(best, "optim.peak_lr=1e-3", "3.0000", "runs/default") == []
    assert missing(failed, "optim.peak_lr=3e-4", "exit code 1", "runs/default") == []
    assert command.main([RATES, "--steps=3"]) == 0
    out = capfd.readouterr().out
    assert trained == [*names, names[1]]
    assert missing(out.splitlines()[-1], "optim.peak_lr=3e-4", "2.2500") == []
    row = next(line for line in out.splitlines() if line.startswith("best eval loss"))
    assert row.count("*") == 1 and missing(row, "3.5000", "2.2500", "3.0000") == []


def test_a_sweep_with_other_settings_does_not_mix_with_an_earlier_one(trained):
    assert command.main([RATES, "--steps=3"]) == 1
    with refused("runs/default/optim.peak_lr=1e-4", "seed: 0 -> 5", num_problems=2):
        command.main([RATES, "--steps=3", "--seed=5"])
    with refused("train.steps: 3 -> 2", num_problems=2):
        command.main([RATES, "--steps=2"])
    trials = trials_of([RATES, "--steps=4"])  # more steps: they continue
    assert [trial.is_finished() for trial in trials] == [False] * 3
    assert [t.is_finished() for t in trials_of([RATES, "--steps=3"])] == [True, False, True]


def test_a_run_that_ended_early_is_not_finished():
    (trial,) = trials_of(["--grid=seed=1", "--steps=3"])
    finish(trial, 2.0, steps=2)
    assert json.loads(Path(trial.path, "summary.json").read_text())["step"] == 2
    assert not trial.is_finished()


@pytest.mark.parametrize("damage", ["", "[]"])
def test_a_run_whose_summary_is_damaged_is_not_finished(damage):
    (trial,) = trials_of(["--grid=seed=1", "--steps=1"])
    finish(trial, 2.0)
    assert trial.is_finished()
    Path(trial.path, "summary.json").write_text(damage)
    assert not trial.is_finished()


@pytest.mark.parametrize(
    ("ended", "code"), [((75, False), 75), ((130, True), 130), ((0, True), 75)]
)
def test_a_stopped_sweep_starts_no_other_run(monkeypatch, ended, code):
    started = []
    monkeypatch.setattr(command, "train", lambda trial: started.append(trial) or ended)
    assert command.main([RATES]) == code
    assert len(started) == 1


def test_sigterm_is_forwarded_and_awaited(monkeypatch, tmp_path):
    """A fake training process sends SIGTERM to its parent, and exits when it gets SIGTERM."""
    program = tmp_path / "python"
    lines = ["#!/bin/sh", "trap 'exit 75' TERM", "kill -TERM $PPID", "sleep 5 &", "wait", "exit 3"]
    program.write_text("\n".join(lines))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    before = signal.getsignal(signal.SIGTERM)
    (trial,) = trials_of(["--grid=seed=1"])
    assert command.train(trial) == (75, True)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
def test_sweep_with_real_training(monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    flags = tiny("--steps=2", "--eval.interval_steps=0", "--run-dir=all", "--mesh=dp=1")
    flags += ["--grid=optim.peak_lr=1e-2"]
    assert command.main(flags) == 0
    out = capfd.readouterr().out
    summary = json.loads(Path("all/optim.peak_lr=1e-2/summary.json").read_text())
    assert (summary["exit_reason"], summary["step"]) == ("finished", 2)
    assert missing(out, "best: optim.peak_lr=1e-2") == []
    monkeypatch.setattr(command, "train", lambda trial: pytest.fail("trained twice"))
    assert command.main(flags) == 0


def array_of(capsys, *flags):
    dry = ["--slurm=dry_run=true", "--slurm=time=1:00:00"]
    words = ["--grid=optim.peak_lr=1e-4,3e-4", "--steps=3", *dry, *flags]
    assert command.main(words) == 0
    return capsys.readouterr().out


def test_each_task_of_an_array_trains_one_combination(capsys, tmp_path):
    script = array_of(capsys, "--slurm=gpus-per-node=8", "--slurm=python=true")
    assert "#SBATCH --array=0-1\n" in script and "#SBATCH --gpus-per-node=8\n" in script
    assert "#SBATCH --job-name=sweep-default\n" in script
    for number, trial in enumerate(trials_of(["--grid=optim.peak_lr=1e-4,3e-4", "--steps=3"])):
        srun = 'echo 0 > "$JAXDIST_EXIT_CODE_FILE"'
        task = {"ARRAY_JOB_ID": 7, "ARRAY_TASK_ID": number}
        assert run_script(tmp_path, script, srun, **task)[:2] == (0, [])
        words = Path("started").read_text().splitlines()
        arguments = words[words.index("jaxdist.train") + 1 :]
        settings = read_run(arguments, command="jaxdist.train")
        assert settings == trial.config
        assert Path(trial.path, "slurm").is_dir()


def test_preempted_task_requeues_only_itself(capsys, tmp_path):
    script = array_of(capsys, "--slurm=python=true")
    srun = 'echo 75 > "$JAXDIST_EXIT_CODE_FILE"; exit 75'
    ended = run_script(tmp_path, script, srun, ARRAY_JOB_ID=7, ARRAY_TASK_ID=1)
    assert ended[:2] == (75, ["requeue", "7_1"])


def test_array_excludes_finished_runs(capsys):
    trial = trials_of(["--grid=optim.peak_lr=1e-4,3e-4", "--steps=3"])[0]
    finish(trial, 2.0)
    script = array_of(capsys)
    assert "#SBATCH --array=0-0\n" in script
    assert "peak_lr=3e-4" in script and "peak_lr=1e-4" not in script


def test_a_container_sees_the_run_directories_of_all_tasks(capsys, tmp_path):
    words = [f"--run-dir={tmp_path}/a b", "--slurm=container=image.sif"]
    assert f"--bind '{tmp_path}/a b' image.sif" in array_of(capsys, *words)
    assert "--bind" not in array_of(
        capsys, "--slurm=container=image.sif"
    )  # in the working directory


def test_an_array_keeps_its_state_on_a_file_system():
    trial = Trial(name="a", path=ObjectLocation("s3://bucket/sweep/a"), arguments=[], config=None)
    with refused("s3://bucket/sweep", "file systems only"):
        command.read_slurm(["time=60"], [trial])


@pytest.mark.parametrize(
    ("flag", "facts"),
    [
        ("run_dir=x", ["'run_dir=x'", "the sweep sets run_dir"]),
        ("nodes=1-4", ["nodes=1-4", "one number"]),
        ("gpus=1", ["gpus"]),
    ],
)
def test_an_invalid_flag_of_an_array_is_rejected(flag, facts):
    with refused(*facts):
        command.main(["--grid=seed=1,2", "--slurm=time=60", f"--slurm={flag}"])
