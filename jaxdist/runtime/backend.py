"""Decided before jax starts a device: simulated devices, memory, the cache of compiled programs."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import importlib
import logging
import os
import platform
import re
import stat
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxdist.settings import ConfigError

log = logging.getLogger("jaxdist")


def simulate(num_devices: int) -> None:
    """Make this process see `num_devices` CPU devices and nothing else.

    A backend that already runs with exactly these devices is left as it is.

    Raises:
        ConfigError: `num_devices` is below 1, or another backend already runs.
    """
    import jax

    if num_devices < 1:
        raise ConfigError(f"--simulate {num_devices} makes no device. Use a whole number ≥ 1.")
    try:
        # 1. The device count first: jax refuses it once a backend runs, while it would accept
        #    the platform and silently ignore it.
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError:
        running = jax.local_devices()
        if len(running) == num_devices and running[0].platform == "cpu":
            return
        raise ConfigError(
            f"--simulate {num_devices}: this process already runs {len(running)} "
            f"{running[0].platform} device(s), and devices cannot change while a process "
            "lives. Call simulate before any other use of jax."
        ) from None
    jax.config.update("jax_platforms", "cpu")


def be_careful() -> None:
    """Let jax check itself, and GPUs give the same bits each time, at the price of speed.

    Must be called before a device is started. What `XLA_FLAGS` says comes first.
    """
    import jax

    given = os.environ.get("XLA_FLAGS", "")
    # A kernel that timing chooses may be another one the next time.
    careful = ("--xla_gpu_exclude_nondeterministic_ops=true", "--xla_gpu_autotune_level=0")
    missing = [flag for flag in careful if flag.partition("=")[0] not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *missing]).strip()
    jax.config.update("jax_enable_checks", True)


MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""JAX's variable for the share of a GPU's memory that a process takes."""

DEFAULT_MEMORY_FRACTION = 0.92
"""JAX itself would take three quarters. The rest is for the CUDA context and NCCL."""


def reserve_memory() -> None:
    """Take `DEFAULT_MEMORY_FRACTION` of each GPU's memory, where the environment says nothing.

    Must be called before a device is started. CPU runs ignore it.
    """
    os.environ.setdefault(MEMORY_FRACTION, f"{DEFAULT_MEMORY_FRACTION:g}")


def memory_fraction() -> float:
    """The share of a GPU's memory that a run takes: what the environment says, or our default."""
    try:
        return float(os.environ.get(MEMORY_FRACTION, ""))
    except ValueError:
        return DEFAULT_MEMORY_FRACTION


def given_xla_flags() -> frozenset[str]:
    """Names of the compiler's options that `XLA_FLAGS` sets."""
    words = os.environ.get("XLA_FLAGS", "").split()
    return frozenset(word.lstrip("-").partition("=")[0] for word in words)


def setup_compilation_cache(directory: str | os.PathLike[str] | None = None) -> Path | None:
    """Keep compiled programs on disk, so that a restart compiles nothing.

    Args:
        directory: where; "off" keeps nothing. None or "": `$JAX_COMPILATION_CACHE_DIR`, else
            `$JAXDIST_CACHE`, else `~/.cache/jaxdist/xla`.

    Returns:
        The folder in use, or None when off or not writable (said as a warning).
    """
    import jax

    chosen = os.fspath(directory) if directory else _default_cache()
    if chosen == "off":
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    # XLA compiles CPU code for the features of this very processor; in a home directory shared by
    # unlike machines another's program could die of an illegal instruction.
    folder = Path(chosen).expanduser() / _machine()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if reason := _unsafe(folder):
        log.warning(
            "compile cache %s %s: programs are compiled again each time. "
            "Set runtime.compilation_cache_dir or JAXDIST_CACHE to another folder, or to off.",
            folder,
            reason,
        )
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    _watch_for_damage(folder)
    _keep_programs_of_every_process()
    return folder


def _keep_programs_of_every_process() -> None:
    """Let every process of a job on CPUs keep what it compiles, as process 0 does.

    Jax lets process 0 alone write to the cache. On CPUs the key of a program depends on the process
    that compiles it, so all the others would compile everything again at each start.
    """
    compiler: Any = importlib.import_module("jax._src.compiler")
    write = compiler._cache_write
    if not isinstance(write, types.FunctionType) or hasattr(write, "by_process_0"):
        return
    first = types.SimpleNamespace(global_state=types.SimpleNamespace(process_id=0))
    # The same function, which takes this process for the first one.
    anyone = types.FunctionType(write.__code__, {**write.__globals__, "distributed": first})

    def write_here(key: str, seconds: float, name: str, backend: Any, *program: Any) -> None:
        (anyone if backend.platform == "cpu" else write)(key, seconds, name, backend, *program)

    write_here.by_process_0 = write  # type: ignore[attr-defined]
    compiler._cache_write = write_here


_UNREADABLE = re.compile(r"Error reading persistent compilation cache entry for '([^']+)': (.*)")


def _watch_for_damage(folder: Path) -> None:
    """Remove entries of the cache that jax cannot read, and say so once.

    It compiles their programs again, but never writes over what is there: every start would pay.
    """
    show = warnings.showwarning
    if isinstance(show, _DamageWatch):  # of an earlier cache: jax has one at a time
        show = show.show
    warnings.showwarning = _DamageWatch(folder, show)


class _DamageWatch:
    """Takes jax's warnings of unreadable entries in `folder`; passes all others to `show`."""

    def __init__(self, folder: Path, show: Callable[..., None]) -> None:
        self.folder = folder
        self.show = show
        self._said = False

    def __call__(self, message: Any, *args: Any, **options: Any) -> None:
        found = _UNREADABLE.match(str(message))
        if found is None:
            return self.show(message, *args, **options)
        name, reason = found.groups()
        # Their names begin with the program's; whole ones among them are only compiled once more.
        with contextlib.suppress(OSError):  # a warning must not end the run
            for entry in self.folder.glob(f"{glob.escape(name)}-*"):
                entry.unlink(missing_ok=True)
        if not self._said:
            log.warning(
                "compile cache %s: damaged entries are removed and their programs compiled again "
                "(the first: %s, %s)",
                self.folder,
                name,
                reason.partition("\n")[0],
            )
        self._said = True


_TRUSTED = (0,)  # users whose programs everybody runs: root


def _unsafe(folder: Path) -> str:
    """Why programs from this folder should not run as this user; "" if they may."""
    if not os.access(folder, os.W_OK):
        return "is not writable"
    for path in (folder, folder.parent):
        found = path.stat()
        is_sticky_parent = path is not folder and found.st_mode & stat.S_ISVTX  # as /tmp
        if found.st_uid not in (os.geteuid(), *_TRUSTED):
            return f"belongs to another user ({path})"
        if found.st_mode & stat.S_IWOTH and not is_sticky_parent:
            return f"can be written by every user ({path})"
    return ""


def _default_cache() -> str:
    environ = os.environ
    given = environ.get("JAX_COMPILATION_CACHE_DIR") or environ.get("JAXDIST_CACHE")
    return given or "~/.cache/jaxdist/xla"


def _machine() -> str:
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")  # one processor of all
    except OSError:
        first = ""
    kept = [s for s in first.splitlines() if s.startswith(("flags", "Features", "model name"))]
    features = "".join(kept) or platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"
