"""Guards of a run. They detect failures; the training loop saves, restores and stops.

watchdog   no progress: names the process that is behind, exits with 86    (Watchdog)
anomalies  a loss that is not finite or that spikes                        (LossGuard)
sdc_check  replicas whose bits differ: names the device, exits with 85     (SdcCheck)
"""
