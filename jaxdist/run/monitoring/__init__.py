"""Watching a run: console, metrics.jsonl, TensorBoard, and the files of its run directory.

    config         what a run may choose                 (MonitoringConfig)
    run_directory  where the files lie, who writes       (RunDirectory, new_run_path)
    environment    versions, git, hosts, devices         (environment)
    records        metrics.jsonl, exact and kill-proof   (read_records, current)
    monitor        the sinks of a running job            (Monitor)
    watches        second compilations, slow loaders     (CompileWatch, DataWaitWatch, StepTimer)
    throughput     rates and MFU
    processes      which process the others wait for    (find_slow)
    prometheus     the newest numbers, for fetching     (on request)
    profiling      traces of a few steps                (Profiler)
    sensors        power, temperature, clocks of GPUs   (NVML, where it is installed)
    console        text for people, `tensorboard` its curves, `memory` how full devices are

Importing this starts no device and imports no heavy library.
"""

from jaxdist.run.metrics_log import current, device_seconds, read_records
from jaxdist.run.monitoring.config import MonitoringConfig
from jaxdist.run.monitoring.device_memory import device_memory
from jaxdist.run.monitoring.environment import environment
from jaxdist.run.monitoring.monitor import Monitor
from jaxdist.run.monitoring.throughput import Throughput
from jaxdist.run.monitoring.timers import Compilation, CompileWatch, DataWaitWatch, StepTimer
from jaxdist.run.run_directory import RunDirectory, flatten, new_run_path

__all__ = [
    "Compilation",
    "CompileWatch",
    "DataWaitWatch",
    "Monitor",
    "MonitoringConfig",
    "RunDirectory",
    "StepTimer",
    "Throughput",
    "current",
    "device_memory",
    "device_seconds",
    "environment",
    "flatten",
    "new_run_path",
    "read_records",
]
