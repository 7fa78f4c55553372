"""Configure jax before it starts a device: simulated devices, memory, compilation cache."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import importlib
import logging
import math
import os
import platform
import re
import stat
import types
import warnings
from pathlib import Path
from typing import Any

from jaxdist.settings import ConfigError

log = logging.getLogger("jaxdist")


def simulate(num_devices: int) -> None:
    """Use `num_devices` ≥ 1 simulated CPU devices; raises `ConfigError` if jax runs others."""
    import jax

    if num_devices < 1:
        raise ConfigError(f"--simulate {num_devices} is too small. Use a whole number ≥ 1.")
    try:
        # Set the device count first: jax rejects it once a backend runs, but ignores the platform.
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError:
        running = jax.local_devices()
        if len(running) == num_devices and running[0].platform == "cpu":
            return
        raise ConfigError(
            f"--simulate {num_devices}: this process already runs {len(running)} "
            f"{running[0].platform} device(s), which cannot change. In a new process (notebook: "
            "restart the kernel), simulate devices before any other use of jax."
        ) from None
    jax.config.update("jax_platforms", "cpu")


def enable_debug_checks() -> None:
    """Set `jax_enable_checks` and deterministic GPU kernels; call before jax starts a device.

    Options that are set in `XLA_FLAGS` keep their values.
    """
    import jax

    flags = os.environ.get("XLA_FLAGS", "")
    # Autotuning could choose other kernels in each run.
    deterministic = ("--xla_gpu_exclude_nondeterministic_ops=true", "--xla_gpu_autotune_level=0")
    missing = [flag for flag in deterministic if flag.partition("=")[0] not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *missing]).strip()
    jax.config.update("jax_enable_checks", True)


MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
"""JAX's variable for the fraction of GPU memory that a process allocates."""

DEFAULT_MEMORY_FRACTION = 0.92
"""Used instead of JAX's 0.75; the other 0.08 are for the CUDA context and NCCL."""

PINNED_LIMIT_GIB = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""XLA's variable for the largest pinned host memory of a process; XLA's default is 64 GiB."""


def reserve_memory() -> None:
    """Set the GPU memory fraction and XLA's limit of pinned host memory; call before jax starts.

    Variables of the environment keep their values. The limit becomes the memory of the host: XLA
    allocates pinned memory as it needs it.
    """
    os.environ.setdefault(MEMORY_FRACTION, f"{DEFAULT_MEMORY_FRACTION:g}")
    os.environ.setdefault(PINNED_LIMIT_GIB, str(max(1, host_memory_bytes() >> 30)))


def host_memory_bytes() -> int:
    """Return the size of this host's memory in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def pinned_limit_bytes() -> float:
    """Return the value of `PINNED_LIMIT_GIB` in bytes; inf if it is not set to a number."""
    with contextlib.suppress(ValueError):
        return float(os.environ.get(PINNED_LIMIT_GIB, "")) * 2**30
    return math.inf


def memory_fraction() -> float:
    """Return the value of `MEMORY_FRACTION`, or `DEFAULT_MEMORY_FRACTION`."""
    with contextlib.suppress(ValueError):
        return float(os.environ.get(MEMORY_FRACTION, ""))
    return DEFAULT_MEMORY_FRACTION


def xla_flag_names() -> frozenset[str]:
    """Return the names of the compiler options in `XLA_FLAGS`."""
    words = os.environ.get("XLA_FLAGS", "").split()
    return frozenset(word.lstrip("-").partition("=")[0] for word in words)


