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
"""
