"""Write one checkpoint and apply retention.

    1. check that the save can succeed (on process 0; each process checks for the directory)
    2. copy to the host, start writing and computing checksums; training continues
    3. in the background: wait for arrays and checksums on all processes
    4. process 0 writes the document with names and checksums of the arrays
    5. compute the CRC-32 of each file that has none, divided among the processes
    6. process 0 writes the manifest, which commits the checkpoint, and starts its export if due
    7. process 0 deletes the checkpoints that retention does not keep

Process 0 makes all decisions. A failed save has no manifest and is deleted.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from jaxdist.checkpoint import lock, manifest, orbax_io, pytree
from jaxdist.checkpoint.checksum import start_checksums
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.crash_points import crash_point
from jaxdist.checkpoint.events import (
    CheckpointError,
    EventLog,
    Outcome,
    first_error,
    make_group,
    one_line,
)
from jaxdist.checkpoint.exports import Exports
from jaxdist.checkpoint.moment_store import MomentStore, Snapshot
from jaxdist.runtime.coordination import Group
from jaxdist.runtime.coordination.group import GivenUp
from jaxdist.runtime.formatting.numbers import in_bytes
from jaxdist.runtime.formatting.tables import few
from jaxdist.runtime.progress import in_time
from jaxdist.runtime.storage import Location, flush_appended

MAX_FAILURES = 3
"""Number of consecutive failed saves after which a run stops, to bound the lost work."""

RETENTION_S = 60.0
"""Seconds that a save waits for deletions on an object store; then they run in the background."""

_LARGER_IS_BETTER = (
    *("accuracy", "agreement", "reward_margin", "signed_reward"),
    *("acc", "acc_norm", "exact_match", "f1"),
)
"""Last parts of evaluation metrics for which larger is better, e.g. of task/arc_easy/acc.

