"""Settings of monitoring: console, TensorBoard, Prometheus, profiler, MFU and cost."""

from __future__ import annotations

import dataclasses
import importlib.util
import re

from jaxdist.runtime.config import is_address
from jaxdist.settings import setting

TRACKERS = ("wandb", "mlflow")
"""Packages that receive metrics; each is an extra of this package."""

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MonitoringConfig:
    """How often a run reports and to whom, and what its devices reach and cost."""

    log_interval_steps: int = setting(
        10,
        "steps between console lines and TensorBoard points; 1 = every step. Every fifth line the "
        "processes are compared, to find stragglers",
        ge=1,
    )
    tensorboard: bool = setting(True, "write TensorBoard files, by process 0")
    prometheus: str = setting(
        "",
        "port at which process 0 serves the newest numbers to Prometheus on this host alone, or "
        "host:port, e.g. 0.0.0.0:9400 for all interfaces; empty = no server",
    )
    tracker: list[str] = setting(
        [],
        "where else metrics, settings and summary go: wandb, mlflow, or module:function for one of "
        "your own (see jaxdist/run/monitoring/trackers.py); several after commas. Environment "
        "variables of wandb and mlflow say which server",
    )
    profile: str = setting(
        "",
        "steps to trace with jax's profiler, first:last, e.g. 10:13; empty = none. SIGUSR2 traces "
        "the next three steps of a live process",
    )
    peak_tflops: float = setting(
        0.0, "dense peak of one device for the MFU, TFLOP/s; 0 = look the device up", ge=0
    )

    @property
    def prometheus_address(self) -> str:
        """host:port to listen on; a port alone is on loopback."""
        return self.prometheus if ":" in self.prometheus else f"127.0.0.1:{self.prometheus}"

    def problems(self) -> list[str]:
        """Violated rules beyond the bounds of each setting."""
        found = []
        if self.prometheus and not is_address(self.prometheus_address):
            found.append(
                f"monitoring.prometheus={self.prometheus!r} is not a port from 1 to 65535, nor "
                "host:port. Use e.g. 9400 for this host alone, 0.0.0.0:9400 for all interfaces."
            )
        for name in self.tracker:
            if name in TRACKERS and importlib.util.find_spec(name) is None:
                found.append(
                    f"monitoring.tracker has {name!r}, which is not installed. Leave it out, or "
                    f"run pip install -c constraints.txt -e '.[{name}]'"
                )
            elif name not in TRACKERS and not _FUNCTION.fullmatch(name):
                found.append(
                    f"monitoring.tracker has {name!r}, which is not {' or '.join(TRACKERS)}, nor "
                    "module:function. Use one of these."
                )
        if self.profile:
            try:
                parse_profile_steps(self.profile)
            except ValueError:
                found.append(
                    f"monitoring.profile={self.profile!r}: first:last, counted from 1. "
                    "Set 10:13 for steps 10 to 13."
                )
        return found


def parse_profile_steps(text: str) -> tuple[int, int]:
    """`10:13` -> (10, 13), both traced; `10` -> (10, 10).

    Raises:
        ValueError: the text is neither, or the steps are not in order from 1 on.
    """
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    first = int(found[1]) if found else 0
    last = int(found[2]) if found and found[2] else first
    if not 1 <= first <= last:
        raise ValueError(text)
    return first, last
