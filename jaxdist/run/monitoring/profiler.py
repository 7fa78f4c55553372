"""Traces of a few steps by jax's profiler, planned by a setting or requested by a signal.

A trace slows steps down and takes megabytes per step, so it is off by default. Process 0 traces
the steps of `monitoring.profile`. A process that receives SIGUSR2 traces its own next steps, e.g.
to examine a straggler.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable
from typing import Any

from jaxdist.runtime.storage import locate

logger = logging.getLogger("jaxdist")


class Profiler:
    """Starts and ends traces of the `planned` steps (first, last), and of requested steps."""

    def __init__(
        self,
        planned: tuple[int, int] | None,
        directory: str | os.PathLike[str],
        *,
        process: int = 0,
        trace_requested: Callable[[], bool] = lambda: False,
        num_steps: int = 3,
    ):
        self._planned = planned
        self._directory, self._process = locate(directory), process
        self._trace_requested, self._num_steps = trace_requested, num_steps
        self._now: tuple[int, int] | None = None  # steps of the current trace
        self._path = self._written = self._directory
        self._annotation: Any = None
        self._newest = 0  # last finished step of the trace
        self.traces: list[dict[str, Any]] = []

    def reaches(self, step: int) -> bool:
        """Return whether a trace starts or ends just before `step`; call it before each step.

        If true, wait for the devices and call `turn`, so that a trace has complete steps only.
        """
        if self._now is not None:
            first, last = self._now
            self._newest = max(self._newest, step - 1)  # a rollback removes no step from the trace
            if first <= step <= last:
                self._annotate(step)
                return False
            return True
        if self._trace_requested():
            self._planned = (step, step + self._num_steps - 1)
        return self._is_planned(step)

    def turn(self, step: int) -> None:
        """End the finished trace, and start the trace that is due before `step`."""
        self.stop()
        if self._planned is not None and self._is_planned(step):
            (_, last), self._planned = self._planned, None
            self._begin(step, last)
            self._annotate(step)

    def _is_planned(self, step: int) -> bool:
        return self._planned is not None and self._planned[0] <= step <= self._planned[1]

    def stop(self, last: int | None = None) -> None:
        """End the current trace, if any; `last` is its last step (None = the newest finished)."""
        if self._now is None:
            return
        import jax

        (first, _), self._now = self._now, None
        last = self._newest if last is None else last
        self._annotate(None)
        try:
            jax.profiler.stop_trace()
            if self._written != self._path:
                for name in self._written.files():
                    (self._path / name).write((self._written / name).read())
            files = [name for name in self._path.files() if name.endswith(".trace.json.gz")]
        except Exception as failure:  # a full disk must not end the run
            logger.warning("the trace of steps %d to %d was not written: %s", first, last, failure)
            return
        finally:
            self._delete_copy()
        trace: dict[str, Any] = {"first": first, "last": last, "path": str(self._path)}
        trace |= {"file": str(self._path / files[-1])} if files else {}
        self.traces.append(trace)
        logger.info("wrote the trace of steps %d to %d to %s", first, last, self._path)

    def _begin(self, first: int, last: int) -> None:
        import jax

        self._path = self._directory / f"step-{first}-process-{self._process}"
        self._written = self._path
        if not self._path.is_local:
            self._written = locate(tempfile.mkdtemp(prefix="jaxdist-trace-"))
        try:
            jax.profiler.start_trace(str(self._written))
        except Exception as failure:  # another profiler is running
            logger.warning("steps %d to %d are not traced: %s", first, last, failure)
            self._delete_copy()
            return
        self._now, self._newest = (first, last), first
        logger.info("tracing steps %d to %d", first, last)

    def _delete_copy(self) -> None:
        if self._written != self._path:
            with contextlib.suppress(OSError):
                self._written.delete_tree()

    def _annotate(self, step: int | None) -> None:
        """Mark the start of `step` in the trace; None = the trace ends."""
        if self._annotation is not None:
            with contextlib.suppress(Exception):
                self._annotation.__exit__(None, None, None)
            self._annotation = None
        if step is not None and self._now is not None:
            import jax

            self._annotation = jax.profiler.StepTraceAnnotation("train", step_num=step)
            self._annotation.__enter__()
