"""Throughput: tokens per second, model FLOP utilization (MFU), time left; device memory."""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

MFU_FORMULA = (
    "tokens/s/device * FLOPs per token (forward and backward, nothing recomputed) / peak FLOP/s"
)


class Throughput:
    """Rates of a run: medians, so that one slow step does not change them.

    MFU needs `flops_per_token` of the model and `peak_flops` of one device. Rolling rates use
    `window_steps`.
    """

    def __init__(
        self,
        *,
        num_devices: int,
        flops_per_token: Mapping[str, float] | None = None,
        peak_flops: float | None = None,
        window_steps: int = 20,
    ):
        self.num_devices = num_devices
        self.peak_flops = peak_flops
        self.flops_per_token = dict(flops_per_token or {})
        self._window_steps = window_steps
        self._rates, self._times = array("d"), array("d")

    @property
    def convention(self) -> str | None:
        """FLOP convention of `mfu`: causal if the model reports it; None if there is no MFU."""
        if self.peak_flops is None or not self.flops_per_token:
            return None
        names = ("causal", "full", *self.flops_per_token)
        return next(name for name in names if name in self.flops_per_token)

    def add(self, tokens: float, step_time_s: float) -> None:
        """Count one step. The caller omits the first step of a start, which compiles."""
        self._rates.append(tokens / step_time_s)
        self._times.append(step_time_s)

    @property
    def tokens_per_s(self) -> float | None:
        """Median over the window for the job; None before the first step."""
        return _median(self._rates[-self._window_steps :])

    @property
    def step_time_s(self) -> float | None:
        """Median over the window."""
        return _median(self._times[-self._window_steps :])

    @property
    def run_tokens_per_s(self) -> float | None:
        """Median over all steps added."""
        return _median(self._rates)

    @property
    def run_step_time_s(self) -> float | None:
        """Median over all steps added."""
        return _median(self._times)

    def mfu(self, tokens_per_s: float, convention: str | None = None) -> float | None:
        """Return the share of peak FLOP/s that the model's FLOPs use, in [0, 1]; None if unknown.

        Recomputed activations do not count as work (Chowdhery et al., PaLM, appendix B).
        """
        convention = convention or self.convention
        flops = self.flops_per_token.get(convention) if convention else None
        if flops is None or self.peak_flops is None:
            return None
        return tokens_per_s / self.num_devices * flops / self.peak_flops

    def mfu_fields(self, tokens_per_s: float) -> dict[str, float]:
        """Return `mfu` by `convention`, and `mfu_full` if that differs; {} if unknown."""
        full = self.mfu(tokens_per_s, "full") if self.convention != "full" else None
        fields = {"mfu": self.mfu(tokens_per_s), "mfu_full": full}
        return {name: value for name, value in fields.items() if value is not None}

    def eta_s(self, steps_left: int) -> float | None:
        """Return the seconds left, from the median step time; excludes evaluations and saves."""
        if steps_left <= 0:
            return 0.0
        step_time_s = self.step_time_s
        return None if step_time_s is None else steps_left * step_time_s


def device_memory(devices: list[Any]) -> dict[str, int]:
    """Return the bytes (in use, peak, limit) of this process's fullest device; {} on CPUs."""
    stats = [s for s in (device.memory_stats() for device in devices) if s]
    names = {
        "bytes_in_use": "memory_bytes",
        "peak_bytes_in_use": "memory_peak_bytes",
        "bytes_limit": "memory_limit_bytes",
    }
    values = {key: [int(s[key]) for s in stats if key in s] for key in names}
    return {name: max(values[key]) for key, name in names.items() if values[key]}


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
