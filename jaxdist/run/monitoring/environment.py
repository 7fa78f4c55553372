"""The environment of a run: versions, git commits, hosts, devices; readings of its GPUs."""

from __future__ import annotations

import datetime
import importlib
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from jaxdist import runtime
from jaxdist.runtime.distributed import installed_versions

_PACKAGES = (
    *("jaxdist", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy"),
    *("ml_dtypes", "pyarrow", "tensorboardX", "tokenizers"),
)

_NVIDIA = re.compile(
    r"((?:nvidia_(?:cuda_runtime|cuda_nvcc|cudnn|nccl)|jax_cuda)\w*)-(.+)\.dist-info"
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
    """Return package -> version of the installed packages that a run depends on."""
    return installed_versions(_PACKAGES)


def nvidia_versions() -> dict[str, str]:
    """Return name -> version of CUDA, cuDNN, NCCL, JAX plugins, driver; missing ones left out."""
    versions_by_name: dict[str, str] = {}
    for folder in filter(os.path.isdir, sys.path):
        # Parsing the metadata of 249 packages took 0.1 s.
        for name in filter(None, map(_NVIDIA.fullmatch, os.listdir(folder))):
            versions_by_name.setdefault(name[1].replace("_", "-"), name[2])
    driver = Path("/proc/driver/nvidia/version")
    text = driver.read_text() if driver.exists() else ""
    if match := re.search(r"Kernel Module.*?(\d+\.\d+[.\d]*)", text):
        versions_by_name["driver"] = match[1]
    return dict(sorted(versions_by_name.items()))


def repositories() -> list[dict[str, Any]]:
    """Return root, commit, `dirty` of the git repositories of jaxdist and the working directory."""
    package = Path(__file__).parents[1]
    # A package in a virtual environment inside a repository is not code of that repository.
    is_source = _git(package, "ls-files", "--error-unmatch", "__init__.py") is not None
    by_root: dict[str, dict[str, Any]] = {}
    for directory in [package] * is_source + [Path.cwd()]:
        if lines := _git(directory, "rev-parse", "--show-toplevel", "HEAD"):
            root, commit = lines.splitlines()
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


class GpuStats:
    """Reads the GPUs of this process's jax devices, mapped by `CUDA_VISIBLE_DEVICES`."""

    def __init__(
        self,
        devices: Sequence[Any],
        environ: Mapping[str, str],
        log: Callable[[str], None] = lambda line: None,
    ):
        self._nvml: Any = None
        self._handles: list[Any] = []
        try:
            self._handles = self._open(devices, environ)
        except Exception as failure:  # an unreadable GPU must never end a run
            log(f"GPU power, temperature etc. are not recorded: {failure}")

    def _open(self, devices: Sequence[Any], environ: Mapping[str, str]) -> list[Any]:
        if devices[0].platform != "gpu":
            return []  # no GPU, no message
        try:
            nvml: Any = importlib.import_module("pynvml")
        except ImportError as missing:
            raise LookupError("pip install nvidia-ml-py (the extra `nvml`)") from missing
        nvml.nvmlInit()
        self._nvml = nvml
        visible = runtime.visible_gpus(environ)
        handles = []
        for device in devices:
            number = getattr(device, "local_hardware_id", None)
            number = device.id if number is None else number
            entry = str(number) if visible is None else visible[number]
            if entry.isdigit():  # join() sets CUDA_DEVICE_ORDER so that numbers are NVML's
                handles.append(nvml.nvmlDeviceGetHandleByIndex(int(entry)))
            else:
                handles.append(nvml.nvmlDeviceGetHandleByUUID(entry))
        return handles

    def read(self) -> dict[str, float]:
        """Return the statistics that the driver reports over this process's GPUs; {} without any.

        `gpu_utilization` (mean share of the time in which a kernel ran, 0 to 1), `gpu_power_w`
        (mean), `gpu_temperature_c` (maximum), `gpu_clock_mhz` (minimum), `gpu_memory_used_bytes`
        (maximum, including other programs).
        """
        if not self._handles:
            return {}
        nvml = self._nvml
        celsius = nvml.NVML_TEMPERATURE_GPU
        readings: dict[str, tuple[Callable[[Any], float], Callable[[list[float]], float]]] = {
            "gpu_utilization": (lambda h: nvml.nvmlDeviceGetUtilizationRates(h).gpu / 100, fmean),
            "gpu_power_w": (lambda h: nvml.nvmlDeviceGetPowerUsage(h) / 1000, fmean),
            "gpu_temperature_c": (lambda h: nvml.nvmlDeviceGetTemperature(h, celsius), max),
            "gpu_clock_mhz": (lambda h: nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_SM), min),
            "gpu_memory_used_bytes": (lambda h: nvml.nvmlDeviceGetMemoryInfo(h).used, max),
        }
        values = {}
        for name, (read, combine) in readings.items():
            try:
                values[name] = combine([float(read(handle)) for handle in self._handles])
            except nvml.NVMLError:  # not supported by this GPU (a MIG slice, a laptop)
                continue
        return values

    def close(self) -> None:
        """Release NVML; a second call does nothing."""
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
        self._nvml, self._handles = None, []
