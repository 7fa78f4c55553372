"""Settings of monitoring."""

from __future__ import annotations

import dataclasses
import importlib.util
import re

from jaxdist.runtime.cluster_environment import is_address
from jaxdist.settings import setting

TENSORBOARD = "tensorboard"

_PACKAGES = {TENSORBOARD: "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}
"""Tracker -> its package; wandb and mlflow are optional extras of jaxdist."""

_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MonitoringConfig:
    """Console, statistics of layers, Prometheus, trackers, profiler, peak FLOP/s for the MFU."""

    log_interval_steps: int = setting(
        10,
        "steps between console lines and points of the trackers; 1 = every step. At every fifth "
        "line, step times of all processes are compared to find stragglers",
        ge=1,
    )
    layer_statistics_steps: int = setting(
        0,
        "steps between statistics of every layer, in metrics.jsonl and the trackers: norms of "
        "gradients, weights and updates, RMS of activations, largest attention logit. Costs a "
        "forward pass each time; 0 = none",
        ge=0,
    )
    prometheus: str = setting(
        "",
        "port at which process 0 serves the newest numbers to Prometheus on this host only, or "
        "host:port, e.g. 0.0.0.0:9400 for all interfaces; empty = no server",
    )
    tracker: list[str] = setting(
        [TENSORBOARD],
        "trackers that receive metrics and settings: tensorboard (files of the run directory), "
        "wandb, mlflow, or module:function for your own (see jaxdist/run/monitoring/trackers.py); "
        "the environment variables of wandb and mlflow select the server; empty = none",
    )
    profile: str = setting(
        "",
        "steps that process 0 traces with jax's profiler, first:last, e.g. 10:13; empty = none. "
        "SIGUSR2 traces the next three steps of a live process",
    )
    peak_tflops: float = setting(
        0.0, "dense peak of one device for the MFU, TFLOP/s; 0 = from the GPU catalog", ge=0
    )

    @property
    def prometheus_address(self) -> str:
        """host:port to listen on; a port without a host is on loopback."""
        return self.prometheus if ":" in self.prometheus else f"127.0.0.1:{self.prometheus}"

    def problems(self) -> list[str]:
        """Return an error message for each violated rule; bounds (`ge`) are checked elsewhere."""
        problems = []
        if self.prometheus and not is_address(self.prometheus_address):
            problems.append(
                f"monitoring.prometheus={self.prometheus!r} is not a port from 1 to 65535 or "
                "host:port. Use e.g. 9400 for this host only, 0.0.0.0:9400 for all interfaces."
            )
        for name in self.tracker:
            if name in _PACKAGES and importlib.util.find_spec(_PACKAGES[name]) is None:
                problems.append(
                    f"monitoring.tracker has {name!r}, which is not installed. Omit it, or run "
                    f"pip install -c constraints.txt -e '.[{name}]'"
                )
            elif name not in _PACKAGES and not _FUNCTION.fullmatch(name):
                problems.append(
                    f"monitoring.tracker has {name!r}, which is not {', '.join(_PACKAGES)} or "
                    "module:function. Use one of these."
                )
        if self.profile:
            try:
                parse_profile_steps(self.profile)
            except ValueError:
                problems.append(
                    f"monitoring.profile={self.profile!r} is not first:last, counted from 1. "
                    "Use e.g. 10:13 for steps 10 to 13."
                )
        return problems


def parse_profile_steps(text: str) -> tuple[int, int]:
    """Parse `10:13` to (10, 13), inclusive, and `10` to (10, 10); raise ValueError otherwise."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    first = int(match[1]) if match else 0
    last = int(match[2]) if match and match[2] else first
    if not 1 <= first <= last:
        raise ValueError(text)
    return first, last
