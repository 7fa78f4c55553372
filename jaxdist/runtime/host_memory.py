"""Limits of open files, and how much freed memory the process keeps if its C library is glibc.

XLA:CPU allocates the temporary memory of a step as one block and frees it after the step. By
default glibc returns this block to the system, and the next step waits while its pages are zeroed:
1/8 to 1/3 of a step's time (`scripts/bench/results/cpu.md`). So on CPUs freed memory is kept. To
limit fragmentation, free memory is returned when the process has doubled in size.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
from typing import Any

from jaxdist.settings import ConfigError

# Parameters of `mallopt` in glibc's `malloc.h`.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8

_ON_GPUS = {_ARENA_MAX: 2}
_ON_CPUS = {
    _ARENA_MAX: 1,  # other arenas hold only blocks of up to 64 MB
    _MMAP_MAX: 0,  # never use mmap, because freed mmapped blocks are returned
    _TRIM_THRESHOLD: -1,  # keep the memory behind the last block
}

_SLACK_BYTES = 256 << 20
"""Extra growth before memory is returned, for small processes."""


def tune_malloc() -> bool:
    """Configure what glibc does with freed memory; return True if it stays in the process.

    On CPUs it stays, in one arena, until `give_back_memory` detects that the process has doubled.
    On GPUs (False) the limit is two arenas: with glibc's eight per core the process grows by tens
    of megabytes per hour (`scripts/bench/results/soak.md`). Call it before a device is started. It
    does nothing without glibc, or if the environment configures its allocator.
    """
    global _kept
    _kept = None
    is_configured = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    is_configured |= any(name.startswith("MALLOC_") for name in os.environ)
    libc = ctypes.CDLL(None)
    if is_configured or not hasattr(libc, "mallopt"):
        return False
    on_cpus = _is_cpu()
    for parameter, value in (_ON_CPUS if on_cpus else _ON_GPUS).items():
        libc.mallopt(parameter, value)
    if on_cpus and os.path.exists(_STATISTICS):
        _kept = _KeptMemory(libc)
    return _kept is not None


def give_back_memory() -> bool:
    """Give free memory back to the system if it is kept and due; return whether it was."""
    return _kept is not None and _kept.trim_if_doubled()


_STATISTICS = "/proc/self/statm"


class _KeptMemory:
    """Give freed memory back to the system at the first check and if the process has doubled.

    After each time, two checks measure the new size.
    """

    def __init__(self, libc: Any):
        self._libc = libc
        self._usual = 0  # resident bytes during a step; 0 = not measured
        self._settling = 0  # remaining checks that measure it

    def trim_if_doubled(self) -> bool:
        resident = resident_bytes()
        if self._settling:
            self._settling -= 1
            self._usual = max(self._usual, resident)
            return False
        if self._usual and resident < 2 * self._usual + _SLACK_BYTES:
            return False
        self._libc.malloc_trim(0)
        self._usual, self._settling = 1, 2
        return True


_kept: _KeptMemory | None = None


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes, as Linux counts it."""
    with open(_STATISTICS) as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _is_cpu() -> bool:
    import jax

    config: Any = jax.config
    if config.jax_platforms:
        return bool(config.jax_platforms == "cpu")
    return not any(os.path.exists(device) for device in ("/dev/nvidiactl", "/dev/dxg"))


_RAISED = (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_MEMLOCK)
_MOST_FILES = 1 << 20  # limited, because some libraries loop over every possible descriptor
_SPARE_FILES = 192  # for unidentified connections, logs, checkpoints, libraries


def raise_limits() -> None:
    """Raise soft limits of open files (up to 2^20), processes, locked memory to the hard ones."""
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
