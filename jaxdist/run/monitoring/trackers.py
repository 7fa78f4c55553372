"""Experiment trackers: send metrics, settings and summary of a run to wandb, mlflow or your own.

TensorBoard files are written synchronously. Each other tracker runs in its own thread, so that its
network and its errors do not affect training: its first error is a warning and disables it.

For your own tracker, name a function in `monitoring.tracker`. It is called with the fields of
`Identity` as keywords, and returns an object with `log(step, values)` and `finish(summary)`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxdist.run.metrics_log import ExitReason, plain
from jaxdist.runtime.named_function import named_function
from jaxdist.runtime.storage import Mirror, locate

logger = logging.getLogger("jaxdist")

_MAX_QUEUED = 1000
"""Maximum points queued for a slow tracker; one more disables it with a warning."""

_FINISH_S = 60.0
"""Maximum seconds of each wait at the end of a run: for room in a tracker's queue, for its end."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Identity:
    """Identity of a run.

    `run_id`, 16 hex digits, stays equal at a restart; `settings` are dotted name -> value. A
    tracker may write files to the run's `directory`.
    """

    run_id: str
    name: str
    settings: Mapping[str, Any]
    directory: str


def run_id_of(first_start: float) -> str:
    """Return 16 hex digits derived from the first start of a run, in seconds since 1970."""
    return hashlib.sha256(repr(first_start).encode()).hexdigest()[:16]


class Tracker(Protocol):
    """A receiver of a run's metrics and summary, e.g. wandb; users can write their own."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Receive numbers of a step: "train/loss", "eval/loss", "speed/tokens_per_s" ..."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Receive the content of summary.json. This is the last call of a start."""


class Trackers:
    """All trackers of a run, each in its thread; on process 0 only."""

    def __init__(self, names: Sequence[str], identity: Identity):
        self._workers = [_Worker(name, identity) for name in names]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Queue the numbers of a step, without blocking."""
        for worker in self._workers:
            worker.put(lambda tracker: tracker.log(step, values))

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Queue the summary, and wait until it was sent or timed out."""
        for worker in self._workers:
            worker.put(lambda tracker: tracker.finish(plain(summary)))
        self.close()

    def close(self) -> None:
        """Wait until all queued records are sent, or the timeout; a second call does nothing."""
        for worker in self._workers:
            worker.end()
        self._workers = []


class _Worker:
    def __init__(self, name: str, identity: Identity):
        self._name, self._identity = name, identity
        self._failed = False  # and the failure was logged
        self._failing = threading.Lock()
        self._tasks: queue.Queue[Callable[[Tracker], None] | None] = queue.Queue(_MAX_QUEUED)
        self._thread = threading.Thread(target=self._work, name=f"tracker: {name}", daemon=True)
        self._thread.start()

    def put(self, task: Callable[[Tracker], None]) -> None:
        if self._failed:
            return
        try:
            self._tasks.put_nowait(task)
        except queue.Full:
            self._fail("it is too slow")

    def end(self) -> None:
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
        except BaseException as error:  # no error of a tracker may stop training
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, why: str) -> None:
        with self._failing:
            if not self._failed:
                logger.warning("tracker %s is disabled: %s", self._name, why)
                self._failed = True


def _open(name: str, identity: Identity) -> Tracker:
    if name == "wandb":
        return _Wandb(identity)
    if name == "mlflow":
        return _Mlflow(identity)
    return named_function(name)(**dataclasses.asdict(identity))


class _Wandb:
    """Weights & Biases, configured by WANDB_PROJECT, WANDB_MODE and its other variables."""

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
        # A restart repeats steps, and the step counter of wandb cannot decrease.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def finish(self, summary: Mapping[str, Any]) -> None:
        self._run.summary.update(dict(summary))
        reason = summary["exit_reason"]
        if reason == ExitReason.PREEMPTED:
            self._run.mark_preempting()  # its state is then "preempted", not "failed"
        self._run.finish(exit_code=0 if reason in _COMPLETED else 1)


