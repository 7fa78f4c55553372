"""How much of the memory that it has freed a process keeps, where its C library is glibc.

XLA:CPU takes the temporary memory of a step as one block and frees it behind the step. By itself
glibc gives such a block back to the system, which clears it anew, page by page, for the next step:
an eighth to a third of a step's time (`scripts/bench/results/cpu.md`). So on CPUs freed memory is
kept. But the hole that an aligned block leaves is often too small for the next one by a few bytes,
which then goes behind all others, so the process would grow by a block now and then. Where it has
doubled, all that is free goes back.
"""

from __future__ import annotations

import ctypes
import os
import resource
from typing import Any

# Numbers of parameters in glibc's `malloc.h`.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8

_ON_GPUS = {_ARENA_MAX: 2}
_ON_CPUS = {
    _ARENA_MAX: 1,  # any other arena holds blocks of up to 64 MB only
    _MMAP_MAX: 0,  # no block has pages of its own, which would go when it is freed
    _TRIM_THRESHOLD: -1,  # nor do those behind the last block go
}

_SLACK_BYTES = 256 << 20
"""What a small process may grow by before anything is given back."""


def tune_malloc() -> bool:
    """Choose what glibc does with freed memory, unless the environment does; whether it is kept.

    On CPUs it is kept, in one arena, until `give_back_memory` finds that the process has doubled.
    On GPUs there are two arenas: glibc's own choice is eight for each core, which keep what threads
    of saves have freed, tens of megabytes in an hour (`scripts/bench/results/soak.md`).

    Must be called before a device is started: its threads take arenas. Other C libraries ignore it,
    and any variable of this allocator in the environment leaves all to glibc.
    """
    global _kept
    _kept = None
    is_given = "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    is_given |= any(name.startswith("MALLOC_") for name in os.environ)
    libc = ctypes.CDLL(None)
    if is_given or not hasattr(libc, "mallopt"):
        return False
    on_cpus = _is_cpu()
    for parameter, value in (_ON_CPUS if on_cpus else _ON_GPUS).items():
        libc.mallopt(parameter, value)
    if on_cpus and os.path.exists(_STATISTICS):
        _kept = _Kept(libc)
    return _kept is not None


def give_back_memory() -> bool:
    """After a step: return what is free to the system if this process has doubled; whether it was.

    Does nothing where freed memory is not kept.
    """
    return _kept is not None and _kept.look()


_STATISTICS = "/proc/self/statm"


class _Kept:
    """Freed memory that this process keeps.

    The first steps set the size that doubles: before the first one, what compilation left goes
    back, and what the next two look at is the process with a step's memory.
    """

    def __init__(self, libc: Any):
        self._libc = libc
        self._usual = 0  # bytes resident in a step; 0: all that is free is to go first
        self._settling = 0  # looks to come that set it

    def look(self) -> bool:
        """Whether free memory was given back."""
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


_kept: _Kept | None = None


def resident_bytes() -> int:
    """Memory of this process that is in use or kept, in bytes, as Linux counts it."""
    with open(_STATISTICS) as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _is_cpu() -> bool:
    """Whether jax will start CPU devices only: it is told to, or there is no GPU's driver."""
    import jax

    config: Any = jax.config
    if config.jax_platforms:
        return bool(config.jax_platforms == "cpu")
    return not any(os.path.exists(device) for device in ("/dev/nvidiactl", "/dev/dxg"))
