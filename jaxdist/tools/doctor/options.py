"""What `jaxdist doctor` is asked: a run's settings, as training takes them, and how to look."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jaxdist.config import ALIASES, RunConfig
from jaxdist.runtime.storage import file_system_problem
from jaxdist.settings import ConfigError, problems_of, read_settings, setting

COMMAND = "jaxdist.doctor"
_ALIASES = {
    **ALIASES,
    "coordinator_address": "runtime.coordinator_address",
    "num_processes": "runtime.num_processes",
    "process_id": "runtime.process_id",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorConfig(RunConfig):
    """A run's settings and how hard to look at what it will run on."""

    json: bool = setting(False, "print one JSON object instead of text")
    strict: bool = setting(False, "end with 1 on warnings too, and not only on errors")
    disk_mib: int = setting(
        64, "MiB written, synced and read back in the run directory; 0 = none", ge=0
    )
    allreduce_mib: int = setting(
        0, "MiB per device added up over each mesh axis; 0 = 256 on GPUs, 1 on CPU", ge=0
    )
    wait_s: int = setting(60, "seconds that processes wait for each other in one check", ge=1)

    def problems(self) -> list[str]:
        """None of the run's own rules: what they refuse is a finding of the report."""
        problem = file_system_problem(self.run_dir, "disks are measured")
        return [f"run_dir={problem}"] if problem else []

    @property
    def directory(self) -> Path:
        """Where the run will write: the nearest directory that is already there."""
        wanted = Path(self.run_dir or "runs").expanduser().absolute()
        return next(path for path in (wanted, *wanted.parents) if path.is_dir())

    @property
    def checkpoints_bytes(self) -> int:
        """What the run's checkpoints will take at most."""
        # Parameters, their average and moments; the state in memory has gradients too.
        moments = self.optim.moment_bytes + self.optim.ema_bytes
        one = self.state_bytes(self.build_model()) * (4 + moments) // (8 + moments)
        passing = 1 + self.checkpoint.async_save  # one being written, one halfway
        return one * (self.checkpoint.max_to_keep + self.checkpoint.best[1] + passing)


def read_doctor(argv: Sequence[str], summary: str = "") -> DoctorConfig:
    """The question.

    Raises:
        ConfigError: what cannot even be asked: values without meaning, half an address of a job.
    """
    config = read_settings(
        DoctorConfig, argv, command=COMMAND, summary=summary, aliases=_ALIASES, check_rules=False
    )
    problems = problems_of(config, deep=False) + problems_of(config.runtime, "runtime")
    if problems:
        raise ConfigError(problems, asked=COMMAND)
    return config
