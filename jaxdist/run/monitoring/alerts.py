"""What a healthy run does not show: NaN, slow data, slow processes, a second compilation."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxdist.run.monitoring import console
from jaxdist.run.monitoring.config import MonitoringConfig
from jaxdist.run.monitoring.stragglers import StragglerDetector, find_stragglers
from jaxdist.run.monitoring.summary import RunSummary
from jaxdist.run.monitoring.timers import (
    DATA_WAIT_WARNING,
    WINDOW_STEPS,
    Compilation,
    DataWaitTracker,
)


class Alerts:
    """Watches a run's numbers and makes an event of what is out of order, once per episode.

    Args:
        config: how often processes are compared.
        totals: counts what is found.
        event: `Monitor.event`.
        read_sensors: readings of this process's GPUs.
        num_processes: of the job.
        compares: whether this process compares what all processes tell.
    """

    def __init__(
        self,
        config: MonitoringConfig,
        totals: RunSummary,
        event: Callable[..., None],
        read_sensors: Callable[[], dict[str, float]],
        *,
        num_processes: int,
        compares: bool,
    ):
        self._totals, self._event = totals, event
        self._read_sensors, self._compares = read_sensors, compares
        self._data_wait = DataWaitTracker(threshold=DATA_WAIT_WARNING, window_steps=WINDOW_STEPS)
        self._processes = StragglerDetector(num_processes, config.straggler_interval_steps)
        self._held_up: set[tuple[int, str]] = set()
        self._said_impossible = False

    @property
    def data_wait_share(self) -> float:
        """Share of the window's time spent waiting for data, in [0, 1]."""
        return self._data_wait.share

    def step_times(
        self, step: int, step_time_s: float, data_wait_s: float, device_wait_s: float | None
    ) -> None:
        """Count a step's seconds; warn where waiting for data takes too many of them."""
        if device_wait_s is not None:
            self._processes.add(step_time_s, data_wait_s, device_wait_s)
        if not self._data_wait.add(data_wait_s, step_time_s):
            return
        share = self._data_wait.share
        self._event(
            "slow_loader",
            step=step,
            data_wait_share=share,
            level=logging.WARNING,
            message=f"the data loader is the bottleneck: {console.percent(share)} of the last "
            f"{WINDOW_STEPS} steps went to waiting for data (warned above "
            f"{console.percent(DATA_WAIT_WARNING)}). Tokenise the corpus once, give "
            "the loader more workers, or a faster disk.",
        )

    def values(self, step: int, values: Mapping[str, float]) -> None:
        """Report a step that was skipped, or whose loss or gradient is not finite."""
        bad = [k for k in ("loss", "grad_norm") if not math.isfinite(values.get(k, 0.0))]
        shown: dict[str, Any] = {k: values[k] for k in bad}
        if not values.get("applied", True):
            self._totals.skipped_steps += 1
            skipped = self._totals.skipped_steps
            why = f" ({' and '.join(f'{k} is {values[k]}' for k in bad)})" if bad else ""
            self._event(
                "skipped_step",
                step=step,
                skipped_steps=skipped,
                **shown,
                level=logging.WARNING,
                message=f"step {step} was skipped{why}; {skipped} skipped so far",
            )
        elif bad:
            self._event(
                "not_finite",
                step=step,
                **shown,
                level=logging.WARNING,
                message=f"step {step}: {' and '.join(f'{k} is {values[k]}' for k in bad)}",
            )

    def processes(self, step: int) -> None:
        """At the end of an interval tell the coordinator how this process fares; one compares."""
        if self._processes.ends(step):
            self._processes.end_interval(step, self._read_sensors())
        if not (self._compares and self._processes.is_open):
            return
        said = self._processes.everyone()
        if not said:
            return
        step = said[0]["step"]
        names = ("step_time_s", "data_wait_s", "device_wait_s", "host_s")
        means = {name: [one[name] for one in said.values()] for name in names}
        self._event(
            "process_times",
            step=step,
            quiet=True,
            of=list(said),
            hosts=[one["host"] for one in said.values()],
            means=means,
        )
        slow = find_stragglers(said)
        for one in slow:
            self._totals.add_straggler(one)
            if (one.process, one.cause) in self._held_up:
                continue  # said already: once per episode
            self._event(
                "straggler",
                step=step,
                process=one.process,
                host=one.host,
                cause=one.cause,
                lost_s=one.lost_s,
                level=logging.WARNING,
                message=one.text,
            )
        self._held_up = {(one.process, one.cause) for one in slow}

    def mfu(self, mfu: float | None) -> None:
        """Report, once, a utilisation above 1."""
        if mfu is None or mfu <= 1.0 or self._said_impossible:
            return
        self._said_impossible = True
        self._event(
            "impossible_mfu",
            mfu=mfu,
            level=logging.WARNING,
            message=f"an MFU of {console.percent(mfu)} cannot be: the peak or the model's FLOPs "
            "per token is wrong. Check monitoring.peak_tflops and Model.flops_per_token.",
        )

    def compilation(self, done: Compilation) -> None:
        """Report a compilation; from the second of a function on as a warning."""
        source = " from the compile cache" if done.from_cache else ""
        took = f"{done.function} compiled{source} in {console.duration(done.seconds)}"
        fields: dict[str, Any] = {
            "function": done.function,
            "seconds": done.seconds,
            "from_cache": done.from_cache,
            "count": done.count,
        }
        if done.count == 1:
            self._event("compile", message=took, **fields)
            return
        changed = "; ".join(done.changes) or "no argument that can be seen"
        self._event(
            "recompile",
            **fields,
            changes=list(done.changes),
            level=logging.WARNING,
            message=f"{took}: compilation {done.count} of it, a run needs one. Changed: {changed}",
        )
