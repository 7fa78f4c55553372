"""Warnings of a run, such as skipped steps, a slow data loader, stragglers, unused experts."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxdist.run.metrics_log import skip_reason
from jaxdist.run.monitoring.stragglers import StragglerDetector, find_stragglers, table
from jaxdist.run.monitoring.summary import RunSummary
from jaxdist.run.monitoring.timers import (
    DATA_WAIT_WARNING,
    WINDOW_STEPS,
    Compilation,
    DataWaitTracker,
)
from jaxdist.runtime.formatting.numbers import duration, percent

_LINES_PER_COMPARISON = 5  # console lines between two comparisons of the processes


class Alerts:
    """Warns about steps, times and compilations; with `compares`, also about slow processes."""

    def __init__(
        self,
        summary: RunSummary,
        event: Callable[..., None],
        read_gpus: Callable[[], dict[str, float]],
        *,
        num_processes: int,
        compares: bool,
        log_interval_steps: int,
    ):
        self._summary, self._event = summary, event
        self._read_gpus, self._compares = read_gpus, compares
        self.data_wait = DataWaitTracker(threshold=DATA_WAIT_WARNING, window_steps=WINDOW_STEPS)
        every = _LINES_PER_COMPARISON * log_interval_steps
        self._stragglers = StragglerDetector(num_processes, every)
        self._slow: set[tuple[int, str]] = set()

    def step_times(
        self, step: int, step_time_s: float, data_wait_s: float, device_wait_s: float | None
    ) -> None:
        """Add the seconds of a step; warn if data took too large a share of the last steps."""
        if device_wait_s is not None:
            self._stragglers.add(step_time_s, data_wait_s, device_wait_s)
        if not self.data_wait.add(data_wait_s, step_time_s):
            return
        share = self.data_wait.share
        self._event(
            "slow_loader",
            step=step,
            data_wait_share=share,
            level=logging.WARNING,
            message=f"the data loader is the bottleneck: {percent(share)} of the time of the last "
            f"{WINDOW_STEPS} steps was waiting for data (warned above "
            f"{percent(DATA_WAIT_WARNING)}). Raise data.num_workers for costly transforms "
            "or use a faster disk.",
        )

    def values(self, step: int, values: Mapping[str, Any]) -> None:
        """Log an event if the metrics of a step show that its update was skipped."""
        if not (reason := skip_reason(values)):
            return
        bad = [k for k in ("loss", "grad_norm") if not math.isfinite(values.get(k) or 0.0)]
        self._summary.skipped_steps += 1
        skipped = self._summary.skipped_steps
        why = f" ({' and '.join(f'{k} is {values[k]}' for k in bad)})" if bad else ""
        why = {
            "no_labels": " (none of its rows has a label)",
            "loss_scale_search": f" by the loss-scale search: gradients overflow at the scale "
            f"{values.get('loss_scale', 1.0):g}, which is halved",
        }.get(reason, why)
        self._event(
            "skipped_step",
            step=step,
            reason=reason,
            skipped_steps=skipped,
            **{k: values[k] for k in bad},
            level=logging.INFO if reason == "loss_scale_search" else logging.WARNING,
            message=f"step {step} was skipped{why}; {skipped} skipped so far",
        )

    def processes(self, step: int) -> None:
        """At the end of an interval, publish this process's times; process 0 reports stragglers."""
        if self._stragglers.ends(step):
            self._stragglers.end_interval(step, self._read_gpus())
        if not self._compares or not (reports := self._stragglers.everyone()):
            return
        step = reports[0]["step"]
        slow = find_stragglers(reports)
        self._event("process_times", step=step, quiet=True, **table(reports, slow))
        for one in slow:
            self._summary.add_straggler(one)
            if (one.process, one.cause) in self._slow:
                continue  # reported already in this episode
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
        self._slow = {(one.process, one.cause) for one in slow}

    def compilation(self, done: Compilation) -> None:
        """Report a compilation; every one after a function's first is a warning."""
        source = " from the compile cache" if done.from_cache else ""
        took = f"{done.function} compiled{source} in {duration(done.seconds)}"
        fields: dict[str, Any] = dataclasses.asdict(done)
        if done.count == 1:
            self._event("compile", message=took, **fields)
            return
        self._event(
            "recompile",
            **fields,
            level=logging.WARNING,
            message=f"{took}: compilation {done.count}, a run needs one. "
            "JAX_EXPLAIN_CACHE_MISSES=1 logs the arguments that changed.",
        )


_NAMED = 8  # experts that a warning names
_DROPPED = 0.1  # share of the choices of a layer that is worth a warning


class ExpertLoads:
    """Adds up the tokens of each expert between two reports."""

    def __init__(self, event: Callable[..., None], plot: Callable[..., None]):
        self._event, self._plot = event, plot
        self._counts: Any = 0.0
        self._sums: dict[str, Any] = {}
        self._weight = 0.0
        self._num_steps = 0
        self._unused: set[tuple[int, int]] = set()
        self._dropping = False

    def add(self, sums: Mapping[str, Any], weight: float) -> None:
        """Add a step's sums of layers with experts: tokens [layers, experts], others [layers]."""
        sums = dict(sums)
        self._counts = self._counts + np.asarray(sums.pop("expert_tokens"), np.float64)
        self._weight += weight
        self._num_steps += 1
        for name, value in sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + np.asarray(value, np.float64)

    def report(self, step: int) -> None:
        """Record the loads since the last report; warn once of drops and of each unused expert."""
        if not self._num_steps or not np.sum(self._counts):
            return
        loads = self._counts / self._counts.mean(1, keepdims=True)
        fields = {
            "largest_load": loads.max(1),
            "smallest_load": loads.min(1),
            "unused_experts": (loads == 0).sum(1),
        }
        for name, value in self._sums.items():
            if name != "trained_tokens":
                fields[name] = value / max(self._weight, 1e-20)
        lists = {name: value.tolist() for name, value in fields.items()}
        self._event("experts", quiet=True, step=step, num_steps=self._num_steps, **lists)
        points = {
            f"experts/{name}/{i:03d}": x for name, xs in lists.items() for i, x in enumerate(xs)
        }
        self._plot(step, points)
        dropped = np.asarray(fields.get("dropped", [0.0]))
        if dropped.max() > _DROPPED and not self._dropping:
            self._dropping, layer = True, int(dropped.argmax())
            self._event(
                "dropped_tokens",
                step=step,
                layer=layer,
                dropped=float(dropped[layer]),
                level=logging.WARNING,
                message=f"layer {layer} of those with experts dropped {percent(dropped[layer])} of "
                f"its tokens in {self._num_steps} steps. Raise capacity_factor or balance_loss "
                "in model.router.",
            )
        unused = set(zip(*(index.tolist() for index in np.nonzero(loads == 0)), strict=True))
        if new := sorted(unused - self._unused):
            named = ", ".join(f"layer {layer} expert {expert}" for layer, expert in new[:_NAMED])
            more = f" and {len(new) - _NAMED} more" if len(new) > _NAMED else ""
            self._event(
                "collapsed_experts",
                step=step,
                experts=[list(pair) for pair in new],
                level=logging.WARNING,
                message=f"no token reached these in {self._num_steps} steps: {named}{more}"
                " of layers with experts. Raise balance_loss in model.router, or lower peak_lr.",
            )
        self._unused |= unused
        self._counts, self._sums, self._weight, self._num_steps = 0.0, {}, 0.0, 0
