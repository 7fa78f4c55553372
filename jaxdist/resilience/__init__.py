"""Guards of a run: what ends it, sets it back or speaks up when something is wrong.

    watchdog    no progress: one line says which process is behind, exit code 86, restart

The settings dataclass lives in `jaxdist.resilience.config`. Nothing here saves, restores or
trains: the loop does, when a guard asks for it.
"""

from jaxdist.resilience.watchdog import Watchdog

__all__ = ["Watchdog"]
