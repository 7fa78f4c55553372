"""What a SLURM cluster does to a job that it ends: time to save, and whether the job comes back."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping

from jaxdist.tools.doctor.findings import Finding, note, ok, warning

CHECK = "SLURM"

_SLOW_NOTICE_S = 120
"""A node that is lost longer than this costs more than most restarts."""


def examine_slurm(environ: Mapping[str, str]) -> list[Finding]:
    """The cluster's settings, inside a job of it; nothing elsewhere."""
    if "SLURM_JOB_ID" not in environ:
        return []
    try:
        text = subprocess.run(
            ["scontrol", "show", "config"], capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return [note(CHECK, "scontrol does not answer here: the cluster's settings are not known")]
    return check_config(read_config(text))


def read_config(text: str) -> dict[str, str]:
    """`Name   = value` lines of `scontrol show config`."""
    pairs = re.findall(r"^(\w+)\s*=\s*(.*?)\s*$", text, flags=re.M)
    return dict(pairs)


def check_config(config: Mapping[str, str]) -> list[Finding]:
    """Whether a job that is ended has the time to save, and is started again."""
    return list(_problems(config)) or [ok(CHECK, "jobs are requeued")]


def _problems(config: Mapping[str, str]) -> Iterator[Finding]:
    kill_s, lost_s = _seconds(config, "KillWait"), _seconds(config, "SlurmdTimeout")
    if config.get("JobRequeue") == "0":
        yield warning(
            CHECK,
            "JobRequeue=0: a job that loses a node or is preempted is not started again",
            "sbatch --requeue (scripts of `jaxdist launch slurm` ask for it)",
        )
    if kill_s is not None:
        yield note(
            CHECK,
            f"KillWait={kill_s:.0f} s: that long after SIGTERM a job is killed, saved or not",
            "be told earlier: --signal=B:USR1@SECONDS, as `jaxdist launch slurm` writes it",
            kill_wait_s=kill_s,
        )
    if lost_s is not None and lost_s > _SLOW_NOTICE_S:
        yield note(
            CHECK,
            f"SlurmdTimeout={lost_s:.0f} s: that long a lost node goes unnoticed, and its job is "
            "not requeued",
            "nothing in a job's power; ask for a smaller one if nodes are lost often",
            slurmd_timeout_s=lost_s,
        )


def _seconds(config: Mapping[str, str], name: str) -> float | None:
    """`30 sec` -> 30.0; None for what is not there or unlimited."""
    found = re.match(r"(\d+)", config.get(name, ""))
    return float(found[1]) if found else None