class _Mlflow:
    """MLflow, configured by MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME."""

    def __init__(self, identity: Identity):
        from mlflow import MlflowClient

        self._client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "jaxdist")
        existing = self._client.get_experiment_by_name(name)
        experiment = existing.experiment_id if existing else self._client.create_experiment(name)
        same = f"tags.`jaxdist.run_id` = '{identity.run_id}'"
        runs = self._client.search_runs([experiment], same)
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            tags = {"jaxdist.run_id": identity.run_id}
            made = self._client.create_run(experiment, tags=tags, run_name=identity.name)
            self._id = made.info.run_id
            for name, value in identity.settings.items():
                self._client.log_param(self._id, name, str(value)[:_PARAM_CHARS])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self._id, name, value, step=step)

    def finish(self, summary: Mapping[str, Any]) -> None:
        for name, value in summary.items():
            if isinstance(value, int | float):
                self._client.log_metric(self._id, f"summary/{name}", value)
        reason = summary["exit_reason"]
        status = "KILLED" if reason in _ENDED_FROM_OUTSIDE else "FAILED"
        self._client.set_tag(self._id, "exit_reason", reason)
        self._client.set_terminated(self._id, "FINISHED" if reason in _COMPLETED else status)


_COMPLETED = (ExitReason.FINISHED, ExitReason.STOPPED_BY_CALLBACK, ExitReason.STOPPED_EARLY)
_ENDED_FROM_OUTSIDE = (ExitReason.PREEMPTED, ExitReason.INTERRUPTED)

_PARAM_CHARS = 500
"""Maximum parameter length, in characters, that every version of MLflow accepts."""

_MIRRORED_BYTES = 1 << 20
"""Size that ends a file on an object store, where each flush uploads the complete file."""


@contextlib.contextmanager
def _without_torch() -> Iterator[None]:
    """Let imports of PyTorch fail: tensorboardX needs it for one annotation, which takes 3 s."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]


class TensorBoard:
    """Writes scalars and text of one start; TensorBoard hides earlier points from `first_step` on.

    `SummaryWriter` of tensorboardX passes events to a thread, for which its `flush` does not wait:
    a kill right after a flush loses the newest events. `EventsWriter` writes synchronously.
    """

    def __init__(self, path: str | os.PathLike[str], first_step: int | None = None):
        with _without_torch():
            from tensorboardX.event_file_writer import EventsWriter

        self._path = locate(path)
        self._path.make_directory()
        self._new_writer = EventsWriter
        self._has_warned = False
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        if not self._path.is_local:
            self._scratch = tempfile.TemporaryDirectory(prefix="jaxdist-tensorboard-")
        self._open()
        if first_step is not None:
            self.hide(first_step)
        self._safely(self._writer.flush)

    def hide(self, first_step: int) -> None:
        """Let TensorBoard hide the earlier points from `first_step` on, which the run repeats."""
        from tensorboardX.proto.event_pb2 import SessionLog

        self._write(first_step, session_log=SessionLog(status=SessionLog.START))

    def text(self, tag: str, text: str) -> None:
        """Write a text, displayed unformatted."""
        from tensorboardX.summary import text as summary_of

        indented = "\n".join("    " + line for line in text.splitlines())  # Markdown for code
        self._write(0, summary=summary_of(tag, indented))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write one point for each tag in one event; non-numeric values are omitted."""
        from tensorboardX.proto.summary_pb2 import Summary

        points = [
            Summary.Value(tag=tag, simple_value=float(value))
            for tag, value in values.items()
            if isinstance(value, int | float)
        ]
        self._write(step, summary=Summary(value=points))

    def close(self) -> None:
        """Flush and close the file of events."""
        self._safely(self._writer.close)
        if self._mirror is not None:
            self._safely(self._mirror.close)
        if self._scratch is not None:
            self._scratch.cleanup()

    def _open(self) -> None:
        """Start a new file of events.

        TensorBoard reads files in the order of their names, which contain seconds. The nanoseconds
        in the suffix keep a quick restart from overwriting the previous file.
        """
        suffix = f".{time.time_ns() % 10**9:09d}"
        folder = self._scratch.name if self._scratch else str(self._path)
        self._writer = self._new_writer(f"{folder}/events", suffix)
        self._written = 0
        self._mirror: Mirror | None = None
        if self._scratch is not None:
            name = next(n for n in locate(folder).entries() if n.endswith(suffix))
            self._mirror = Mirror(Path(folder) / name, self._path / name)

    def _safely(self, write: Callable[[], Any]) -> None:
        """Call `write`; log only its first OSError: metrics.jsonl has the missing points."""
        try:
            write()
        except OSError as failure:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "the folder %s cannot be written (%s): TensorBoard misses points meanwhile; "
                    "metrics.jsonl has them",
                    self._path,
                    failure.strerror,
                )

    def _write(self, step: int, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        event = Event(wall_time=time.time(), step=step, **content)
        self._safely(lambda: (self._writer.write_event(event), self._writer.flush()))
        self._written += event.ByteSize()
        if self._mirror is not None and self._written > _MIRRORED_BYTES:
            self._safely(self._writer.close)
            self._safely(self._mirror.close)
            self._open()
