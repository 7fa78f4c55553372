"""Guards of a run: what ends it, sets it back or speaks up when something is wrong.

    watchdog    no progress: one line says which process is behind, exit code 86, restart
    offences    a loss that is not finite or far too high: skip, go back, or stop
    replicas    copies of a value whose bits differ: the device is named; stop (85) or go back

The settings dataclass lives in `jaxdist.resilience.config`. Nothing here saves, restores or
trains: the loop does, when a guard asks for it.
"""

from jaxdist.resilience.offences import LossGuard, Offence, Rollback, Stopped, read_offences
from jaxdist.resilience.replicas import DamagedState, ReplicaWatch, uneven_norms
from jaxdist.resilience.watchdog import Watchdog

__all__ = [
    "DamagedState",
    "LossGuard",
    "Offence",
    "ReplicaWatch",
    "Rollback",
    "Stopped",
    "Watchdog",
    "read_offences",
    "uneven_norms",
]
