"""What `jaxdist sweep` is asked: training's settings, and which of them take several values."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
import tomllib
from collections.abc import Sequence

from jaxdist.config import ALIASES, RunConfig, read_run
from jaxdist.run.exit_reason import ExitReason
from jaxdist.run.metrics_log import decode
from jaxdist.run.run_directory import RunDirectory, changed_settings, flatten, read_table
from jaxdist.runtime.storage import Location, locate, read_url
from jaxdist.settings import ConfigError, read_settings, setting, without_flags, write_toml
from jaxdist.settings.schema import BadValueError, FlagText, read_value

COMMAND = "jaxdist.sweep"

_OF_THE_SWEEP = ("name", "run_dir", "resume", "replay")
"""Settings of a run that the sweep decides: they cannot vary."""

_MOST_TRIALS = 10_000
_LONGEST_NAME = 255  # bytes of a directory's name on the file systems of Linux


@dataclasses.dataclass(frozen=True, kw_only=True)
class SweepConfig(RunConfig):
    """A run's settings, and which of them vary."""

    grid: tuple[str, ...] = setting(
        (),
        "a setting and its values, e.g. optim.peak_lr=1e-4,3e-4. Given several times, every "
        "combination is trained. Values that hold commas are a list of texts, e.g. "
        'mesh=["dp=2,tp=2","dp=4"]',
    )
    slurm: tuple[str, ...] = setting(
        (),
        "write a SLURM job array in place of training here, one task for each combination: a flag "
        "of `jaxdist launch slurm` and its value, e.g. time=24:00:00, gpus-per-node=8 or "
        "submit=true; may be given several times",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One combination.

    Attributes:
        name: "optim.peak_lr=1e-4,train.steps=100"; its run directory is called so.
        arguments: of `jaxdist.train`.
        config: the settings that training reads from them.
    """

    name: str
    path: Location
    arguments: list[str]
    config: RunConfig

    @property
    def arguments_without_run_dir(self) -> list[str]:
        """`arguments`, for a launcher that names the run directory itself."""
        return without_flags(self.arguments, "run_dir")

    def is_finished(self) -> bool:
        """Whether its run has ended with all steps done."""
        run = RunDirectory(self.path, is_writer=False, resumed=True)
        try:
            summary = read_table(run.summary, decode)
        except (OSError, ConfigError):  # it cannot be read, or is damaged
            return False
        ended = summary.get("exit_reason"), summary.get("step")
        return ended == (ExitReason.FINISHED, self.config.train.steps)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sweep:
    """What to train, and where.

    Attributes:
        trials: every combination, in the order of the grid; the setting named last varies fastest.
        slurm: flags of a SLURM job array; () = the runs are trained here.
    """

    trials: list[Trial]
    slurm: tuple[str, ...]


def read_sweep(argv: Sequence[str], summary: str = "") -> Sweep:
    """The sweep that the arguments of the command ask for.

    Raises:
        ConfigError: every problem of the grid, or else of any combination.
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
            f"the grid has {count} combinations, {_MOST_TRIALS} are allowed. Vary fewer settings, "
            "or give fewer values."
        )
    if problems:
        raise ConfigError(problems, asked=COMMAND)
    plain = without_flags(argv, "grid", "run_dir", "slurm")
    name = read_run(plain, command=COMMAND, check_rules=False).name
    folder = locate(config.run_dir or f"runs/{name}")
    trials: list[Trial] = []
    found: dict[str, list[str]] = {}
    for pairs in itertools.product(*([f"{n}={v}" for v in values] for n, values in axes.items())):
        name = re.sub(r"[^\w.,=+@-]+", "-", ",".join(pairs))
        path = folder / name
        arguments = [*plain, *(f"--{pair}" for pair in pairs), f"--run-dir={path}"]
        try:
            settings = read_run(arguments, command="jaxdist.train")
        except ConfigError as error:
            for problem in error.problems:
                found.setdefault(problem, []).append(name)
            continue
        trials.append(Trial(name=name, path=path, arguments=arguments, config=settings))
    problems = [
        problem if len(names) == count else f"{' and '.join(names[:2])}: {problem}"
        for problem, names in found.items()
    ]
    problems += _name_problems(trials)
    problems += [problem for trial in trials if (problem := _other_run(trial))]
    if problems:
        raise ConfigError(problems, asked=COMMAND)
    return Sweep(trials=trials, slurm=config.slurm)


def _axes_of(config: SweepConfig) -> tuple[dict[str, list[str]], list[str]]:
    """Setting -> its values as a flag would spell them, and what is wrong with the grid."""
    axes: dict[str, list[str]] = {}
    problems = [
        f"{name}={getattr(config, name)!r}: a sweep goes on with its own runs. Leave it out."
        for name, default in (("resume", "auto"), ("replay", ""))
        if getattr(config, name) != default
    ]
    if not config.grid:
        problems.append(
            "no setting varies. Say which and how: --grid optim.peak_lr=1e-4,3e-4,1e-3."
        )
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
        elif name in _OF_THE_SWEEP:
            problems.append(f"grid={text!r}: the sweep decides {name}. Vary another setting.")
        elif name in axes:
            problems.append(f"grid={text!r}: {name} is given twice. Give all its values at once.")
        elif len(set(items)) < len(items):
            problems.append(f"grid={text!r} names a value twice. Remove one.")
        axes[name] = items
    return axes, problems


def _name_problems(trials: Sequence[Trial]) -> list[str]:
    """Run directories that cannot be, or cannot be told apart."""
    names = [trial.name for trial in trials]
    return [
        f"two combinations have the run directory {name}: their values differ only in characters "
        "that no name has. Sweep them apart, with --run-dir."
        for name in dict.fromkeys(names)
        if names.count(name) > 1
    ] + [
        f"the run directory {name} has a name of {len(name.encode())} bytes, {_LONGEST_NAME} are "
        "allowed. Vary fewer settings at once, or put long values into a file for --config."
        for name in names
        if len(name.encode()) > _LONGEST_NAME
    ]


def _other_run(trial: Trial) -> str:
    """A problem where the run directory holds a run of other settings; more steps are no problem.

    Skipping it, or going on with it, would mix two sweeps.
    """
    run = RunDirectory(trial.path, is_writer=False, resumed=True)
    try:
        old = flatten(tomllib.loads(run.config.text()))
    except (OSError, ValueError):  # new; a damaged one is named when training opens it
        return ""
    changed = changed_settings(old, flatten(tomllib.loads(write_toml(trial.config))))
    before, now = changed.get("train.steps", (0, 0))
    if isinstance(before, int) and before < now:
        del changed["train.steps"]
    if not changed:
        return ""
    lines = [f"{name}: {a} -> {b}" for name, (a, b) in changed.items()]
    return (
        f"{trial.path} holds a run with other settings ({', '.join(lines)}). Name another folder "
        "with --run-dir, or remove this one."
    )
