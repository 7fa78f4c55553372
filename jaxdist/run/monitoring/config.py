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
    record_every_steps: int = setting(1, "steps between train lines of metrics.jsonl")
    tensorboard: bool = setting(True, "write TensorBoard files, by process 0")
    prometheus_port: int = setting(
        0, "port at which process 0 serves the newest numbers to Prometheus; 0 = none"
    )
    prometheus_address: str = setting("", "address of the interface it listens on; empty = all")
    profile: str = setting(
        "",
        "steps to trace with jax's profiler, first:last, e.g. 10:13; empty = none. SIGUSR2 asks a "
        "live process for profile_steps more",
    )
    profile_steps: int = setting(3, "steps of a trace that SIGUSR2 asks for")
    window_steps: int = setting(
        20, "steps over which the console's rates (median) and the data wait (share) are taken"
    )
    data_wait_warning: float = setting(
        0.1, "warn when this share of the window went to waiting for data, in (0, 1]; 1 = never"
    )
    compare_every_steps: int = setting(
        50,
        "steps between comparisons of the processes, which name the one that the others wait for; "
        "0 = none",
    )
    peak_tflops: float = setting(
        0.0, "dense peak of one device for the MFU, TFLOP/s; 0 = look the device up"
    )
    price_per_device_hour: float = setting(0.0, "price of one device for an hour; 0 = not known")
    currency: str = setting("USD", "currency of the price")

    def problems(self) -> list[str]:
        """Every violated rule, one line each: given, allowed, fix."""
        found = []
        for name in ("log_interval_steps", "record_every_steps"):
            value = getattr(self, name)
            if value < 1:
                found.append(
                    f"monitoring.{name}={value}: a whole number of steps ≥ 1. "
                    "Set 1 to report every step."
                )
        if not 0 <= self.prometheus_port <= 65535:
            found.append(
                f"monitoring.prometheus_port={self.prometheus_port}: a port from 1 to 65535, or 0 "
                "for none. Set 9400."
            )
        if self.profile:
            try:
                steps_of(self.profile)
            except ValueError:
                found.append(
                    f"monitoring.profile={self.profile!r}: first:last, counted from 1. "
                    "Set 10:13 for steps 10 to 13."
                )
        if self.profile_steps < 1:
            found.append(
                f"monitoring.profile_steps={self.profile_steps}: a whole number ≥ 1. Set 3."
            )
        if self.compare_every_steps < 0:
            found.append(
                f"monitoring.compare_every_steps={self.compare_every_steps}: a whole number of "
                "steps, or 0 for no comparison. Set 50."
            )
        if self.window_steps < 2:
            found.append(
                f"monitoring.window_steps={self.window_steps}: a whole number of steps ≥ 2, for a "
                "median needs several. Set 20."
            )
        if not 0.0 < self.data_wait_warning <= 1.0:
            found.append(
                f"monitoring.data_wait_warning={self.data_wait_warning}: a share of the step time "
                "above 0 and at most 1. Set 0.1 for 10 %, or 1 to never warn."
            )
        for name, unknown in (
            ("peak_tflops", "look the device up"),
            ("price_per_device_hour", "leave the cost out"),
        ):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                found.append(f"monitoring.{name}={value}: a finite number ≥ 0. Set 0 to {unknown}.")
        if not self.currency.strip():
            found.append(
                "monitoring.currency='': a short name such as USD or EUR. "
                "Set price_per_device_hour to 0 to leave the cost out."
            )
        return found
