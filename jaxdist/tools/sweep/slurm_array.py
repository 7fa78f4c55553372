"""A sweep as a SLURM job array: one task for each combination, by the batch script of one job."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jaxdist.runtime.storage import file_system_problem
from jaxdist.settings import ConfigError, read_settings
from jaxdist.tools.launch.slurm_script import ArrayTask, Nodes, SlurmConfig
from jaxdist.tools.sweep.grid import COMMAND, Trial

_OF_THE_SWEEP = ("run_dir", "arguments", "program")


def read_slurm(flags: Sequence[str], trials: Sequence[Trial]) -> SlurmConfig:
    """What to ask SLURM for: "time=24:00:00" and the like, flags of `jaxdist launch slurm`.

    Without a name the job is called after the folder of the runs.

    Raises:
        ConfigError: every problem of the flags.
    """
    names = [flag.partition("=")[0].replace("-", "_") for flag in flags]
    problems = [
        f"slurm={flag!r} is not FLAG=VALUE. Use e.g. time=24:00:00."
        for flag in flags
        if "=" not in flag
    ]
    problems += [
        f"slurm={flag!r}: the sweep decides {name}. Leave it out."
        for name, flag in zip(names, flags, strict=True)
        if name in _OF_THE_SWEEP
    ]
    where = str(trials[0].path.parent)
    if problem := file_system_problem(where, "a job of SLURM keeps its state"):
        problems.append(f"--run-dir {problem}")
    if problems:
        raise ConfigError(problems, asked=COMMAND)
    folder = re.sub(r"[^\w.-]+", "-", str(trials[0].path).split("/")[-2])
    words = [f"--{flag}" for flag in flags]
    if "name" not in names:
        words.append(f"--name=sweep-{folder}")
    config = read_settings(SlurmConfig, words, command=f"{COMMAND} --slurm")
    if Nodes.parse(config.nodes).least:
        raise ConfigError(
            f"slurm='nodes={config.nodes}': the runs of a sweep are compared, so each has the same "
            "number of nodes. Give one number."
        )
    return config


def tasks_of(trials: Sequence[Trial]) -> list[ArrayTask]:
    """A task of the array for each combination."""
    return [
        ArrayTask(run_dir=str(trial.path), arguments=trial.arguments_without_run_dir)
        for trial in trials
    ]
