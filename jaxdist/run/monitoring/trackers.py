"""Experiment trackers: a run's metrics, settings and summary go to wandb, mlflow or one's own.

Each tracker works in a thread of its own, so that neither its network nor its errors reach the
training: the first error is a warning, and that tracker gets nothing more.

A tracker of one's own is what a function returns that `monitoring.tracker` names, called with the
keywords of `Identity`; it has `log(step, values)` and `finish(summary)`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jaxdist.run.metrics_log import plain
from jaxdist.runtime.named_function import named_function

logger = logging.getLogger("jaxdist")

_MOST_WAITING = 1000
"""Points that wait for a slow tracker at most; what comes then is dropped, and said once."""

_FINISH_S = 60.0
"""Seconds that the end of a run waits for a tracker."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity:
    """Which run it is: the same after every restart.

    Attributes:
        run_id: 16 hex digits.
        name: of the run directory.
        settings: dotted name -> value.
        directory: of the run, for what a tracker writes.
    """

    run_id: str
    name: str
    settings: Mapping[str, Any]
    directory: str


def run_id_of(first_start: float) -> str:
    """16 hex digits of the time at which a run started for the first time, seconds since 1970."""
    return hashlib.sha256(repr(first_start).encode()).hexdigest()[:16]


class Tracker(Protocol):
    """Where metrics go."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Take numbers of a step: "train/loss", "eval/loss", "speed/tokens_per_s" ..."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Take the numbers of summary.json; nothing follows, unless the run is started again."""


class Trackers:
    """All trackers of a run, each in its thread; on process 0 only."""

    def __init__(self, names: Sequence[str], identity: Identity):
        self._workers = [_Worker(name, identity) for name in names]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Hand the numbers of a step on; waits for nothing."""
        for worker in self._workers:
            worker.put(lambda tracker: tracker.log(step, values))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Hand the summary on, and wait until it has arrived or is late."""
        for worker in self._workers:
            worker.put(lambda tracker: tracker.finish(plain(summary)))
        self.close()

    def close(self) -> None:
        """Wait until what was handed on has arrived or is late; a second call does nothing."""
        for worker in self._workers:
            worker.end()
        self._workers = []


class _Worker:
    """One tracker and the thread that talks to it."""

    def __init__(self, name: str, identity: Identity):
        self._name, self._identity = name, identity
        self._failed = False  # and the log says so
        self._failing = threading.Lock()
        self._tasks: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(_MOST_WAITING)
        self._thread = threading.Thread(target=self._work, name=f"tracker: {name}", daemon=True)
        self._thread.start()

    def put(self, task: Callable[[Tracker], None]) -> None:
        if self._failed:
            return
        try:
            self._tasks.put_nowait(task)
        except queue.Full:
            self._fail("it is too slow, and gets nothing more")

    def end(self) -> None:
        """Wait until the thread has done what it was given."""
        if self._failed:
            return
        with contextlib.suppress(queue.Full):
            self._tasks.put(None, timeout=_FINISH_S)
            self._thread.join(_FINISH_S)
        if self._thread.is_alive():
            self._fail(f"it did not end within {_FINISH_S:g} s")

    def _work(self) -> None:
        try:
            tracker = _open(self._name, self._identity)
            while (task := self._tasks.get()) is not None:
                task(tracker)
        except BaseException as error:  # whatever it is, training goes on
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, why: str) -> None:
        with self._failing:
            if not self._failed:
                logger.warning("tracker %s gets nothing more: %s", self._name, why)
                self._failed = True


def _open(name: str, identity: Identity) -> Tracker:
    if name == "wandb":
        return _Wandb(identity)
    if name == "mlflow":
        return _Mlflow(identity)
    return named_function(name)(**dataclasses.asdict(identity))


class _Wandb:
    """Weights & Biases; WANDB_PROJECT, WANDB_MODE and its other variables say where and how."""

    def __init__(self, identity: Identity):
        import wandb

        self._run = wandb.init(
            id=identity.run_id,
            resume="allow",
            project=os.environ.get("WANDB_PROJECT", "jaxdist"),
            name=identity.name,
            config=dict(identity.settings),
            dir=identity.directory,
        )
        # A restart does steps again; wandb's own step cannot go back.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish(exit_code=0 if summary["exit_reason"] == "finished" else 1)


class _Mlflow:
    """MLflow; MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME say where."""

    def __init__(self, identity: Identity):
        from mlflow import MlflowClient

        self._client = MlflowClient()
        experiment = self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "jaxdist"))
        found = self._client.search_runs(
            [experiment], f"tags.`jaxdist.run_id` = '{identity.run_id}'"
        )
        if found:
            self._id = found[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            tags = {"jaxdist.run_id": identity.run_id}
            made = self._client.create_run(experiment, tags=tags, run_name=identity.name)
            self._id = made.info.run_id
            for name, value in identity.settings.items():
                self._client.log_param(self._id, name, str(value)[:_PARAM_CHARS])

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return found.experiment_id if found else self._client.create_experiment(name)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self._id, name, value, step=step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        for name, value in summary.items():
            if isinstance(value, int | float):
                self._client.log_metric(self._id, f"summary/{name}", value)
        status = "FINISHED" if summary["exit_reason"] == "finished" else "KILLED"
        self._client.set_tag(self._id, "exit_reason", summary["exit_reason"])
        self._client.set_terminated(self._id, status)


_PARAM_CHARS = 500
"""Characters that every version of MLflow stores of a parameter."""
