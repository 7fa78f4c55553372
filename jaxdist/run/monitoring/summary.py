"""Rates of one start of a run, and totals of the run: the content of summary.json."""

from __future__ import annotations

import collections
import math
import statistics
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxdist.run.metrics_log import Record, current, device_seconds
from jaxdist.run.monitoring.stragglers import READY_SHARE, Straggler
from jaxdist.run.monitoring.timers import WINDOW_STEPS, CompileTracker

MFU_FORMULA = (
    "tokens/s/device * FLOPs per token (forward and backward, nothing recomputed) / peak FLOP/s"
)


class Throughput:
    """Rates of one start: medians, so that one slow step hardly changes them."""

    def __init__(
        self,
        *,
        num_devices: int,
        flops_per_token: Mapping[str, float] | None = None,
        peak_flops: float | None = None,
        window_steps: int = WINDOW_STEPS,
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
        """Median tokens (images, examples) per second of the job, last `window_steps` steps."""
        return _median(self._rates[-self._window_steps :])

    @property
    def step_time_s(self) -> float | None:
        """Median seconds per step over the last `window_steps` steps."""
        return _median(self._times[-self._window_steps :])

    @property
    def run_tokens_per_s(self) -> float | None:
        """Median tokens (images, examples) per second over all steps of this start."""
        return _median(self._rates)

    @property
    def run_step_time_s(self) -> float | None:
        """Median seconds per step over all steps of this start."""
        return _median(self._times)

    def mfu(self, tokens_per_s: float, convention: str | None = None) -> float | None:
        """Return the share of peak FLOP/s that the model's FLOPs use; None if unknown.

        Recomputed activations do not count as work (Chowdhery et al., PaLM, appendix B).
        """
        convention = convention or self.convention
        flops = self.flops_per_token.get(convention) if convention else None
        if flops is None or self.peak_flops is None:
            return None
        return tokens_per_s / self.num_devices * flops / self.peak_flops

    def mfu_fields(self, tokens_per_s: float) -> dict[str, float]:
        """Return `mfu` by `convention`, and `mfu_full` unless that is "full"; {} if unknown."""
        full = self.mfu(tokens_per_s, "full") if self.convention != "full" else None
        fields = {"mfu": self.mfu(tokens_per_s), "mfu_full": full}
        return {name: value for name, value in fields.items() if value is not None}

    def eta_s(self, steps_left: int) -> float | None:
        """Return the seconds left by the median step time; None before the first `add`."""
        if steps_left <= 0:
            return 0.0
        step_time_s = self.step_time_s
        return None if step_time_s is None else steps_left * step_time_s


def device_memory(devices: list[Any]) -> dict[str, int]:
    """Return bytes in use, peak and limit, each the largest of `devices`; {} on CPUs."""
    stats = [s for s in (device.memory_stats() for device in devices) if s]
    names = {
        "bytes_in_use": "memory_bytes",
        "peak_bytes_in_use": "memory_peak_bytes",
        "bytes_limit": "memory_limit_bytes",
    }
    values = {key: [int(s[key]) for s in stats if key in s] for key in names}
    return {name: max(values[key]) for key, name in names.items() if values[key]}


def by_source(
    last: Record, unit: str, by_row: Sequence[Any], row_sources: Sequence[str]
) -> dict[str, Any]:
    """Return `loss/SOURCE` of a step and `tokens/SOURCE` (with `unit` "tokens") up to the step.

    `by_row` are loss and weight of each row, float32 [rows]. `last` is the previous record.
    """
    import jax

    losses, weights = (np.asarray(x, np.float64) for x in jax.device_get(by_row))
    values = {name: x for name, x in last.items() if name.startswith(f"{unit}/")}
    sources = np.array(row_sources)
    for source in dict.fromkeys(row_sources):
        own = sources == source
        weight = float(weights[own].sum())
        total = f"{unit}/{source}"
        values[total] = values.get(total, 0.0) + weight
        if weight:
            values[f"loss/{source}"] = float(losses[own].sum() / weight)
    return values


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


class RunSummary:
    """Totals of a run; steps beyond `start_step` in the `earlier` records are lost: not counted.

    `units` are the tokens (images, examples) trained on; `skipped_steps` the steps whose update was
    not applied; `warnings` and `memory_peak_bytes` (0 = unknown) are of this start and process.
    """

    def __init__(self, earlier: Sequence[Record], *, start_step: int, unit: str):
        marker = {"kind": "event", "event": "start", "step": start_step}
        history = current([*earlier, marker])
        trained = [record for record in history if record["kind"] == "train"]
        self.last: Record = {**(trained[-1] if trained else {}), "step": start_step}
        self.unit = unit
        self.units: float = self.last.get(unit, 0)
        base = next((record for record in earlier if record.get("event") == "totals"), {})
        self.evals = [*base.get("evals", []), *(r for r in history if r["kind"] == "eval")]
        count = lambda name, records: sum(r.get("event") == name for r in records)
        self.skipped_steps = base.get("skipped_steps", 0) + count("skipped_step", history)
        self.starts = 1 + base.get("starts", 0) + count("start", earlier)
        first = (base.get("first_start") or earlier[0]["time"]) if earlier else None
        self.first_start: float | None = first
        self.device_seconds_before = device_seconds(list(earlier))
        self.warnings = 0
        self.memory_peak_bytes = 0
        self._seconds: dict[str, float] = collections.defaultdict(float)
        self._slow: dict[tuple[int, str], dict[str, Any]] = {}
        self._readings: dict[str, list[float]] = {}

    def totals(self, device_seconds: float, num_devices: int) -> dict[str, Any]:
        """Return the fields of a `totals` event, from which `read_outline` continues the totals."""
        best, last = self._best_eval(), self.evals[-1:]
        return {
            "step": self.last["step"],
            "first_start": self.first_start,
            "starts": self.starts,
            "skipped_steps": self.skipped_steps,
            "evals": last if best == last else best + last,
            "device_seconds": self.device_seconds_before + device_seconds,
            "num_devices": num_devices,
            "last": self.last,
        }

    def add_times(
        self, step_time_s: float, data_wait_s: float, device_wait_s: float | None
    ) -> None:
        """Add the seconds of a step, and those that it waited for data and for devices.

        A step is dispatched before the results of the previous step are read. If the host waits for
        these results, the devices were never idle. Otherwise the step does not count as busy.
        """
        self._seconds["steps"] += step_time_s
        self._seconds["data"] += data_wait_s
        if device_wait_s is None:
            return
        self._seconds["device"] += device_wait_s
        if device_wait_s < READY_SHARE * step_time_s:
            self._seconds["dry"] += step_time_s
            self._seconds["dry_data"] += data_wait_s
            self._seconds["dry_host"] += max(0.0, step_time_s - data_wait_s - device_wait_s)

    def add_straggler(self, slow: Straggler) -> None:
        """Count one interval in which the others waited for the process of `slow`."""
        entry = self._slow.setdefault(
            (slow.process, slow.cause),
            {"process": slow.process, "host": slow.host, "cause": slow.cause, "intervals": 0},
        )
        entry["intervals"] += 1
        entry["lost_s_per_step"] = max(slow.lost_s, entry.get("lost_s_per_step", 0.0))

    def add_readings(self, readings: Mapping[str, float]) -> None:
        """Add statistics of this process's GPUs (`GpuStats.read`) at one step."""
        for name, value in readings.items():
            self._readings.setdefault(name, []).append(value)

    def summary(
        self, throughput: Throughput, watches: Sequence[CompileTracker], wall_s: float
    ) -> dict[str, Any]:
        """Return the numbers of summary.json; unknown numbers are omitted."""
        unit, num_devices = self.unit, throughput.num_devices
        device_s = self.device_seconds_before + wall_s * num_devices
        summary: dict[str, Any] = {
            "step": self.last["step"],
            "unit": unit,
            unit: self.units,
            "num_devices": num_devices,
            "starts": self.starts,
            "wall_s": wall_s,
            "device_hours": device_s / 3600,
            "skipped_steps": self.skipped_steps,
            "warnings": self.warnings,
        }
        if "loss" in self.last:
            summary["loss"] = self.last["loss"]
        if self.evals:
            summary["eval"] = _metrics_of(self.evals[-1])
        for best in self._best_eval():
            summary["best_eval"] = _metrics_of(best)
        summary |= rates(throughput, unit)
        if self._seconds:
            summary["steps_s"] = self._seconds["steps"]
            share = {name: s / summary["steps_s"] for name, s in self._seconds.items()}
            summary["data_wait_share"] = share["data"]
            if "device" in share:
                summary["device_wait_share"] = share["device"]
                summary["busy_share"] = 1.0 - share.get("dry", 0.0)
            if "dry" in share:
                summary["dry_data_share"] = share["dry_data"]
                summary["dry_host_share"] = share["dry_host"]
        if self._slow:
            summary["stragglers"] = sorted(self._slow.values(), key=lambda s: -s["intervals"])
        combine = {"gpu_temperature_c": max, "gpu_memory_used_bytes": max, "gpu_clock_mhz": min}
        for name, values in self._readings.items():
            summary[name] = combine.get(name, statistics.fmean)(values)
        if self.memory_peak_bytes:
            summary["memory_peak_bytes"] = self.memory_peak_bytes
        if watches:
            summary["compile_s"] = sum(watch.seconds for watch in watches)
            summary["recompilations"] = sum(max(0, watch.count - 1) for watch in watches)
        return summary

    def _best_eval(self) -> list[Record]:
        rated = [e for e in self.evals if math.isfinite(e.get("loss", math.nan))]
        return [min(rated, key=lambda e: e["loss"])] if rated else []


def rates(throughput: Throughput, unit: str) -> dict[str, Any]:
    """Return medians over the steps of this start: speed, step time, MFU; {} before the second."""
    rate = throughput.run_tokens_per_s
    if rate is None:
        return {}
    values: dict[str, Any] = {
        f"{unit}_per_s": rate,
        f"{unit}_per_s_per_device": rate / throughput.num_devices,
        "step_time_s": throughput.run_step_time_s,
    }
    mfu = throughput.mfu_fields(rate)
    if mfu:
        values |= mfu
        values["mfu_convention"] = throughput.convention
        values["mfu_formula"] = MFU_FORMULA
        values["peak_flops"] = throughput.peak_flops
    return values


def _metrics_of(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in ("kind", "time")}
