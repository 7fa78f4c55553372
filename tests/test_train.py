"""Training as a user starts, stops and resumes it, and the files it writes."""

import dataclasses
import importlib.metadata
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import time
import tomllib
from pathlib import Path

import jax
import pytest
from commands import ROOT, Fork, losses, records, run, run_here, tiny
from refusals import refused

from jaxdist import runtime
from jaxdist.run.resilience.anomalies import Stopped
from jaxdist.run.session import Session
from jaxdist.runtime.entry_point import shell_python

STEPS = 10
SETTINGS = ["--mesh=dp=2,fsdp=2,tp=2", f"--steps={STEPS}", "--eval.interval_steps=4"]
SETTINGS += ["--checkpoint.save_interval_steps=4", "--model.dropout=0.1"]
HERE = tiny(*SETTINGS)  # this process has eight devices
JOB = [*HERE, "--simulate=8"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess]:
    run_dir = tmp_path_factory.mktemp("train") / "run"
    flags = tiny(*SETTINGS, "--simulate=8", "--monitoring.tracker=tensorboard")
    disk = run_dir.parent / "disk"
    flags += [f"--checkpoint.local-dir={disk}", "--checkpoint.local-interval-steps=3"]
    done = run("train", *flags, "--run-dir", run_dir)
    assert done.returncode == 0, done.stderr + done.stdout
    return run_dir, done


def ledger(run_dir: Path) -> dict[int, str]:
    return {r["step"]: r["data_ledger"] for r in records(run_dir, "train")}


def test_run_writes_every_file_of_its_contract(finished):
    run_dir, _ = finished
    assert tomllib.loads((run_dir / "config.toml").read_text())["train"]["steps"] == STEPS
    assert "jax" in json.dumps(json.loads((run_dir / "environment.json").read_text()))
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["exit_reason"] == "finished"
    assert summary["step"] == STEPS
    assert list((run_dir / "tensorboard").iterdir())
    assert (run_dir / "logs" / "process-0.log").stat().st_size > 0
    assert {p.name for p in (run_dir / "checkpoints").iterdir()} >= {"4", "8", str(STEPS)}


def test_metrics_are_complete_and_the_loss_falls(finished):
    run_dir, _ = finished
    train = records(run_dir, "train")
    assert [r["step"] for r in train] == list(range(1, STEPS + 1))
    metrics = ["loss", "grad_norm", "learning_rate", "tokens", "tokens_per_s"]
    metrics += ["tokens_per_s_per_device"]
    for record in train:
        assert {*metrics, "tokens_per_s_per_device", "step_time_s", "data_wait_s"} <= record.keys()
        assert "mfu" not in record  # the peak of a CPU is unknown
    assert train[-1]["loss"] < train[0]["loss"]
    assert train[-1]["tokens"] == STEPS * 8 * 32
    assert [r["step"] for r in records(run_dir, "eval")] == [4, 8, STEPS]


def test_run_compiles_its_step_once(finished):
    run_dir, _ = finished
    compiled = [r for r in records(run_dir, "event") if r["event"] == "compile"]
    assert len([r for r in compiled if "train step" in str(r)]) == 1


def test_console_has_plan_and_next_commands(finished):
    run_dir, done = finished
    for words in (" passes in ", "dp=2,fsdp=2,tp=2", "attention kernel", "checkpoint"):
        assert words in done.stdout
    assert f"python -m jaxdist.generate {run_dir}" in done.stdout
    assert f"python -m jaxdist.report {run_dir} --html" in done.stdout


def test_checkpoint_records_its_origin_and_cost(finished):
    run_dir, _ = finished
    document = next((run_dir / "checkpoints").glob("[0-9]*/meta/metadata"))
    meta = json.loads(document.read_text())["meta"]
    assert meta["config"] == (run_dir / "config.toml").read_text()
    assert meta["mesh"] == "dp=2,fsdp=2,tp=2"
    assert meta["versions"]["jax"] == importlib.metadata.version("jax")
    assert meta["data"]["next_sample"] > 0
    (saved, *_) = [r for r in records(run_dir, "event") if r["event"] == "save"]
    assert {"step", "blocked_s", "waited_s", "written_s", "bytes", "gb_per_s"} <= saved.keys()


