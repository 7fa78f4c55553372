"""Anomalies: a loss or gradient norm that is not finite, or a loss far above those before."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import statistics
from collections.abc import Mapping
from typing import Any

from jaxdist import runtime
from jaxdist.config.resilience import MAX_ROLLBACKS, ResilienceConfig
from jaxdist.run.metrics_log import ExitReason, decode, encode, skip_reason
from jaxdist.runtime.formatting.tables import few
from jaxdist.runtime.storage import locate

log = logging.getLogger("jaxdist")

_MIN_LOSSES = 16
"""Losses required before spikes are detected, because the loss falls steeply at the start."""
_MAD_TO_DEVIATION = 1.4826  # for a normal distribution
_MIN_DEVIATION = 0.02  # × the median, so that small changes of a smooth loss are not spikes

SPIKE_WINDOW_STEPS = 64
"""Length of the loss window in steps: short enough to follow a falling loss."""

SPIKE_DEVIATIONS = 10.0
"""A loss this many standard deviations above the window's median is a spike. The deviation is
1.48 × the median absolute deviation, and at least 2 % of the median. Noise stays far below ten."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Anomaly:
    """A step whose loss or gradient norm is bad; one line of anomalies.jsonl.

    `kind` is the exit reason of a run that stops for it: "nonfinite_loss" or "loss_spike". `limit`
    is the loss above which the step was a spike; inf = none. `action` is report, skip, rollback or
    stop, by the policy. `rows` are those of its batch, see `Loader.rows`. `left_out` are
    the sample ranges [first, end) that earlier rollbacks skipped.
    """

    step: int
    kind: str
    loss: float
    grad_norm: float
    limit: float
    action: str
    first_sample: int
    num_samples: int
    rows: list[int]
    left_out: list[tuple[int, int]]

    def __str__(self) -> str:
        nonfinite = self.kind == ExitReason.NONFINITE_LOSS
        why = (
            f", gradient norm {self.grad_norm:.4g}" if nonfinite else f" is above {self.limit:.4g}"
        )
        rows = few(list(map(str, self.rows)), 8)
        then = {
            "report": "only reported",
            "skip": "its update was not applied",
            "rollback": "rolling back to the newest checkpoint and skipping this batch",
            "stop": "the run stops",
        }[self.action]
        return f"step {self.step}: loss {self.loss:.4g}{why}; rows {rows}; {then}"

    @property
    def all_left_out(self) -> tuple[tuple[int, int], ...]:
        """Sample ranges [first, end) that the run skips after a rollback for this anomaly."""
        before = tuple((first, end) for first, end in self.left_out)
        return (*before, (self.first_sample, self.first_sample + self.num_samples))

    def is_bad(self, values: Mapping[str, float]) -> bool:
        """Return whether a replay is not finite, or for a spike has a loss above `limit`."""
        if not (math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])):
            return True
        return self.kind == ExitReason.LOSS_SPIKE and values["loss"] > self.limit


class Rollback(Exception):
    """Raised to return to the newest checkpoint and skip the batch of the anomaly, if any."""

    def __init__(self, anomaly: Anomaly | None = None):
        self.anomaly = anomaly
        super().__init__(str(anomaly or ""))


class Stopped(FloatingPointError):
    """Raised to end a run with bad losses or weights. A restart would repeat them."""

    exit_code = runtime.EXIT_DIVERGED


