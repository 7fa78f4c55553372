"""What a run has come to so far, across its starts: the content of summary.json."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxdist.monitoring.records import Record, current, device_seconds
from jaxdist.monitoring.throughput import MFU_FORMULA, Throughput
from jaxdist.monitoring.watches import CompileWatch


class Totals:
    """Counts of a run. What an earlier start did beyond `start_step` was lost and does not count.

    Args:
        earlier: records of the run's earlier starts, from its metrics.jsonl.
        start_step: the step this start goes on from.
        unit: what is counted, `Model.unit`.

    Attributes:
        units: tokens (or images) trained on.
        last: the newest train record, or just its step.
        evals: eval records, oldest first.
        skipped_steps: steps whose update was not applied.
        warnings: events of level warning or above, of this start.
        memory_peak_bytes: of the fullest device of this process, this start; 0 if not known.
    """

    def __init__(self, earlier: Sequence[Record], *, start_step: int, unit: str):
        marker = {"kind": "event", "event": "start", "step": start_step}
        history = current([*earlier, marker])
        trained = [record for record in history if record["kind"] == "train"]
        self.last: Record = {**(trained[-1] if trained else {}), "step": start_step}
        self.unit = unit
        self.units: float = self.last.get(unit, 0)
        self.evals = [record for record in history if record["kind"] == "eval"]
        self.skipped_steps = sum(record.get("event") == "skipped_step" for record in history)
        self.starts = 1 + sum(record.get("event") == "start" for record in earlier)
        self.device_seconds_before = device_seconds(list(earlier))
        self.warnings = 0
        self.memory_peak_bytes = 0
        self._wait_s = self._time_s = 0.0

    def add_times(self, step_time_s: float, data_wait_s: float) -> None:
        """Count one step's time and how much of it went to waiting for data."""
        self._time_s += step_time_s
        self._wait_s += data_wait_s

    def summary(
        self, throughput: Throughput, watches: Sequence[CompileWatch], wall_s: float
    ) -> dict[str, Any]:
        """The numbers of summary.json; what is not known is not in it."""
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
        summary |= self._evaluations() | rates(throughput, unit)
        if self._time_s > 0:
            summary["data_wait_share"] = self._wait_s / self._time_s
        if self.memory_peak_bytes:
            summary["memory_peak_bytes"] = self.memory_peak_bytes
        if watches:
            summary["compile_s"] = sum(watch.seconds for watch in watches)
            summary["recompilations"] = sum(max(0, watch.count - 1) for watch in watches)
        return summary

    def _evaluations(self) -> dict[str, Any]:
        if not self.evals:
            return {}
        found = {"eval": _metrics_of(self.evals[-1])}
        rated = [e for e in self.evals if math.isfinite(e.get("loss", math.nan))]
        if rated:
            found["best_eval"] = _metrics_of(min(rated, key=lambda e: e["loss"]))
        return found


def rates(throughput: Throughput, unit: str) -> dict[str, Any]:
    """Medians over the run: speed, step time, MFU with what it means; {} before the second step."""
    rate = throughput.run_tokens_per_s
    if rate is None:
        return {}
    found: dict[str, Any] = {
        f"{unit}_per_s": rate,
        f"{unit}_per_s_per_device": rate / throughput.num_devices,
        "step_time_s": throughput.run_step_time_s,
    }
    mfu = throughput.mfu_fields(rate)
    if mfu:
        found |= mfu
        found["mfu_convention"] = throughput.convention
        found["mfu_formula"] = MFU_FORMULA
        found["peak_flops"] = throughput.peak_flops
    return found


def _metrics_of(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in ("kind", "time")}