def test_local_saves_are_between_regular_ones_and_end_with_the_run(finished):
    run_dir, done = finished
    saved, *_ = [r for r in records(run_dir, "event") if r["event"] == "local_save"]
    assert saved["step"] == 3 and {"blocked_s", "written_s", "bytes"} <= saved.keys()
    assert "local saves survive" in done.stdout
    assert not list((run_dir.parent / "disk").iterdir())


def test_preempted_and_resumed_run_matches_uninterrupted_bit_for_bit(finished, tmp_path):
    run_dir = tmp_path / "run"
    process = Fork("jaxdist.train", *JOB, "--run-dir", run_dir)
    metrics = run_dir / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline and process.poll() is None:
        if metrics.exists() and '"step": 3' in metrics.read_text():
            break
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGINT)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 75, out + errors
    (then,) = [line for line in out.splitlines() if line.startswith("next ")]
    words = shlex.split(then)[1:]
    assert words[:3] == [shell_python(), "-m", "jaxdist.train"]
    again = run("train", *words[3:])
    assert again.returncode == 0, again.stderr
    assert [e["event"] for e in records(run_dir, "event")].count("restore") == 1
    (restart,) = [e for e in records(run_dir, "event") if e["event"] == "restart"]
    parts = ("imports", "join", "setup", "restore", "compile", "first_step")
    assert sum(restart[f"{part}_s"] for part in parts) == pytest.approx(restart["seconds"])
    assert losses(run_dir) == losses(finished[0])
    assert ledger(run_dir) == ledger(finished[0])
    evals = [[(r["step"], r["loss"]) for r in records(d, "eval")] for d in (run_dir, finished[0])]
    assert dict(evals[0]) == dict(evals[1])


def test_finished_run_does_not_train_again(finished):
    run_dir, _ = finished
    before = losses(run_dir)
    assert run_here("train", *HERE, "--run-dir", run_dir) == 0
    assert losses(run_dir) == before


def test_resume_path_uses_the_settings_of_that_run(finished, tmp_path, monkeypatch):
    """The command has only the path and the changes: another mesh and three more steps."""
    run_dir = tmp_path / "run"
    shutil.copytree(finished[0], run_dir)
    monkeypatch.chdir(tmp_path)
    flags = ["--mesh", "dp=4,fsdp=2", "--steps", STEPS + 3]
    assert run_here("train", "--resume", run_dir, *flags) == 0
    assert max(losses(run_dir)) == STEPS + 3
    assert not (tmp_path / "runs").exists()


def test_resume_never_rejects_a_directory_of_a_run(finished):
    with refused(finished[0], "--resume auto"):
        run_here("train", *HERE, "--run-dir", finished[0], "--resume", "never")


@pytest.mark.parametrize("mesh", ["dp=1", "fsdp=4,tp=2"])
def test_evaluate_gives_the_same_loss_on_any_mesh(finished, mesh, capsys):
    capsys.readouterr()
    assert run_here("evaluate", finished[0], "--mesh", mesh, "--max_batches=2", "--json") == 0
    # Summation order differs between meshes: a few units of float32's 6e-8, relative.
    expected = records(finished[0], "eval")[-1]["loss"]
    assert json.loads(capsys.readouterr().out)["loss"] == pytest.approx(expected, rel=1e-6)


def test_nan_step_stops_the_run(tmp_path):
    job = tiny("--steps", 6, "--optim.peak_lr=1e30", "--optim.warmup_steps=0")
    with refused("resilience.nonfinite_policy", error=Stopped):
        run_here("train", *job, "--run-dir", tmp_path, "--resilience.nonfinite_policy=stop")
    assert summary_of(tmp_path)["exit_reason"] == "nonfinite_loss"