For all other metrics smaller is better.
"""


class Saver:
    """Write checkpoints, one at a time, in the background.

    Attributes:
        resumed_from: step that this run continues from, -1 for none; in process 0 None after the
            first save, which marks newer checkpoints as superseded.
        last_committed: whether the last requested save is committed; see `wait`.
        exports: exports of committed checkpoints.
        lock_lost: returns why this process must stop writing, or "" (`DirectoryLock.lost`).
    """

    def __init__(
        self, directory: Location, config: CheckpointConfig, group: Group, events: EventLog
    ) -> None:
        self.resumed_from: int | None = -1
        self.last_committed = True
        self.lock_lost: Callable[[], str] = lambda: ""
        self._directory = directory
        self._config = config
        self._group = group
        self._background = make_group()  # its own group, because each thread needs one
        self._events = events
        self.exports = Exports(directory, config, events)
        self._writer = orbax_io.make_writer(directory)
        self._failures: list[Outcome] = []  # since the last committed save
        # One thread for all saves: starting a thread per save would block training for 2 ms.
        self._thread = ThreadPoolExecutor(1, "checkpoint-finish")
        self._pending: tuple[Outcome, Future[None]] | None = None

    def start(
        self,
        step: int,
        state: Any,
        meta: dict[str, Any],
        metrics: dict[str, float],
        *,
        halfway: bool = False,
        moments: MomentStore | None = None,
    ) -> None:
        """Wait for the previous save; start one unless `step` is saved; wait for the host copy."""
        leaves = pytree.leaves_of(state)
        # Copy `meta`, and raise here, once, if it is not JSON.
        meta = json.loads(json.dumps(meta))
        outcome = Outcome(step, halfway=halfway, waited_s=self.wait())
        begin = time.perf_counter()
        with _prompt_thread_switches():
            document = self._start(step, leaves, meta, outcome, moments)
            if document is None:
                return
            outcome.blocked_s = time.perf_counter() - begin
            finished = self._thread.submit(self._finish, outcome, begin, metrics, document)
            self._pending = (outcome, finished)

    def wait(self) -> float:
        """Wait for the current save and return the seconds waited.

        Raises `CheckpointError` after `MAX_FAILURES` failed saves in a row.
        """
        if self._pending is None:
            return 0.0
        outcome, finished = self._pending
        start = time.perf_counter()
        finished.result()
        self._pending = None
        waited_s = time.perf_counter() - start
        self.last_committed = not outcome.error
        self._failures = [*self._failures, outcome] if outcome.error else []
        if len(self._failures) >= MAX_FAILURES:
            first = self._failures[0]
            raise CheckpointError(
                f"{MAX_FAILURES} saves in a row have failed, the first at step {first.step}: "
                f"{first.error}\nThe run stops, because its work "
                f"would be lost. Older checkpoints in {self._directory} are untouched."
            )
        return waited_s

    def close(self) -> None:
        """Stop the threads of writer and saver, and the current export."""
        self._thread.shutdown(wait=False)
        self._writer.close()
        self.exports.close()

    def check_room(self, num_bytes: int) -> None:
        """Raise `CheckpointError` if the disk has less than `num_bytes` free."""
        free = self._directory.free_bytes()
        if free < num_bytes:
            raise CheckpointError(
                f"no space: a checkpoint takes {in_bytes(num_bytes)}, {self._directory} has "
                f"{in_bytes(free)} free. Free some, lower checkpoint.max_to_keep, or choose "
                "another --run-dir."
            )

    def complete(self) -> dict[int, Saved]:
        """Return step -> metrics and `halfway` of each checkpoint that `manifest.read` accepts."""
        saved = {}
        for step in manifest.steps_in(self._directory):
            try:
                body = manifest.read(self._directory / step)
            except ValueError:
                continue  # corrupt checkpoints are neither counted nor deleted
            saved[step] = Saved(body["metrics"], body["halfway"])
        return saved

    def _prepare(self, step: int, num_bytes: int, unreachable: list[str]) -> bool:
        """On process 0: clean the directory, check preconditions; False if `step` is saved."""
        if reasons := [reason for reason in unreachable if reason]:
            raise CheckpointError(few(reasons, 1))
        self._delete_leftovers()
        if self.resumed_from is not None:
            self._supersede(self.resumed_from)
        path = self._directory / step
        if path.exists():
            try:
                manifest.read(path)
                return False
            except ValueError as reason:
                manifest.delete(path)
                self._events.log(f"checkpoint {step} cannot be loaded and is saved again: {reason}")
        self.check_room(num_bytes)
        return True

    def _why_unreachable(self) -> str:
        try:
            self._check_reachable()
        except (CheckpointError, OSError) as error:  # OSError: a file server's stale handle
            reason = one_line(error)
            if self._group.num_processes > 1:
                reason += f" (process {self._group.process_id} on {socket.gethostname()})"
            return reason
        return ""

    def _check_reachable(self) -> None:
        """Raise unless this is the opened directory and, in process 0, the lock is still held.

        If the file system were unmounted, a save would fill the local disk. Orbax creates missing
        directories, so only the lock file proves that it is mounted.
        """
        if lost := self.lock_lost():
            raise CheckpointError(lost)
        if not (self._directory / lock.FILE_NAME).exists():
            raise CheckpointError(f"{self._directory} is gone: is its file system still mounted?")

    def _supersede(self, resumed_from: int) -> None:
        newer = [s for s in manifest.steps_in(self._directory) if s > resumed_from]
        start = f"step {resumed_from}" if resumed_from >= 0 else "the beginning"
        reason = f"a run started again from {start}"
        for step in newer:
            manifest.mark(self._directory / step, manifest.SUPERSEDED, reason)
        if newer:
            which = ", ".join(map(str, newer))
            self._events.log(
                f"checkpoints {which} are marked {manifest.SUPERSEDED} and not loaded again: "
                f"{reason}"
            )
        self.resumed_from = None

    def _start(
        self,
        step: int,
        leaves: list[pytree.Leaf],
        meta: dict[str, Any],
        outcome: Outcome,
        moments: MomentStore | None,
    ) -> Callable[[], Written] | None:
        """Start a save; return a function that waits for the checksums and writes `moments`.

        Return None if the step is already saved. After a failure, `outcome.error` is set and the
        function gives an empty `Written`. If the writer fails to start in a job of several
        processes, raises `CheckpointError`, because only the exit of this process unblocks the
        others.
        """
        try:
            num_bytes = sum(leaf.num_bytes for leaf in leaves)
            num_bytes += 0 if moments is None else moments.num_bytes
            # If one host lost its mount, its save would fail inside Orbax and others would hang.
            prepare = lambda unreachable: self._prepare(step, num_bytes, unreachable)
            if not self._group.decide_from(self._why_unreachable(), prepare):
                self._events.event("save_skipped", step=step, reason="already saved")
                self.last_committed = True
                return None
        except Exception as error:  # raised by process 0, so equal on all processes
            outcome.error = one_line(error)
            return Written
        try:
            arrays = [pytree.plain(leaf) for leaf in leaves]
            described = pytree.describe(leaves, arrays)
            crash_point("before_arrays")
            snapshot = None if moments is None else Snapshot(moments, step)
            self._writer.start(self._directory / step, pytree.nest(leaves, arrays))
            checksums = start_checksums(arrays)  # after the copy, which they would delay on CPUs
            crash_point("during_arrays")

            def written() -> Written:
                arrays = pytree.with_checksums(described, checksums())
                sums = {} if snapshot is None else snapshot.write_to(self._directory / step)
                body = {"step": step, "meta": meta, "arrays": arrays}
                return Written(body, snapshot, sums)

            return written
        except Exception as error:
            outcome.error = one_line(error)
            if self._group.num_processes > 1:
                raise CheckpointError(
                    f"the save of step {step} failed on process {self._group.process_id} after "
                    f"all had begun it: {outcome.error}"
                ) from error
            return Written

    def _finish(
        self,
        outcome: Outcome,
        begin: float,
        metrics: dict[str, float],
        write: Callable[[], Written],
    ) -> None:
        """Wait for the arrays, commit the save, delete old ones; one outcome for all processes."""
        written = Written()
        try:
            if not outcome.error:
                self._writer.wait()
                written = write()
                crash_point("after_arrays")
        except GivenUp:
            pass  # the process that aborted reports why
        except Exception as failure:
            outcome.error = one_line(failure)
            self._writer.give_up()
        try:
            path = self._directory / outcome.step
            reply = [outcome.error, written.sums]
            if error := self._background.decide_from(reply, partial(written.complete, path)):
                raise CheckpointError(error)
            outcome.num_bytes = self._commit(outcome, metrics, written.document)
        except Exception as failure:
            outcome.error = one_line(failure)
            self._writer.close()
            if self._background.is_leader:
                self._delete_leftovers()
            self._events.failed(outcome, len(self._failures) + 1, MAX_FAILURES)
            return
        outcome.written_s = time.perf_counter() - begin
        self._events.saved(outcome)
        if self._background.is_leader:
            crash_point("after_manifest")
            self.exports.committed(outcome.step)
            if self._directory.is_local:
                self._delete_old()
            else:  # a hanging store must not block a run whose last checkpoint is committed
                what = f"deleting old checkpoints of {self._directory}"
                in_time(what, self._delete_old, RETENTION_S, announce=False)

    def _commit(self, outcome: Outcome, metrics: dict[str, float], document: dict[str, Any]) -> int:
        """Write document and manifest, all processes together; return the size in bytes."""
        path = self._directory / outcome.step
        parts = self._background.num_processes

        def shares() -> list[list[str]]:
            names = self._write_document(path, document)
            return [names[i::parts] for i in range(parts)]

        mine = self._background.scatter(shares)
        own, error = dict(self._writer.fingerprints or {}), ""
        try:
            own |= manifest.fingerprints(path, mine)
        except OSError as failure:  # do not raise yet: the other processes wait for an answer
            error = one_line(failure)

        def merge(replies: list[tuple[dict[str, list[int]], str]]) -> int:
            if error := first_error([error for _, error in replies]):
                raise CheckpointError(error)
            files = {name: entry for own, _ in replies for name, entry in own.items()}
            self._write_manifest(outcome, files, metrics)
            return sum(size for size, _ in files.values())

        return self._background.decide_from([own, error], merge)

    def _write_document(self, path: Location, document: dict[str, Any]) -> list[str]:
        self._check_reachable()  # the mount may be gone since the arrays were written
        orbax_io.write_document(path, document)
        return manifest.files_of(path) if self._writer.fingerprints is None else [manifest.DOCUMENT]

    def _write_manifest(
        self, outcome: Outcome, files: dict[str, list[int]], metrics: dict[str, float]
    ) -> None:
        self._check_reachable()  # the mount may be gone since the files were read
        path = self._directory / outcome.step
        if not path.is_local and (problems := manifest.size_problems(path, files)):
            raise CheckpointError(few(problems, 1))
        flush_appended()  # metrics.jsonl must have all earlier steps even after a kill
        crash_point("before_manifest")
        manifest.write(path, outcome.step, files, metrics, halfway=outcome.halfway)

    def _delete_leftovers(self) -> None:
        """Delete unfinished saves; log errors, because Orbax may still write to one."""
        try:
            manifest.delete_partial(self._directory)
        except OSError as error:
            self._events.log(f"unfinished saves could not be deleted: {one_line(error)}")

    def _delete_old(self) -> None:
        try:
            not_kept = steps_to_delete(self.complete(), self._config, self.exports.unfinished)
        except OSError as error:
            self._events.log(f"old checkpoints could not be listed for deletion: {one_line(error)}")
            return
        for step in not_kept:
            try:
                manifest.delete(self._directory / step)
            except OSError as error:
                self._events.log(f"checkpoint {step} could not be deleted: {one_line(error)}")


@contextlib.contextmanager
def _prompt_thread_switches() -> Iterator[None]:
    """In this block, switch threads every 0.1 ms, not 5 ms: training waits for Orbax's threads."""
    default = sys.getswitchinterval()
    sys.setswitchinterval(0.0001)
    try:
        yield
    finally:
        sys.setswitchinterval(default)


