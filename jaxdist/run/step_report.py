"""What a step's metrics lead to: a record, and where they are bad, going back or stopping."""

from __future__ import annotations

import logging

from jaxdist.checkpoint import Checkpointer
from jaxdist.core.state import TrainState
from jaxdist.core.step import REPLICA_NORMS, Metrics
from jaxdist.data import Loader
from jaxdist.run.exit_reason import ExitReason
from jaxdist.run.monitoring import Monitor, StepTimer
from jaxdist.run.resilience import (
    Anomaly,
    CorruptState,
    LossGuard,
    Rollback,
    SdcCheck,
    Stopped,
    Watchdog,
    uneven_norms,
)


class StepReporter:
    """Reads the metrics of step n−1 once step n is dispatched, and acts on them.

    Args:
        monitor: where they are recorded.
        timer: of the loop.
        watchdog: hears of every finished step.
        guard: judges losses.
        replicas: compares what devices hold of one value.
        checkpointer: finishes its save before a run is stopped.
    """

    def __init__(
        self,
        monitor: Monitor,
        timer: StepTimer,
        watchdog: Watchdog,
        guard: LossGuard,
        replicas: SdcCheck,
        checkpointer: Checkpointer,
    ):
        self.monitor, self.timer, self.watchdog = monitor, timer, watchdog
        self.guard, self.replicas, self.checkpointer = guard, replicas, checkpointer
        self._held: tuple[int, Metrics, Loader, int] | None = None

    def hold(self, step: int, metrics: Metrics, loader: Loader) -> None:
        """Keep a dispatched step's metrics, still on the devices, and the place of its data."""
        self._held = (step, metrics, loader, loader.first_sample)

    def forget(self) -> None:
        """Drop what is held: the run goes back."""
        self._held = None
        self.replicas.forget()

    def look(self, step: int, state: TrainState, *, force: bool = False) -> None:
        """Start comparing the replicas of the state after `step`, when it is time or forced."""
        self.timer.dispatch(self.replicas.look, step, state, force=force)

    def report(self) -> None:
        """Record the step that is held, if one is, and judge it.

        Raises:
            Rollback: the policy is to go back to a checkpoint.
            Stopped: the policy is to end the run.
            CorruptState: see `check_replicas`.
        """
        if self._held is None:
            return
        step, metrics, loader, first_sample = self._held
        self._held = None
        values = self._record(step, metrics)
        self.check_replicas()
        anomaly = self.guard.judge(step, values, loader, first_sample)
        if anomaly is not None:
            self._act_on(anomaly)

    def check_replicas(self) -> None:
        """Act on devices that hold different bits of one value.

        Raises:
            Rollback: the policy is to go back to a checkpoint.
            CorruptState: the policy is to end the run.
        """
        damage = self.timer.read(self.replicas.found)
        if damage is None:
            return
        self.monitor.event("sdc", step=damage.step, message=str(damage), level=logging.ERROR)
        if not self.replicas.gives_up():
            raise Rollback
        self.checkpointer.wait()
        self.monitor.summary(ExitReason.SDC, error=str(damage))
        raise CorruptState(str(damage))

    def _record(self, step: int, metrics: Metrics) -> dict[str, float]:
        """Wait for the step's numbers and hand them to the sinks; returns them."""
        weight = self.timer.read(lambda: float(metrics["weight"]))
        step_time_s, data_wait_s = self.timer.lap()
        self.watchdog.finished(step, step_time_s)
        norms = metrics.pop(REPLICA_NORMS, None)
        values = self.monitor.train(
            step,
            metrics,
            tokens=weight,
            step_time_s=step_time_s,
            data_wait_s=data_wait_s,
            device_wait_s=self.timer.device_wait_s,
        )
        if norms is not None and (uneven := uneven_norms(norms.tolist())):
            self.monitor.event("replica_norm_outlier", step=step, message=f"step {step}: {uneven}")
        return values

    def _act_on(self, anomaly: Anomaly) -> None:
        said = (
            anomaly.kind == ExitReason.NONFINITE_LOSS and anomaly.action == "skip"
        )  # by the monitor
        self.monitor.event(
            "loss_anomaly",
            step=anomaly.step,
            message=str(anomaly),
            level=logging.INFO if said else logging.WARNING,
            quiet=said,
        )
        if anomaly.action == "rollback":
            raise Rollback(anomaly)
        if anomaly.action == "stop":
            self.checkpointer.wait()
            self.monitor.summary(anomaly.kind, error=str(anomaly))
            raise Stopped(self.guard.stop_text(anomaly))
