"""Monitoring of a run: console, metrics.jsonl, TensorBoard, and other files of the run directory.

monitor        passes every number to the sinks below    (Monitor)
console        the text on the terminal
tensorboard    curves
prometheus     an HTTP endpoint with the newest numbers  (optional)
trackers       wandb, mlflow and your own                (optional)
timers         step time, data wait, compilations        (StepTimer, CompileTracker, ...)
throughput     tokens/s, MFU, device memory
stragglers     the process that the others wait for      (find_stragglers)
gpu_stats      power, temperature, clocks                (NVML, if it is installed)
alerts         warnings
profiler       traces of a few steps, and GPU time in them
environment    versions, git, hosts, devices             (environment.json)
summary        totals over all starts                    (summary.json)
"""