class Saved(NamedTuple):
    """Evaluation metrics of a checkpoint, and whether it is halfway between two saves."""

    metrics: Mapping[str, float] = {}
    halfway: bool = False


class Written(NamedTuple):
    """Document and moments of a save, and this process's part of the moments' checksums."""

    document: dict[str, Any] = {}  # noqa: RUF012 - empty after a failure only
    snapshot: Snapshot | None = None
    sums: dict[str, int] = {}  # noqa: RUF012

    def complete(self, checkpoint: Location, replies: list[tuple[str, dict[str, int]]]) -> str:
        """Return the first error of all processes, or add their moments and return ""."""
        error = first_error([error for error, _ in replies])
        if not error and self.snapshot is not None:
            self.snapshot.finish(checkpoint, self.document, [sums for _, sums in replies])
        return error


def steps_to_delete(
    saved: Mapping[int, Saved], config: CheckpointConfig, in_use: Collection[int] = ()
) -> list[int]:
    """Return the steps that no rule keeps and that are not `in_use`, in increasing order.

    The newest `max_to_keep` are always kept. A halfway save does not count toward `max_to_keep`:
    unless another rule keeps it, it is kept only while it is the newest checkpoint.
    """
    steps = sorted(saved)
    kept = set(steps[-1:])
    kept.update(in_use)
    kept.update([step for step in steps if not saved[step].halfway][-config.max_to_keep :])
    if config.keep_interval_steps:
        kept.update(step for step in steps if step % config.keep_interval_steps == 0)
    metric, count = config.best
    kept.update(best_steps(saved, metric)[:count])
    return [step for step in steps if step not in kept]


def best_steps(saved: Mapping[int, Saved], metric: str) -> list[int]:
    """Return the steps whose metric is a number, best first; of equal ones, the later first."""
    sign = -1.0 if metric.rpartition("/")[2] in _LARGER_IS_BETTER else 1.0
    scored = [
        (sign * one.metrics[metric], -step)
        for step, one in saved.items()
        if not math.isnan(one.metrics.get(metric, math.nan))
    ]
    return [-negated for _, negated in sorted(scored)]
