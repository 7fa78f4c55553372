"""What a run may choose about its guards. Importing this starts nothing."""

from __future__ import annotations

import dataclasses

from jaxdist.types import setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResilienceConfig:
    """When a run counts as stuck, and what is done about it."""

    watchdog: bool = setting(
        True, "end a process that makes no progress with exit code 86, so that it is restarted"
    )
    hang_factor: float = setting(
        3.0, "a step has hung after this many times the median step time, but not before"
    )
    step_timeout_s: float = setting(300.0, "... this many seconds")
    phase_timeout_s: float = setting(
        3600.0,
        "seconds after which a start, a compilation, a restore, a save or one batch of an "
        "evaluation has hung",
    )

    def problems(self) -> list[str]:
        """Every violated rule, one line each."""
        found = []
        if not self.hang_factor >= 1.0:
            found.append(
                f"resilience.hang_factor={self.hang_factor} would end a run for a step of usual "
                "length. Use 1 or more, e.g. 3."
            )
        for name in ("step_timeout_s", "phase_timeout_s"):
            if not getattr(self, name) > 0.0:
                found.append(
                    f"resilience.{name}={getattr(self, name)} is no waiting time. Use seconds "
                    "above 0, or resilience.watchdog=false."
                )
        return found
