"""Utilisation, power, temperature and clocks of GPUs, read through NVML.

`pynvml` comes with the package nvidia-ml-py, NVIDIA's own binding (the extra `nvml`). Without it,
without a driver, or on a GPU that does not report a number, that number is left out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxdist import runtime


class GpuStats:
    """Reads this process's GPUs through NVML; logs one line where that does not work.

    Args:
        devices: jax devices of this process.
        environ: environment with `CUDA_VISIBLE_DEVICES`, which maps devices to GPUs.
        say: logs that line.
    """

    def __init__(
        self,
        devices: Sequence[Any],
        environ: Mapping[str, str],
        say: Callable[[str], None] = lambda line: None,
    ):
        self._nvml: Any = None
        self._handles: list[Any] = []
        try:
            self._handles = self._open(devices, environ)
        except Exception as failure:  # an unreadable GPU must never end a run
            say(f"GPU power and temperature are not recorded: {failure}")

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
            by_index = entry.isdigit()  # join() sets CUDA_DEVICE_ORDER so that numbers are NVML's
            handles.append(
                nvml.nvmlDeviceGetHandleByIndex(int(entry))
                if by_index
                else nvml.nvmlDeviceGetHandleByUUID(entry)
            )
        return handles

    def read(self) -> dict[str, float]:
        """Means, or the extreme that matters, over this process's GPUs; {} without any.

        Returns:
            `gpu_utilization` (share of the time a kernel ran, 0 to 1), `gpu_power_w` (mean),
            `gpu_temperature_c` (hottest), `gpu_clock_mhz` (slowest), `gpu_memory_used_bytes`
            (fullest, whoever fills it).
        """
        if not self._handles:
            return {}
        nvml = self._nvml
        mean: Callable[[list[float]], float] = lambda values: sum(values) / len(values)
        readings: dict[str, tuple[Callable[[Any], float], Callable[[list[float]], float]]] = {
            "gpu_utilization": (lambda h: nvml.nvmlDeviceGetUtilizationRates(h).gpu / 100, mean),
            "gpu_power_w": (lambda h: nvml.nvmlDeviceGetPowerUsage(h) / 1000, mean),
            "gpu_temperature_c": (
                lambda h: nvml.nvmlDeviceGetTemperature(h, nvml.NVML_TEMPERATURE_GPU),
                max,
            ),
            "gpu_clock_mhz": (lambda h: nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_SM), min),
            "gpu_memory_used_bytes": (lambda h: nvml.nvmlDeviceGetMemoryInfo(h).used, max),
        }
        found = {}
        for name, (read, combine) in readings.items():
            try:
                found[name] = combine([float(read(handle)) for handle in self._handles])
            except nvml.NVMLError:  # not supported by this GPU (a MIG slice, a laptop)
                continue
        return found

    def close(self) -> None:
        """Release NVML; a second call does nothing."""
        if self._nvml is not None:
            self._nvml.nvmlShutdown()
        self._nvml, self._handles = None, []