class LossGuard:
    """Checks the loss of every step. All processes read equal losses and make the same decision.

    Anomalies are written to `path`; None on processes that do not write. `skipped` is the number of
    consecutive steps whose update was not applied; steps without labels and steps that lowered the
    loss scale do not count. `skip_kind` is their exit reason, "loss_spike" if each was a spike.
    """

    def __init__(self, config: ResilienceConfig, path: str | os.PathLike[str] | None):
        self.config = config
        self._path = None if path is None else locate(path)
        self._losses: list[tuple[int, float]] = []
        self._rollbacks, self._gave_up = 0, False
        self.skipped, self.skip_kind = 0, ""

    def update_limit(self, step: int) -> float:
        """Return the loss above which the compiled step skips its update; inf = no limit."""
        return self.limit(step) if self.config.spike_policy == "skip" else math.inf

    def limit(self, step: int) -> float:
        """Return the loss above which `step` is a spike; inf with policy off or too few losses.

        It depends only on losses up to step − 2, which are available when the step is dispatched.
        So the compiled step and the report use the same limit, also in a resumed run.
        """
        window = [loss for at, loss in self._losses if at <= step - 2][-SPIKE_WINDOW_STEPS:]
        if self.config.spike_policy == "off" or len(window) < _MIN_LOSSES:
            return math.inf
        median = statistics.median(window)
        spread = _MAD_TO_DEVIATION * statistics.median(abs(loss - median) for loss in window)
        return median + SPIKE_DEVIATIONS * max(spread, _MIN_DEVIATION * abs(median))

    def check(
        self, step: int, values: Mapping[str, Any], loader: Any, first_sample: int
    ) -> Anomaly | None:
        """Return the anomaly of a step, after writing it, or None; count skipped steps."""
        reason = skip_reason(values)
        if reason == "no_labels":
            return None
        if reason != "loss_scale_search":
            self.skipped = self.skipped + 1 if reason else 0
            if reason and (self.skipped == 1 or reason == ExitReason.NONFINITE_LOSS):
                self.skip_kind = reason
        loss, limit = values["loss"], self.limit(step)
        kind = self._kind(values, limit)
        if not kind:
            self._losses = [*self._losses, (step, loss)][-(SPIKE_WINDOW_STEPS + 2) :]
            return None
        rows = loader.rows(first_sample)
        anomaly = Anomaly(
            step=step,
            kind=kind,
            loss=loss,
            grad_norm=values["grad_norm"],
            limit=limit,
            action=self._action(kind),
            first_sample=first_sample,
            num_samples=len(rows),
            rows=rows,
            left_out=list(loader.left_out),
        )
        if self._path is not None:
            file = self._path.appender()
            file.cut_torn_tail()  # a line that a kill truncated
            file.append(f"{encode(dataclasses.asdict(anomaly))}\n".encode())
            file.close()
        return anomaly

    def state(self) -> list[list[float]]:
        """Return the losses to store in a checkpoint, as JSON: [step, loss] each."""
        return [[step, loss] for step, loss in self._losses]

    def restore(self, state: list[list[float]]) -> None:
        """Restore the losses that `state` returned at a save."""
        self._losses = [(int(step), float(loss)) for step, loss in state]

    def stop_text(self, anomaly: Anomaly) -> str:
        """Return the error message of a run that stops for an anomaly."""
        nonfinite = anomaly.kind == ExitReason.NONFINITE_LOSS
        setting = f"resilience.{'nonfinite' if nonfinite else 'spike'}_policy"
        if self._gave_up:
            return (
                f"{anomaly}: {self._rollbacks} rollbacks, the limit of one start, did not fix it. "
                "Lower optim.peak_lr, or check the rows in anomalies.jsonl."
            )
        applied = "The update was not applied; c" if nonfinite else "C"
        return (
            f"{anomaly}, because of {setting}='stop'. {applied}heckpoints up to here are good. "
            f"Lower optim.peak_lr, check the batch, or set {setting}=skip."
        )

    def _kind(self, values: Mapping[str, float], limit: float) -> str:
        if not math.isfinite(values["loss"]):
            return ExitReason.NONFINITE_LOSS
        if not math.isfinite(values["grad_norm"]):
            # With a loss scale, gradients may overflow: the step then lowers the scale.
            return "" if values.get("loss_scale", 1.0) > 1 else ExitReason.NONFINITE_LOSS
        return ExitReason.LOSS_SPIKE if values["loss"] > limit else ""

    def _action(self, kind: str) -> str:
        nonfinite = kind == ExitReason.NONFINITE_LOSS
        policy = self.config.nonfinite_policy if nonfinite else self.config.spike_policy
        if policy != "rollback":
            return policy
        if self._rollbacks >= MAX_ROLLBACKS:
            self._gave_up = True
            return "stop"
        self._rollbacks += 1
        return policy


def read_anomalies(path: str | os.PathLike[str]) -> list[Anomaly]:
    """Return the anomalies, oldest first; [] without a file. Skips a line that is no record."""
    file = locate(path)
    anomalies = []
    for number, line in enumerate(file.text().splitlines() if file.exists() else [], start=1):
        try:
            anomalies.append(Anomaly(**decode(line)))
        except (ValueError, TypeError):
            log.warning("%s: line %d is no complete record and was skipped", file, number)
    return anomalies
