"""Guards of a run. They find what is wrong and name it; the loop saves, restores and stops.

watchdog   no progress: names the process that is behind, exits with 86    (Watchdog)
heartbeat  the progress of each process, read by the watchdogs
anomalies  a loss that is not finite, or far above the ones before         (LossGuard)
sdc_check  replicas whose bits differ: names the device, exits with 85     (SdcCheck)
config     settings                                                        (ResilienceConfig)
"""
