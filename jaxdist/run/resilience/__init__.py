"""Guards of a run: what ends it, sets it back or speaks up when something is wrong.

    watchdog    no progress: one line says which process is behind, exit code 86, restart
    anomalies    a loss that is not finite or far too high: skip, go back, or stop
    replicas    copies of a value whose bits differ: the device is named; stop (85) or go back

The settings dataclass lives in `jaxdist.run.resilience.config`. Nothing here saves, restores or
trains: the loop does, when a guard asks for it.
"""

from jaxdist.run.resilience.anomalies import Anomaly, LossGuard, Rollback, Stopped, read_anomalies
from jaxdist.run.resilience.sdc_check import CorruptState, SdcCheck, uneven_norms
from jaxdist.run.resilience.watchdog import Watchdog

__all__ = [
    "Anomaly",
    "CorruptState",
    "LossGuard",
    "Rollback",
    "SdcCheck",
    "Stopped",
    "Watchdog",
    "read_anomalies",
    "uneven_norms",
]
