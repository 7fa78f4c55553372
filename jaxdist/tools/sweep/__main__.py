"""`python -m jaxdist.sweep --grid SETTING=A,B`: train every combination of some settings.

    python -m jaxdist.sweep --grid optim.peak_lr=1e-4,3e-4 --grid train.global_batch_size=16,32

Takes the settings of training, and checks all combinations before the first one starts. Each is a
run of its own below --run-dir (runs/NAME without it), called by its values, in a process of its
own, one after the other. A run that fails is named, and the rest goes on. The same command again
skips finished runs and goes on with the others. At the end come the table of `jaxdist report` and
the best run.

With --slurm the runs become the tasks of a SLURM job array, each of which saves at its time limit
and requeues itself:

    python -m jaxdist.sweep --grid seed=1,2,3 --slurm time=24:00:00 --slurm gpus-per-node=8

Exit code: 0 if all runs are finished, 1 if one failed, 2 if the settings are bad, 75 or 130 if the
sweep was told to stop.
"""

from __future__ import annotations

import math
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence

from jaxdist import runtime
from jaxdist.tools.launch.slurm import deliver
from jaxdist.tools.launch.slurm_script import batch_script
from jaxdist.tools.report.runs import ReportedRun, read_runs
from jaxdist.tools.report.table import text_table
from jaxdist.tools.sweep.grid import Trial, read_sweep
from jaxdist.tools.sweep.slurm_array import read_slurm, tasks_of


def main(argv: Sequence[str] | None = None) -> int:
    """Train what is not finished, then compare; returns the exit code."""
    sweep = read_sweep(sys.argv[1:] if argv is None else argv, summary=__doc__ or "")
    trials = sweep.trials
    if sweep.slurm:
        return write_array(sweep.slurm, trials)
    failed = []
    for number, trial in enumerate(trials, start=1):
        place = f"sweep: run {number} of {len(trials)}: {trial.name}"
        if trial.is_finished():
            print(f"{place}: finished before", flush=True)
            continue
        print(f"{place}: {trial.path}", flush=True)
        code, told_to_stop = train(trial)
        if told_to_stop or code in (runtime.EXIT_PREEMPTED, runtime.EXIT_INTERRUPTED):
            print("sweep: stopped; the same command goes on", flush=True)
            return code if code > 0 else runtime.EXIT_PREEMPTED
        if code != runtime.EXIT_OK:
            failed.append(f"failed: {trial.name}, {_ended(code)}: {trial.path}")
            print(f"sweep: {failed[-1]}", flush=True)
    begun = [str(trial.path) for trial in trials if (trial.path / "metrics.jsonl").exists()]
    runs = read_runs(begun) if begun else []
    lines = ["", text_table(runs), "", best_of(runs)] if runs else []
    print("\n".join([*lines, *failed]), flush=True)
    return runtime.EXIT_FAILURE if failed else runtime.EXIT_OK


def write_array(flags: Sequence[str], trials: Sequence[Trial]) -> int:
    """Write a job array of the runs that are not finished; returns the exit code.

    Raises:
        ConfigError: every problem of SLURM's flags.
    """
    left = [trial for trial in trials if not trial.is_finished()]
    if not left:
        print("sweep: all runs are finished; the same command without --slurm compares them")
        return runtime.EXIT_OK
    config = read_slurm(flags, left)
    for warning in config.warnings():
        print(f"warning: {warning}", file=sys.stderr)
    code = deliver(config, batch_script(config, tasks=tasks_of(left)))
    if not config.dry_run and code == runtime.EXIT_OK:
        paths = " ".join(shlex.quote(str(trial.path)) for trial in trials)
        print(f"{len(left)} tasks; when they have ended: python -m jaxdist.report {paths}")
    return code


def train(trial: Trial) -> tuple[int, bool]:
    """Train in a process of its own.

    Ctrl-C reaches both processes, SIGTERM is handed on; training then saves and leaves.

    Returns:
        Its exit code, negative where a signal ended it, and whether this process was told to stop.
    """
    told: list[int] = []
    begun: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, frame: object) -> None:
        told.append(number)
        if number == signal.SIGTERM:
            for process in begun:
                process.terminate()

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        process = subprocess.Popen([sys.executable, "-m", "jaxdist.train", *trial.arguments])
        begun.append(process)
        if signal.SIGTERM in told:  # before there was one to hand it to
            process.terminate()
        return process.wait(), bool(told)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def best_of(runs: Sequence[ReportedRun]) -> str:
    """The run with the least loss: held-out where one was evaluated, else of training."""
    for key, what in (("best_eval_loss", "eval loss"), ("train_loss", "train loss")):
        losses = [(run.outcome[key], run) for run in runs]
        rated = [(loss, run) for loss, run in losses if loss is not None and math.isfinite(loss)]
        if rated:
            loss, run = min(rated, key=lambda pair: pair[0])
            return f"best: {run.name}, {what} {loss:.4f}: {run.path}"
    return "best: none, no run has a finite loss"


def _ended(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


if __name__ == "__main__":
    runtime.run_command(main, resumes=True)
