"""`python -m jaxdist.sweep --grid SETTING=A,B`: train every combination of some settings.

    python -m jaxdist.sweep --grid optim.peak_lr=1e-4,3e-4 --grid train.global_batch_size=16,32

Takes the settings of training and checks all combinations before the first one starts. Each is a
run below --run-dir (default: runs/NAME), named by its values, in its own process, one after the
other. After a failed run the sweep continues. The same command skips finished runs and resumes the
others. At the end it prints the table of `jaxdist report` and the best run.

With --slurm the runs are the tasks of a SLURM job array, each of which saves at its time limit and
requeues itself:

    python -m jaxdist.sweep --grid seed=1,2,3 --slurm time=24:00:00 --slurm gpus-per-node=8

Exit code: 0 if all runs are finished (--slurm: if the script was made), 1 if one failed, 2 for bad
settings, 75 or 130 after a stop request.
"""

from __future__ import annotations

import math
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence

from jaxdist import runtime
from jaxdist.runtime.entry_point import shell_python
from jaxdist.runtime.storage import file_system_problem
from jaxdist.settings import ConfigError, read_settings, without_flags
from jaxdist.tools.launch.slurm import ArrayTask, Nodes, SlurmConfig, batch_script, deliver
from jaxdist.tools.report.runs import ReportedRun, read_runs
from jaxdist.tools.report.table import text_table
from jaxdist.tools.sweep.grid import COMMAND, Trial, read_sweep

_SWEEP_FLAGS = ("run_dir", "arguments", "program")
"""Flags of `jaxdist launch slurm` that the sweep sets."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train the unfinished runs and print a comparison, or write a job array; return exit code."""
    trials, slurm = read_sweep(sys.argv[1:] if argv is None else argv, summary=__doc__ or "")
    if slurm:
        return write_array(slurm, trials)
    failed = []
    for number, trial in enumerate(trials, start=1):
        prefix = f"sweep: run {number} of {len(trials)}: {trial.name}"
        if trial.is_finished():
            print(f"{prefix}: already finished", flush=True)
            continue
        print(f"{prefix}: {trial.path}", flush=True)
        code, is_stopping = train(trial)
        if is_stopping or code in (runtime.EXIT_PREEMPTED, runtime.EXIT_INTERRUPTED):
            print("sweep: stopped; the same command resumes it", flush=True)
            return code if code > 0 else runtime.EXIT_PREEMPTED
        if code != runtime.EXIT_OK:
            reason = f"signal {-code}" if code < 0 else f"exit code {code}"
            failed.append(f"failed: {trial.name}, {reason}: {trial.path}")
            print(f"sweep: {failed[-1]}", flush=True)
    begun = [str(trial.path) for trial in trials if (trial.path / "metrics.jsonl").exists()]
    runs = read_runs(begun) if begun else []
    lines = ["", text_table(runs), "", best_of(runs)] if runs else []
    print("\n".join([*lines, *failed]), flush=True)
    return runtime.EXIT_FAILURE if failed else runtime.EXIT_OK


def write_array(flags: Sequence[str], trials: Sequence[Trial]) -> int:
    """Write, or submit, a job array of the unfinished runs; return `slurm.deliver`'s exit code."""
    left = [trial for trial in trials if not trial.is_finished()]
    if not left:
        print("sweep: all runs are finished; the same command without --slurm compares them")
        return runtime.EXIT_OK
    config = read_slurm(flags, left)
    for warning in config.warnings():
        print(f"warning: {warning}", file=sys.stderr)
    tasks = [
        ArrayTask(run_dir=str(trial.path), arguments=without_flags(trial.arguments, "run_dir"))
        for trial in left
    ]
    code = deliver(config, batch_script(config, tasks=tasks))
    if not config.dry_run and code == runtime.EXIT_OK:
        paths = " ".join(shlex.quote(str(trial.path)) for trial in trials)
        report = f"{shell_python()} -m jaxdist.report {paths}"
        print(f"{len(left)} tasks; to compare the runs when they have ended: {report}")
    return code


def read_slurm(flags: Sequence[str], trials: Sequence[Trial]) -> SlurmConfig:
    """Return the settings in flags of `jaxdist launch slurm`; the default name is sweep-NAME."""
    names = [flag.partition("=")[0].replace("-", "_") for flag in flags]
    problems = [
        f"slurm={flag!r} is not FLAG=VALUE. Use e.g. time=24:00:00."
        for flag in flags
        if "=" not in flag
    ]
    problems += [
        f"slurm={flag!r}: the sweep sets {name}. Leave it out."
        for name, flag in zip(names, flags, strict=True)
        if name in _SWEEP_FLAGS
    ]
    folder = str(trials[0].path.parent)
    if problem := file_system_problem(folder, "a job of SLURM keeps its state"):
        problems.append(f"--run-dir {problem}")
    if problems:
        raise ConfigError(problems, heading=COMMAND)
    words = [f"--{flag}" for flag in flags]
    if "name" not in names:
        name = re.sub(r"[^\w.-]+", "-", str(trials[0].path).split("/")[-2])
        words.append(f"--name=sweep-{name}")
    config = read_settings(SlurmConfig, words, command=f"{COMMAND} --slurm")
    if Nodes.parse(config.nodes).least:
        raise ConfigError(
            f"slurm='nodes={config.nodes}': all runs of a sweep need the same number of nodes, so "
            "that they can be compared. Use one number."
        )
    return config


def train(trial: Trial) -> tuple[int, bool]:
    """Train in a child process, to which SIGTERM is forwarded; training then saves and exits.

    Return its exit code, negative after a signal, and whether this process received a stop request.
    """
    signals: list[int] = []
    begun: list[subprocess.Popen[bytes]] = []

    def forward(number: int, frame: object) -> None:
        signals.append(number)
        if number == signal.SIGTERM:
            for process in begun:
                process.terminate()

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        process = subprocess.Popen([sys.executable, "-m", "jaxdist.train", *trial.arguments])
        begun.append(process)
        if signal.SIGTERM in signals:  # received before the process existed
            process.terminate()
        return process.wait(), bool(signals)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def best_of(runs: Sequence[ReportedRun]) -> str:
    """Return a line on the run with the lowest evaluation loss, or else training loss."""
    for key, what in (("best_eval_loss", "eval loss"), ("train_loss", "train loss")):
        losses = [(run.outcome[key], run) for run in runs]
        rated = [(loss, run) for loss, run in losses if loss is not None and math.isfinite(loss)]
        if rated:
            loss, run = min(rated, key=lambda pair: pair[0])
            return f"best: {run.name}, {what} {loss:.4f}: {run.path}"
    return "best: none, no run has a finite loss"


if __name__ == "__main__":
    runtime.run_command(main, resumes=True)
