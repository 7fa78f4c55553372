"""Settings of `jaxdist sweep`: the settings of training, some with several values."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import tomllib
from collections.abc import Sequence

from jaxdist.config import ALIASES, RunConfig, read_run
from jaxdist.run.metrics_log import ExitReason, decode
from jaxdist.run.run_directory import RunDirectory, changed_settings, flatten, read_table
from jaxdist.runtime.formatting.tables import few
from jaxdist.runtime.storage import Location, locate, read_url
from jaxdist.settings import ConfigError, read_settings, setting, without_flags, write_toml
from jaxdist.settings.schema import BadValueError, FlagText, read_value

COMMAND = "jaxdist.sweep"

_SWEEP_SETTINGS = ("name", "run_dir", "resume", "replay")
"""Settings of a run that the sweep sets itself, so they cannot vary."""

_MOST_TRIALS = 10_000
_LONGEST_NAME = 255  # bytes of a directory name on Linux file systems


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


def read_sweep(argv: Sequence[str], summary: str = "") -> tuple[list[Trial], tuple[str, ...]]:
    """Return the checked runs of the command line, and flags of a SLURM job array (() = none).

    Raise `ConfigError` with all problems of the grid or, if it has none, of the runs.
    """
    config = read_settings(
        SweepConfig,
        argv,
        command=COMMAND,
        summary=summary,
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
    ] + [
        f"the run directory {name} has a name of {len(name.encode())} bytes, {_LONGEST_NAME} are "
        "allowed. Vary fewer settings at once, or put long values into a file for --config."
        for name in names
        if len(name.encode()) > _LONGEST_NAME
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
