"""Watching a run: console, metrics.jsonl, TensorBoard, and the files of its run directory.

    config         settings                                  (MonitoringConfig)
    monitor        hands every number to the sinks below     (Monitor)
    console        the text on the terminal
    tensorboard    curves
    prometheus     an HTTP endpoint with the newest numbers  (optional)
    timers         step time, data wait, compilations        (StepTimer, CompileTracker, ...)
    throughput     tokens/s and MFU
    stragglers     which process the others wait for         (find_stragglers)
    gpu_stats      power, temperature, clocks                (NVML, where it is installed)
    device_memory  bytes in use, peak and limit
    alerts         events for what a healthy run never shows
    profiler       traces of a few steps, trace_analysis what the GPUs did in them
    environment    versions, git, hosts, devices             (environment.json)
    summary        totals over all starts                    (summary.json)

Importing this starts no device and imports no heavy library.
"""

from jaxdist.run.metrics_log import current, device_seconds, read_records
from jaxdist.run.monitoring.config import MonitoringConfig
from jaxdist.run.monitoring.device_memory import device_memory
from jaxdist.run.monitoring.environment import environment
from jaxdist.run.monitoring.monitor import Monitor, RunFacts
from jaxdist.run.monitoring.throughput import Throughput
from jaxdist.run.monitoring.timers import Compilation, CompileTracker, DataWaitTracker, StepTimer
from jaxdist.run.run_directory import RunDirectory, flatten, new_run_path

__all__ = [
    "Compilation",
    "CompileTracker",
    "DataWaitTracker",
    "Monitor",
    "MonitoringConfig",
    "RunDirectory",
    "RunFacts",
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
