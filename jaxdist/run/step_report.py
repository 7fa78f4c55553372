"""Reads the metrics of each step: records them, rolls back or stops if they are bad."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, NoReturn

from jaxdist.checkpoint import Checkpointer
from jaxdist.core.step import Metrics
from jaxdist.data import Loader
from jaxdist.data.order import Link
from jaxdist.run.metrics_log import ExitReason
from jaxdist.run.monitoring.monitor import Monitor
from jaxdist.run.monitoring.timers import StepTimer
from jaxdist.run.resilience.anomalies import Anomaly, LossGuard, Rollback, Stopped
from jaxdist.run.resilience.sdc_check import CorruptState, SdcCheck
from jaxdist.run.resilience.watchdog import Watchdog
from jaxdist.run.setup import Parts
from jaxdist.runtime import StartTimes


@dataclasses.dataclass(kw_only=True)
class StepReporter:
    """Reads the metrics of dispatched steps, and acts on them.

    A pending save finishes before the run stops. The first step ends `start_times`.
    """

    monitor: Monitor
    timer: StepTimer
    watchdog: Watchdog
    guard: LossGuard
    sdc_check: SdcCheck
    checkpointer: Checkpointer
    start_times: StartTimes
    parts: Parts
    _deferred: tuple[int, Metrics, Loader, Link] | None = dataclasses.field(
        default=None, init=False
    )

    def defer(self, step: int, state: Any, metrics: Metrics, loader: Loader) -> None:
        """Keep the metrics of a dispatched step for `flush`; start a due check of its `state`."""
        # The next batch advances the loader, so store the position of this batch now.
        self._deferred = (step, metrics, loader, loader.ledger.links[-1])
        self.start_check(step, state)

    def start_check(self, step: int, state: Any, *, force: bool = False) -> None:
        """Start comparing the replicas of the state after `step` if a check is due or forced."""
        self.timer.dispatch(self.sdc_check.start, step, state, force=force)

    def discard(self) -> None:
        """Drop the deferred step, because an earlier state was restored."""
        self._deferred = None
        self.sdc_check.discard()

    def flush(self) -> None:
        """Record and check the deferred step, if any; raise Rollback, Stopped or CorruptState."""
        if self._deferred is None:
            return
        step, metrics, loader, link = self._deferred
        self._deferred = None
        values = self._record(step, metrics, link, loader.sources(link))
        self._check_replicas()
        anomaly = self.guard.check(step, values, loader, link.first_sample)
        if anomaly is not None:
            self._act_on(anomaly)
        if self.guard.skipped >= self.guard.config.max_skipped_steps:
            self.stop_skipping(step)

    def stop_skipping(self, step: int) -> NoReturn:
        """End a run whose last steps were all skipped; raises `Stopped`."""
        kind = self.guard.skip_kind
        is_spike = kind == ExitReason.LOSS_SPIKE
        why = "the loss was too high" if is_spike else "loss or gradients were NaN or infinite"
        self.stop(
            kind,
            f"step {step}: the updates of the last {self.guard.skipped} steps were not applied, "
            f"because {why} (resilience.max_skipped_steps). Lower optim.peak_lr, or check the "
            "rows in anomalies.jsonl.",
        )

    def _record(
        self, step: int, metrics: Metrics, link: Link, row_sources: list[str]
    ) -> dict[str, Any]:
        weight = self.timer.read(lambda: float(metrics["weight"]))
        step_time_s, data_wait_s = self.timer.lap()
        self.watchdog.finished(step, step_time_s)
        values = self.monitor.train(
            step,
            metrics,
            tokens=weight,
            step_time_s=step_time_s,
            data_wait_s=data_wait_s,
            device_wait_s=self.timer.device_wait_s,
            link=link,
            row_sources=row_sources,
            stage=self._stage_of(step),
        )
        if not self.start_times.done:
            self._report_start(step)
        return values

    def _stage_of(self, step: int) -> dict[str, Any]:
        """Return rows, length and FLOPs of a step if the run changes its batches, else {}."""
        if len(self.parts.config.train.stages) == 1:
            return {}
        parts = self.parts.in_stage(step - 1)
        train = parts.config.train
        return {
            "global_batch_size": train.global_batch_size,
            "seq_len": train.seq_len,
            "flops_per_token": parts.flops_per_unit,
        }

    def _report_start(self, step: int) -> None:
        times = self.start_times
        times.end("first_step")
        if self.monitor.start_step == 0 and not times.follows_failure:
            return
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in times.parts.items())
        fields: dict[str, Any] = {f"{name}_s": seconds for name, seconds in times.parts.items()}
        fields |= {"step": step, "seconds": times.total}
        since = "the failure" if times.follows_failure else "the start"
        self.monitor.event(
            "restart",
            message=f"step {step} was done {times.total:.1f} s after {since}: {parts}",
            **fields,
        )

    def _check_replicas(self) -> None:
        mismatch = self.timer.read(self.sdc_check.result)
        if mismatch is None:
            return
        text = str(mismatch)
        self.monitor.event("sdc", step=mismatch.step, message=text, level=logging.ERROR)
        if self.sdc_check.may_roll_back():
            raise Rollback
        self.checkpointer.wait()
        self.monitor.summary(ExitReason.SDC, error=text)
        raise CorruptState(text)

    def _act_on(self, anomaly: Anomaly) -> None:
        # The monitor has reported a skipped step already.
        reported = anomaly.kind == ExitReason.NONFINITE_LOSS and anomaly.action == "skip"
        self.monitor.event(
            "loss_anomaly",
            step=anomaly.step,
            message=str(anomaly),
            level=logging.INFO if reported else logging.WARNING,
            quiet=reported,
        )
        if anomaly.action == "rollback":
            raise Rollback(anomaly)
        if anomaly.action == "stop":
            self.stop(anomaly.kind, self.guard.stop_text(anomaly))

    def stop(self, kind: str, text: str) -> NoReturn:
        """Finish the pending save, write the summary and raise `Stopped`.

        Non-finite parameters are never saved: those in the newest checkpoint are finite.
        """
        self.checkpointer.wait()
        steps = self.checkpointer.steps()
        newest = f"that of step {steps[-1]}" if steps else "none"
        text = f"{text} The last checkpoint with finite parameters: {newest}."
        self.monitor.summary(kind, error=text)
        raise Stopped(text)
