"""Export committed checkpoints in Hugging Face's or PEFT's format while training continues.

Each export is a process of its own with low priority. It reads the checkpoint's files, so training
does not wait for it. Exports run one at a time, and retention keeps their checkpoints until they
end. `export/STEP` of the run directory appears when it is complete.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from jaxdist.checkpoint import manifest
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.events import EventLog
from jaxdist.runtime.new_output import delete_output
from jaxdist.runtime.progress import waiting
from jaxdist.runtime.storage import Location

_COMMAND = "jaxdist.tools.convert.checkpoint_export"
_NICENESS = 10  # training comes first


class Exports:
    """The exports of one run, by process 0; `checkpoints` is the directory of its checkpoints."""

    def __init__(self, checkpoints: Location, config: CheckpointConfig, events: EventLog) -> None:
        self._checkpoints, self._config, self._events = checkpoints, config, events
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "export")
        self._futures: dict[int, concurrent.futures.Future[None]] = {}
        self._process: subprocess.Popen[str] | None = None
        self._stopped = False

    @property
    def unfinished(self) -> list[int]:
        """Return the steps whose exports are queued or running."""
        return [step for step, future in [*self._futures.items()] if not future.done()]

    def resume(self, step: int) -> None:
        """Queue the due exports, up to `step`, that earlier starts of the run did not finish."""
        for stored in manifest.steps_in(self._checkpoints) if self._config.exports_saves else []:
            if stored <= step and self._is_due(stored) and not self._output(stored).exists():
                self._futures[stored] = self._thread.submit(self._export, stored)

    def committed(self, step: int) -> None:
        """Queue the deletion of an older export of this step and, if due, a new export."""
        if self._config.export != "none" and not self._stopped:
            self._futures[step] = self._thread.submit(self._replace, step)

    def wait(self) -> None:
        """Wait until all queued exports have ended."""
        with waiting("finishing the export"):
            concurrent.futures.wait(self._futures.values())

    def close(self) -> None:
        """Stop the current export and drop the others; `resume` starts them again."""
        self._stopped = True
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._process is not None:
            self._process.kill()
        self._thread.shutdown()

    def _is_due(self, step: int) -> bool:
        every = self._config.export_interval_steps
        return self._config.exports_saves and step > 0 and step % every == 0

    def _output(self, step: int) -> Location:
        return self._checkpoints.parent / "export" / step

    def _replace(self, step: int) -> None:
        try:
            delete_output(Path(str(self._output(step))))
        except OSError as error:
            self._failed(step, str(error))
            return
        if self._is_due(step):
            self._export(step)

    def _export(self, step: int) -> None:
        begin = time.perf_counter()
        package = str(Path(__file__).resolve().parents[2])
        paths = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _COMMAND, str(self._checkpoints.parent), str(step)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C ends the run, which then ends the export
                env={**os.environ, "PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"},
            )
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICENESS)
            if self._stopped:
                self._process.kill()
            printed, errors = self._process.communicate()
            failed = self._process.returncode != 0
            reason = (errors.strip().splitlines() or [f"exit code {self._process.returncode}"])[-1]
        except OSError as error:
            printed, failed, reason = "", True, str(error)
        # An export that outlived a killed trainer may have completed it meanwhile.
        if self._stopped or (failed and self._output(step).exists()):
            return
        if failed:
            self._failed(step, reason)
            return
        seconds = time.perf_counter() - begin
        self._events.event("export", step=step, seconds=seconds)
        self._events.log(f"export of step {step} took {seconds:.1f} s: {printed.strip()}")

    def _failed(self, step: int, reason: str) -> None:
        self._events.event("export_failed", step=step, reason=reason)
        self._events.log(f"EXPORT FAILED at step {step}: {reason}")
