"""What a run may choose about its monitoring. Importing this starts nothing."""

from __future__ import annotations

import dataclasses
import math

from jaxdist.core.types import setting
from jaxdist.run.monitoring.profiler import steps_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class MonitoringConfig:
    """How often a run reports, what its devices cost and reach, and when its loader is too slow."""

    log_interval_steps: int = setting(10, "steps between console lines and TensorBoard points")
    tensorboard: bool = setting(True, "write TensorBoard files, by process 0")
    prometheus: str = setting(
        "",
        "host:port at which process 0 serves the newest numbers to Prometheus, e.g. 0.0.0.0:9400 "
        "for all interfaces; empty = no server",
    )
    profile: str = setting(
        "",
        "steps to trace with jax's profiler, first:last, e.g. 10:13; empty = none. SIGUSR2 traces "
        "three steps of a live process",
    )
    straggler_interval_steps: int = setting(
        50,
        "steps between comparisons of the processes, which name the one that the others wait for; "
        "0 = none",
    )
    peak_tflops: float = setting(
        0.0, "dense peak of one device for the MFU, TFLOP/s; 0 = look the device up"
    )
    price_per_device_hour: float = setting(0.0, "price of one device for an hour; 0 = not known")

    def problems(self) -> list[str]:
        """Every violated rule, one line each: given, allowed, fix."""
        found = []
        if self.log_interval_steps < 1:
            found.append(
                f"monitoring.log_interval_steps={self.log_interval_steps}: a whole number of steps "
                "≥ 1. Set 1 to report every step."
            )
        host, _, port = self.prometheus.rpartition(":")
        if self.prometheus and not (host and port.isdigit() and 1 <= int(port) <= 65535):
            found.append(
                f"monitoring.prometheus={self.prometheus!r} is not host:port, with a port from 1 "
                "to 65535. Use e.g. 0.0.0.0:9400."
            )
        if self.profile:
            try:
                steps_of(self.profile)
            except ValueError:
                found.append(
                    f"monitoring.profile={self.profile!r}: first:last, counted from 1. "
                    "Set 10:13 for steps 10 to 13."
                )
        if self.straggler_interval_steps < 0:
            found.append(
                f"monitoring.straggler_interval_steps={self.straggler_interval_steps}: a whole "
                "number of steps, or 0 for no comparison. Set 50."
            )
        for name, unknown in (
            ("peak_tflops", "look the device up"),
            ("price_per_device_hour", "leave the cost out"),
        ):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                found.append(f"monitoring.{name}={value}: a finite number ≥ 0. Set 0 to {unknown}.")
        return found
