"""Check and raise the kernel's limits of open files, processes and locked memory."""

from __future__ import annotations

import contextlib
import os
import resource

from jaxdist.settings import ConfigError

_RAISED = (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_MEMLOCK)
_MOST_FILES = 1 << 20  # limited, because some libraries loop over every possible descriptor
_SPARE_FILES = 192  # for unidentified connections, logs, checkpoints, libraries


def raise_limits() -> None:
    """Raise the soft limits of this process to its hard limits; child processes inherit them."""
    for limit in _RAISED:
        soft, hard = resource.getrlimit(limit)
        goal = hard
        if limit == resource.RLIMIT_NOFILE and hard > _MOST_FILES:
            goal = max(soft, _MOST_FILES)
        if soft != goal:
            with contextlib.suppress(OSError, ValueError):  # `check_open_files` reports a low limit
                resource.setrlimit(limit, (goal, hard))


def check_open_files(num_processes: int) -> None:
    """Raise `ConfigError` if process 0 may not open a connection to every other process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = len(os.listdir("/dev/fd")) + num_processes + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        raise ConfigError(
            f"process 0 of {num_processes} may open {soft} files (RLIMIT_NOFILE, hard limit "
            f"{hard}), and the connections of the other processes need {needed}. Raise the hard "
            f"limit on its host to {needed} or more: `ulimit -Hn`, /etc/security/limits.conf, "
            "LimitNOFILE of systemd, or --ulimit nofile of the container."
        )
