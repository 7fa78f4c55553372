"""The environment of a run: versions, git commits, hosts, devices and command line."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxdist.runtime.distributed import installed_versions

_PACKAGES = (
    *("jaxdist", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy"),
    *("ml_dtypes", "pyarrow", "tensorboardX", "tokenizers"),
)


def environment(hosts: Sequence[str]) -> dict[str, Any]:
    """Return the record of environment.json; `hosts` has the host of each process."""
    import jax

    devices = jax.devices()
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join([sys.executable, *sys.argv]),
        "directory": os.getcwd(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "versions": versions(),
        "nvidia": nvidia_versions(),
        "git": repositories(),
        "hosts": list(hosts),
        "num_processes": jax.process_count(),
        "devices": {
            "count": len(devices),
            "per_process": jax.local_device_count(),
            "platform": devices[0].platform,
            "kind": devices[0].device_kind,
            "runtime": devices[0].client.platform_version,
        },
        "settings": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("NCCL_", "JAX_", "XLA_FLAGS", "CUDA_VISIBLE_DEVICES")) and value
        },
    }


def versions() -> dict[str, str]:
    """Return the versions of the installed packages that a run depends on."""
    return installed_versions(_PACKAGES)


def nvidia_versions() -> dict[str, str]:
    """Return the versions of CUDA, cuDNN, NCCL, JAX plugins and the driver; {} if none is found."""
    versions_by_name = {}
    for package in importlib.metadata.distributions():
        name = package.metadata["Name"] or ""
        if re.match(r"(nvidia-(cuda-runtime|cuda-nvcc|cudnn|nccl)|jax-cuda)", name):
            versions_by_name[name] = package.version
    driver = Path("/proc/driver/nvidia/version")
    text = driver.read_text() if driver.exists() else ""
    if match := re.search(r"Kernel Module.*?(\d+\.\d+[.\d]*)", text):
        versions_by_name["driver"] = match[1]
    return dict(sorted(versions_by_name.items()))


def repositories() -> list[dict[str, Any]]:
    """Return commit and state of the git repositories of jaxdist and the current directory."""
    package = Path(__file__).parents[1]
    # A package in a virtual environment inside a repository is not code of that repository.
    is_source = _git(package, "ls-files", "--error-unmatch", "__init__.py") is not None
    by_root: dict[str, dict[str, Any]] = {}
    for directory in [package] * is_source + [Path.cwd()]:
        root = _git(directory, "rev-parse", "--show-toplevel")
        commit = _git(directory, "rev-parse", "HEAD")
        if root is not None and commit is not None:
            status = _git(directory, "status", "--porcelain", "--untracked-files=no")
            by_root[root] = {"root": root, "commit": commit, "dirty": bool(status)}
    return list(by_root.values())


def _git(directory: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(directory), *arguments], capture_output=True, text=True, timeout=10
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
