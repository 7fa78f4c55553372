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

import dataclasses
import itertools
import math
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Sequence

from jaxdist import runtime
from jaxdist.config import ALIASES, RunConfig, read_run
from jaxdist.run.metrics_log import ExitReason, decode
from jaxdist.run.run_directory import RunDirectory, changed_settings, flatten, read_table
from jaxdist.runtime.entry_point import shell_python
from jaxdist.runtime.formatting.tables import few
from jaxdist.runtime.storage import Location, file_system_problem, locate, read_url
from jaxdist.settings import ConfigError, read_settings, setting, without_flags, write_toml
from jaxdist.settings.schema import BadValueError, FlagText, read_value
from jaxdist.tools.launch.slurm import ArrayTask, Nodes, SlurmConfig, batch_script, deliver
from jaxdist.tools.report.runs import ReportedRun, read_runs
from jaxdist.tools.report.table import text_table

COMMAND = "jaxdist.sweep"

_SWEEP_SETTINGS = ("name", "run_dir", "resume", "replay")
"""Settings of a run that the sweep sets itself, so they cannot vary."""

_MOST_TRIALS = 10_000

_SWEEP_FLAGS = ("run_dir", "arguments", "program")
"""Flags of `jaxdist launch slurm` that the sweep sets."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepConfig(RunConfig):
    """The settings of a run, the settings that vary with their values, and flags of SLURM."""

    grid: tuple[str, ...] = setting(
        (),
        "a setting and its values, e.g. optim.peak_lr=1e-4,3e-4; repeat the flag to train every "
        "combination. Values that contain commas are a list of texts, e.g. "
        'mesh=["dp=2,tp=2","dp=4"]',
    )
    slurm: tuple[str, ...] = setting(
        (),
        "write a SLURM job array instead of training here, one task per combination: a flag of "
        "`jaxdist launch slurm` and its value, e.g. time=24:00:00, gpus-per-node=8 or "
        "submit=true; may be repeated",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One combination: `name` of its run directory, arguments of `jaxdist.train`, settings."""

    name: str
    path: Location
    arguments: list[str]
    config: RunConfig

    def is_finished(self) -> bool:
        """Return whether its run has ended after all steps, or by `eval.patience`."""
        run = RunDirectory(self.path, is_writer=False, resumed=True)
        try:
            summary = read_table(run.summary, decode)
        except (OSError, ConfigError):  # missing or damaged
            return False
        ended = summary.get("exit_reason"), summary.get("step")
        all_steps = (ExitReason.FINISHED, self.config.train.steps)
        return ended == all_steps or ended[0] == ExitReason.STOPPED_EARLY


def main(argv: Sequence[str] | None = None) -> int:
    """Train the unfinished runs and print a comparison, or write a job array; return exit code."""
    trials, slurm = read_sweep(sys.argv[1:] if argv is None else argv)
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