def summary_of(run_dir):
    return json.loads((run_dir / "summary.json").read_text())


def test_consecutive_skipped_steps_exit_with_87_and_name_a_finite_checkpoint(tmp_path):
    job = tiny("--steps", 60, "--optim.peak_lr=1e20", "--optim.warmup_steps=0")
    job += ["--checkpoint.save_interval_steps=1"]
    job += ["--resilience.max_skipped_steps=4", "--run-dir", tmp_path]
    with refused("step 5", "max_skipped_steps", "step 4.", error=Stopped) as caught:
        run_here("train", *job)
    assert caught.value.exit_code == 87 and 87 in runtime.FINAL_CODES
    assert summary_of(tmp_path)["exit_reason"] == "nonfinite_loss"
    assert summary_of(tmp_path)["skipped_steps"] == 4
    applied = [r["applied"] for r in records(tmp_path, "train")]
    assert applied == [True] + 4 * [False]
    assert {e["reason"] for e in events(tmp_path, "skipped_step")} == {"nonfinite_loss"}


def test_nonfinite_parameters_are_not_saved(tmp_path, monkeypatch):
    real = Session.dispatch

    def dispatch(self, batch):
        metrics = real(self, batch)
        if self.step == 3:
            spoil = lambda x: x.at[(0,) * x.ndim].set(math.nan)
            self.state = dataclasses.replace(
                self.state, params=jax.tree.map(spoil, self.state.params)
            )
        return metrics

    monkeypatch.setattr(Session, "dispatch", dispatch)
    job = tiny("--steps", 3, "--checkpoint.save_interval_steps=1")
    job += ["--eval.interval_steps=0"]
    with refused("step 3", "NaN", "step 2.", error=Stopped):
        run_here("train", *job, "--run-dir", tmp_path)
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("[0-9]*")) == ["1", "2"]
    assert summary_of(tmp_path)["exit_reason"] == "nonfinite_loss"


def test_steps_without_labels_are_counted_and_have_no_loss(tmp_path, capsys):
    turns = lambda text: {
        "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "ok"}]
    }
    data = tmp_path / "chat.jsonl"
    data.write_text("".join(json.dumps(turns("long " * 20_000)) + "\n" for _ in range(5)))
    job = tiny("--steps", 4, "--data.sources", data, "--run-dir", tmp_path / "run")
    job += ["--data.records=chat", "--data.packing=documents", "--data.tokenizer=bytes"]
    assert run_here("train", *job, "--resilience.max_skipped_steps=2") == 0
    steps = records(tmp_path / "run", "train")
    assert [(r["loss"], r["grad_norm"], r["weight"], r["applied"]) for r in steps] == [
        (None, None, 0, False)
    ] * 4
    assert {e["reason"] for e in events(tmp_path / "run", "skipped_step")} == {"no_labels"}
    assert summary_of(tmp_path / "run")["skipped_steps"] == 4
    assert events(tmp_path / "run", "eval_no_labels")
    assert "no labels" in "".join(capsys.readouterr())
    assert run_here("tools.report.__main__", tmp_path / "run") == 0


def events(run_dir, name):
    return [e for e in records(run_dir, "event") if e["event"] == name]


def test_cnn_trains_on_cifar_and_reports_accuracy(tmp_path, test_data):
    code = run_here(
        "train",
        "--config", ROOT / "configs/cifar10_cnn.toml",
        f"--data.sources={test_data / 'cifar-10-batches-bin'}",
        "--mesh", "dp=2,fsdp=2,tp=2",
        "--steps", 4, "--train.global_batch_size=32", "--eval.final_max_batches=2",
        "--run-dir", tmp_path / "run",
    )  # fmt: skip
    assert code == 0
    assert 0 <= records(tmp_path / "run", "eval")[-1]["accuracy"] <= 1
    assert records(tmp_path / "run", "train")[-1]["images_per_s"] > 0
