"""Utilization, power, temperature and clocks of GPUs by NVML (`pynvml`, the extra `nvml`)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from jaxdist import runtime


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
            log(f"GPU power and temperature are not recorded: {failure}")

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
