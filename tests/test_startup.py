"""A start: its reports, the parts of its time, and damaged files of its run directory."""

import dataclasses
import json
import os
import subprocess
import time
from types import SimpleNamespace

import pytest
from commands import records, run_here, tiny
from refusals import missing, refused

from jaxdist.config import RunConfig, read_run
from jaxdist.optim import make_lr_schedule
from jaxdist.plan.estimate.memory_check import Budget
from jaxdist.results import Run
from jaxdist.run.run_directory import RunDirectory
from jaxdist.run.startup import _raised_rate
from jaxdist.runtime import StartTimes, start_times
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
    config = RunConfig()
    config = dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, steps=steps),
        optim=dataclasses.replace(config.optim, **optim),
    )
    schedule = make_lr_schedule(
        config.optim, total_steps=steps, global_batch_size=config.train.global_batch_size
    )
    return SimpleNamespace(config=config, schedule=schedule, has_own_schedule=False)


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
    own = resume_to(800)
    own.has_own_schedule = True
    assert _raised_rate(own, stored(), 400) == ""
    assert [RunConfig().remarks(has_own_schedule=x) for x in (False, True)] == [[], []]
    short = resume_to(9).config
    assert len(short.remarks()) == 1 and not short.remarks(has_own_schedule=True)


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
    monkeypatch.setattr(Budget, "of", lambda *args, **_: budget)
    run = tmp_path / "run"
    flags = ("--train.steps=2", f"--run-dir={run}", "--mesh=dp=2,tp=2,cp=2")
    assert run_here("train", *tiny(*flags)) == 0
    assert len([r for r in records(run, "event") if "compile" in r["event"]]) == 1


def test_parts_add_up_to_the_time_since_the_failure(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(start_times.time, "monotonic", lambda: now[0])
    times = StartTimes(99.5, failed_at=98.0)
    for seconds, part in [(1, "imports"), (2, "join"), (4, "imports"), (8, "setup")]:
        now[0] += seconds
        times.mark(part)
    assert not times.done
    now[0] += 16
    times.end("first_step")
    assert times.done and times.follows_failure
    assert times.parts == {
        "relaunch": 1.5, "imports": 5.5, "join": 2.0, "setup": 8.0, "first_step": 16.0
    }  # fmt: skip
    assert times.total == now[0] - 98.0


def test_a_process_counts_from_its_start_or_from_the_previous_failure(monkeypatch):
    age = lambda: int(subprocess.check_output(["ps", "-o", "etimes=", "-p", str(os.getpid())]))
    monkeypatch.delenv(start_times.FAILED_AT, raising=False)
    before = age()
    times = StartTimes.of_process()
    times.mark("imports")
    assert not times.follows_failure and times.parts.keys() == {"imports"}
    assert before <= times.parts["imports"] <= age() + 1
    failed_at = time.monotonic() - times.total - 30
    monkeypatch.setenv(start_times.FAILED_AT, repr(failed_at))
    (relaunch,) = StartTimes.of_process().parts.values()
    assert relaunch == pytest.approx(30, abs=2.0)


CONFIG = 'name = "a"\nseed = 1\n'
RECORD = '{"kind": "train", "step": 1, "loss": 3.0}\n'


@pytest.fixture
def run(tmp_path):
    first = RunDirectory.open(tmp_path / "run")
    first.write_config(CONFIG)
    first.write_environment({"time": "first"})
    (tmp_path / "run" / "metrics.jsonl").write_text(RECORD)
    return RunDirectory.open(tmp_path / "run")


@pytest.mark.parametrize("damage", ["x = = 3", "\xff\xfe", None])
def test_unreadable_config_is_reported_and_rewritten(run, damage):
    if damage is None:
        run.config.delete()
    else:
        run.config.write(damage.encode("latin-1"))
    (line,) = run.write_config(CONFIG)
    assert ("missing" if damage is None else "damaged") in line
    assert run.write_config(CONFIG) == []


@pytest.mark.parametrize("damage", ["", "{", "[1]", '"text"', "null"])
def test_damaged_environment_loses_only_earlier_starts(run, damage, caplog):
    run.write_environment({"time": "second"})
    assert [start["time"] for start in run.environment.json()["earlier"]] == ["first"]
    run.environment.write(damage)
    with caplog.at_level("WARNING", logger="jaxdist"):
        run.write_environment({"time": "third"})
    record = json.loads(run.environment.text())
    assert (record["time"], record["earlier"]) == ("third", [])
    assert "damaged" in caplog.text


@pytest.mark.parametrize("damage", ["", "{", "[1]"])
def test_damaged_summary_is_reported_and_other_files_stay_readable(run, damage):
    opened = Run(run.path)
    assert opened.summary == {} and "no end" in repr(opened)
    run.write_summary({"exit_reason": "finished"})
    assert opened.exit_reason == "finished"
    run.summary.write(damage)
    with refused(run.summary):
        opened.summary  # noqa: B018
    assert "damaged" in repr(opened) and opened.losses == [3.0]