def setup_compilation_cache(directory: str | os.PathLike[str] | None = None) -> Path | None:
    """Cache compiled programs on disk; return the folder below `directory` for this CPU type.

    `directory` defaults to `$JAX_COMPILATION_CACHE_DIR`, `$JAXDIST_CACHE`, `~/.cache/jaxdist/xla`.
    If it is "off", or cannot be used (which logs a warning), disable the cache and return None.
    """
    import jax

    own = os.environ.get("JAX_COMPILATION_CACHE_DIR") or os.environ.get("JAXDIST_CACHE")
    chosen = os.fspath(directory) if directory else own or "~/.cache/jaxdist/xla"
    if chosen == "off":
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    # XLA compiles CPU code for this processor; another one may lack its instructions.
    folder = Path(chosen).expanduser() / _machine()
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if reason := _unsafe(folder):
        log.warning(
            "compile cache %s %s and is not used: programs are compiled again at each start. "
            "Use another folder (JAXDIST_CACHE or JAX_COMPILATION_CACHE_DIR), or off.",
            folder,
            reason,
        )
        jax.config.update("jax_enable_compilation_cache", False)
        return None
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
    warnings.showwarning = _DamageWatch(folder)
    _keep_programs_of_every_process()
    return folder


def _keep_programs_of_every_process() -> None:
    """On CPUs, let every process write to the cache, because cache keys differ by process."""
    compiler: Any = importlib.import_module("jax._src.compiler")
    write = compiler._cache_write
    if not isinstance(write, types.FunctionType) or hasattr(write, "by_process_0"):
        return
    first = types.SimpleNamespace(global_state=types.SimpleNamespace(process_id=0))
    # jax lets only process 0 write: copy its function with process id 0.
    anyone = types.FunctionType(write.__code__, {**write.__globals__, "distributed": first})

    def write_here(key: str, seconds: float, name: str, backend: Any, *program: Any) -> None:
        (anyone if backend.platform == "cpu" else write)(key, seconds, name, backend, *program)

    write_here.by_process_0 = write  # type: ignore[attr-defined]
    compiler._cache_write = write_here


_CACHE_ERROR = re.compile(
    r"Error (reading|writing) persistent compilation cache entry for '([^']+)': (.*)"
)


class _DamageWatch:
    """Log the first failed read and write of the cache in `folder`; delete entries jax cannot read.

    jax never overwrites them. Other warnings are passed on.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        show: Any = warnings.showwarning
        self.show = getattr(show, "show", show)  # replace the watch of a previous cache
        self._warned: set[str] = set()

    def __call__(self, message: Any, *args: Any, **options: Any) -> None:
        match = _CACHE_ERROR.match(str(message))
        if match is None:
            return self.show(message, *args, **options)
        action, name, reason = match.groups()
        is_first = action not in self._warned
        self._warned.add(action)
        if action == "writing":
            if is_first:
                log.warning(
                    "compile cache %s: the program %s cannot be stored: %s. Until it can, each "
                    "start compiles it. Free space there, or use another folder (JAXDIST_CACHE or "
                    "JAX_COMPILATION_CACHE_DIR).",
                    self.folder,
                    name,
                    reason,
                )
            return None
        # Deletes all entries of the program; intact ones are compiled once more.
        with contextlib.suppress(OSError):  # a warning must not end the run
            for entry in self.folder.glob(f"{glob.escape(name)}-*"):
                entry.unlink(missing_ok=True)
        if is_first:
            log.warning(
                "compile cache %s: deleting entries that cannot be read, their programs are "
                "compiled again (the first entry is %s: %s)",
                self.folder,
                name,
                reason.partition("\n")[0],
            )
        return None


_TRUSTED = (0,)  # root


def _unsafe(folder: Path) -> str:
    if not os.access(folder, os.W_OK):
        return "is not writable"
    for path in (folder, folder.parent):
        info = path.stat()
        is_sticky_parent = path is not folder and info.st_mode & stat.S_ISVTX  # like /tmp
        if info.st_uid not in (os.geteuid(), *_TRUSTED):
            return f"belongs to another user ({path})"
        if info.st_mode & stat.S_IWOTH and not is_sticky_parent:
            return f"can be written by every user ({path})"
    return ""


def _machine() -> str:
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")  # the first processor
    except OSError:
        first = ""
    kept = [s for s in first.splitlines() if s.startswith(("flags", "Features", "model name"))]
    features = "".join(kept) or platform.processor()
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"
