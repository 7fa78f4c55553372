"""Reports of a run when it starts or resumes."""

import dataclasses
from types import SimpleNamespace

import pytest
from commands import records, run_here, tiny
from refusals import missing, refused

from jaxdist.config import RunConfig, read_run
from jaxdist.optim import make_lr_schedule
from jaxdist.plan.estimate.memory_check import Budget
from jaxdist.run.run_directory import RunDirectory
from jaxdist.run.startup import _raised_rate
from jaxdist.settings import write_toml


def test_only_training_settings_count_as_a_change(tmp_path):
    run = RunDirectory.open(tmp_path / "run")
    first = RunConfig()
    assert run.write_config(write_toml(first)) == []
    resumed = dataclasses.replace(first, resume=str(run.path), override=["memory"])
    assert run.write_config(write_toml(resumed)) == []
    train = dataclasses.replace(first.train, steps=7)
    (change,) = run.write_config(write_toml(dataclasses.replace(resumed, train=train)))
    assert change == f"train.steps: {first.train.steps} -> 7"


def resume_to(steps: int, **optim) -> SimpleNamespace:
    """Return a run that resumes and trains to `steps`."""
    config = RunConfig()
    config = dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, steps=steps),
        optim=dataclasses.replace(config.optim, **optim),
    )
    schedule = make_lr_schedule(
        config.optim, total_steps=steps, global_batch_size=config.train.global_batch_size
    )
    return SimpleNamespace(config=config, schedule=schedule)


def test_longer_run_warns_that_its_learning_rate_rises_again():
    stored = lambda **optim: resume_to(400, **optim).config
    warned = _raised_rate(resume_to(800), stored(), 400)
    assert "train.steps 400 -> 800" in warned and "--optim.decay-steps 380" in warned
    kept = resume_to(800, decay_steps=380)  # as the warning suggests
    assert _raised_rate(kept, stored(), 400) == ""
    assert float(kept.schedule(400)) == pytest.approx(float(resume_to(400).schedule(400)))
    assert _raised_rate(resume_to(400), stored(), 200) == ""
    constant = dict(schedule="constant")
    assert _raised_rate(resume_to(800, **constant), stored(**constant), 400) == ""
    warned = _raised_rate(resume_to(800, schedule="wsd"), stored(schedule="wsd"), 400)
    assert missing(warned, "train.steps 400 -> 800", "decay") == []


@pytest.mark.parametrize(
    "words", [["doctor"], ["launch"], ["launch", "slurm", "--time=60"]], ids=" ".join
)
def test_commands_that_need_a_file_system_refuse_a_url(tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    with refused("--run-dir" if "launch" in words else "run_dir", "s3://bucket/run", "file system"):
        run_here(f"tools.{words[0]}.__main__", *words[1:], "--run-dir=s3://bucket/run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flag", "name"),
    [
        ("--run-dir=az://bucket/run", "run_dir"),
        ("--resume=az://bucket/run", "resume"),
        ("--init-from=az://bucket/run", "init_from"),
        ("--data.sources=az://bucket/text", "data.sources"),
        ("--data.tokenizer=az://bucket/tokenizer.json", "data.tokenizer"),
        ("--config=az://bucket/run.toml", "--config"),
    ],
)
def test_unknown_urls_are_refused_before_anything_starts(tmp_path, monkeypatch, flag, name):
    monkeypatch.chdir(tmp_path)
    named = [name] if name != "resume" else []  # read before the settings
    with refused(flag.partition("=")[2], "scheme", *named):
        read_run([flag], command="jaxdist.train")
    with refused("az://bucket/run", "scheme"):
        RunDirectory.open("az://bucket/run")
    assert list(tmp_path.iterdir()) == []


def test_a_step_compiled_before_the_commit_is_not_compiled_again(tmp_path, monkeypatch):
    nothing = dict.fromkeys(("check", "line", "compare"), lambda *args: "")
    budget = SimpleNamespace(remat=None, job=SimpleNamespace(remat="none"), **nothing)
    budget.replanned = lambda *args: budget
    budget.fit = lambda compile_with: compile_with(budget)
    monkeypatch.setattr(Budget, "of", lambda *args: budget)
    run = tmp_path / "run"
    flags = ("--train.steps=2", f"--run-dir={run}", "--mesh=dp=2,tp=2,cp=2")
    assert run_here("train", *tiny(*flags)) == 0
    assert len([r for r in records(run, "event") if "compile" in r["event"]]) == 1