def read_sweep(argv: Sequence[str]) -> tuple[list[Trial], tuple[str, ...]]:
    """Return the checked runs of the command line, and flags of a SLURM job array (() = none).

    Raise `ConfigError` with all problems of the grid or, if it has none, of the runs.
    """
    config = read_settings(
        SweepConfig,
        argv,
        command=COMMAND,
        summary=__doc__ or "",
        aliases=ALIASES,
        check_rules=False,
        read_url=read_url,
    )
    axes, problems = _axes_of(config)
    if (count := math.prod(map(len, axes.values()))) > _MOST_TRIALS:
        problems.append(
            f"the grid has {count} combinations, at most {_MOST_TRIALS} are allowed. Vary fewer "
            "settings, or use fewer values."
        )
    if problems:
        raise ConfigError(problems, heading=COMMAND)
    plain = without_flags(argv, "grid", "run_dir", "slurm")
    name = read_run(plain, command=COMMAND, check_rules=False).name
    folder = locate(config.run_dir or f"runs/{name}")
    trials: list[Trial] = []
    by_problem: dict[str, list[str]] = {}
    for pairs in itertools.product(*([f"{n}={v}" for v in values] for n, values in axes.items())):
        name = re.sub(r"[^\w.,=+@-]+", "-", ",".join(pairs))
        path = folder / name
        arguments = [*plain, *(f"--{pair}" for pair in pairs), f"--run-dir={path}"]
        try:
            settings = read_run(arguments, command="jaxdist.train")
            if settings.train.epochs:
                from jaxdist.run.data_checks import open_run_data, with_steps  # imports jax

                settings = with_steps(settings, open_run_data(settings)[0])
        except ConfigError as error:
            for problem in error.problems:
                by_problem.setdefault(problem, []).append(name)
            continue
        trials.append(Trial(name=name, path=path, arguments=arguments, config=settings))
    problems = [
        problem if len(names) == count else f"{few(names, 2)}: {problem}"
        for problem, names in by_problem.items()
    ]
    problems += _name_problems(trials)
    problems += [problem for trial in trials if (problem := _other_run(trial))]
    if problems:
        raise ConfigError(problems, heading=COMMAND)
    return trials, config.slurm


def _axes_of(config: SweepConfig) -> tuple[dict[str, list[str]], list[str]]:
    """Return setting -> its values as flags spell them, and the problems of the grid."""
    axes: dict[str, list[str]] = {}
    problems = [
        f"{name}={getattr(config, name)!r}: a sweep starts and resumes its own runs. Leave it out."
        for name, default in (("resume", "auto"), ("replay", ""))
        if getattr(config, name) != default
    ]
    if not config.grid:
        problems.append("no setting varies. Set e.g. --grid optim.peak_lr=1e-4,3e-4,1e-3.")
    for text in config.grid:
        spelled, _, values = text.partition("=")
        name = ALIASES.get(spelled.replace("-", "_"), spelled.replace("-", "_"))
        try:
            items = read_value(FlagText(values), list[str])
        except BadValueError as error:
            problems.append(f'grid={text!r} {error}. Write a list as ["a", "b"].')
            continue
        if not spelled or not items:
            problems.append(f"grid={text!r} is not SETTING=VALUE,VALUE. Use e.g. seed=1,2,3.")
        elif name in _SWEEP_SETTINGS:
            problems.append(f"grid={text!r}: the sweep sets {name}. Vary another setting.")
        elif name in axes:
            problems.append(f"grid={text!r}: {name} is set twice. List all its values in one item.")
        elif len(set(items)) < len(items):
            problems.append(f"grid={text!r} contains a value twice. Remove one.")
        axes[name] = items
    return axes, problems


def _name_problems(trials: Sequence[Trial]) -> list[str]:
    names = [trial.name for trial in trials]
    return [
        f"two combinations have the run directory {name}: their values differ only in characters "
        "that names cannot contain. Use two sweeps with different --run-dir."
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ]


def _other_run(trial: Trial) -> str:
    """Return a problem if the run directory contains a run with other settings, else "".

    To skip or resume such a run would mix two sweeps. More steps are allowed.
    """
    run = RunDirectory(trial.path, is_writer=False, resumed=True)
    try:
        old = flatten(tomllib.loads(run.config.text()))
    except (OSError, ValueError):  # a new run; training reports a damaged one
        return ""
    changed = changed_settings(old, flatten(tomllib.loads(write_toml(trial.config))))
    before, now = changed.get("train.steps", (0, 0))
    if isinstance(before, int) and before < now:
        del changed["train.steps"]
    if not changed:
        return ""
    lines = [f"{name}: {a} -> {b}" for name, (a, b) in changed.items()]
    return (
        f"{trial.path} contains a run with other settings ({', '.join(lines)}). Use another "
        "--run-dir, or delete this one."
    )


if __name__ == "__main__":
    runtime.run_command(main, resumes=True)
