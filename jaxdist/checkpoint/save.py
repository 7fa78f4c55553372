"""How one save is made, and what becomes of it.

    1. see whether it can work at all (process 0; that the directory is there: all)
    2. copy to the host, begin writing, begin the checksum of every array; the loop goes on
    3. in the background: the arrays are on disk on all processes, and their checksums known
    4. process 0 writes the document that names the arrays and their checksums
    5. CRC-32 of every file, shared among the processes
    6. process 0 writes the manifest: from now on the checkpoint counts
    7. process 0 deletes what retention does not keep

Process 0's answer is everyone's. A failure at any point leaves a directory without a manifest,
which the next save removes.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from jaxdist.checkpoint import crc32, lock, manifest, orbax_io, pytree
from jaxdist.checkpoint.checksum import start_checksums
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.crash_points import crash_point
from jaxdist.checkpoint.errors import CheckpointError
from jaxdist.checkpoint.events import EventLog, Outcome, one_line
from jaxdist.checkpoint.group import make_group
from jaxdist.checkpoint.retention import Saved, steps_to_delete
from jaxdist.runtime.coordination import Group
from jaxdist.runtime.coordination.barrier import GivenUp
from jaxdist.runtime.formatting.numbers import in_bytes
from jaxdist.runtime.formatting.tables import few
from jaxdist.runtime.progress import in_time
from jaxdist.runtime.storage import Location, flush_appended

MAX_FAILURES = 3
"""Failed saves in a row after which a run stops: what it computes could not be kept."""

RETENTION_S = 60.0
"""Seconds that a save waits for old checkpoints to be deleted on a store; it goes on beside."""


class Saver:
    """Writes checkpoints, one at a time, in the background.

    Attributes:
        resumed_from: the step that this run continues from, -1 for none. Newer checkpoints belong
            to a run that was given up; the first save marks them superseded. None once that is
            done.
        last_committed: whether the last save asked for is a checkpoint now.
        lock_lost: asks whether this process may still write; "" = it may (`DirectoryLock.lost`).
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
        self._background = make_group()  # the writing thread's exchanges keep an order of their own
        self._events = events
        self._writer = orbax_io.make_writer(directory, config)
        self._failures = 0
        # Kept from save to save: training would wait 2 ms for the start of another.
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
    ) -> None:
        """Begin a save, after waiting for the one before; one `halfway` is kept until the next."""
        leaves = pytree.leaves_of(state)
        # A copy, and what is no JSON raises here and now, not as a save that fails again and again.
        meta = json.loads(json.dumps(meta))
        outcome = Outcome(step, halfway=halfway, waited_s=self.wait())
        begin = time.perf_counter()
        with _prompt_thread_switches():
            document = self._start(step, leaves, meta, outcome)
            if document is None:
                return
            outcome.blocked_s = time.perf_counter() - begin
            finished = self._thread.submit(self._finish, outcome, begin, metrics, document)
            self._pending = (outcome, finished)

    def wait(self) -> float:
        """Wait for the save being written and count its outcome; seconds waited.

        Raises:
            CheckpointError: `MAX_FAILURES` saves in a row have failed.
        """
        if self._pending is None:
            return 0.0
        outcome, finished = self._pending
        start = time.perf_counter()
        finished.result()
        self._pending = None
        waited_s = time.perf_counter() - start
        self.last_committed = not outcome.error
        self._failures = self._failures + 1 if outcome.error else 0
        if self._failures >= MAX_FAILURES:
            raise CheckpointError(
                f"{self._failures} saves in a row have failed, the last at step {outcome.step}: "
                f"{outcome.error}\nThe run stops: what it computes could "
                f"not be kept. Older checkpoints in {self._directory} are untouched."
            )
        return waited_s

    def close(self) -> None:
        """Stop Orbax's threads and the one that waits for them."""
        self._thread.shutdown(wait=False)
        self._writer.close()

    def check_room(self, num_bytes: int) -> None:
        """Raise unless the disk has that much free space."""
        free = self._directory.free_bytes()
        if free < num_bytes:
            raise CheckpointError(
                f"no space: a checkpoint takes {in_bytes(num_bytes)}, {self._directory} has "
                f"{in_bytes(free)} free. Free some, lower checkpoint.max_to_keep, or choose "
                "another --run-dir."
            )

    def complete(self) -> dict[int, Saved]:
        """What the manifest of each complete checkpoint says of it."""
        found = {}
        for step in manifest.steps_in(self._directory):
            try:
                body = manifest.read(self._directory / step)
            except ValueError:
                continue  # corrupt: neither counted among those to keep nor deleted
            found[step] = Saved(body["metrics"], body["halfway"])
        return found

    def _prepare(self, step: int, leaves: list[pytree.Leaf], unreachable: list[str]) -> bool:
        """On process 0: make room, look for reasons to fail; False when `step` is saved already.

        `unreachable` says of each process why it cannot reach the directory, "" where it can.
        """
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
                self._events.log(f"checkpoint {step} is replaced by this save: {reason}")
        self.check_room(sum(leaf.num_bytes for leaf in leaves))
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
        """Raise unless this is the directory that was opened.

        Below a lost mount another directory would fill the local disk and vanish when the mount is
        back. Orbax makes missing directories, so only the lock file is proof.
        """
        if lost := self.lock_lost():
            raise CheckpointError(lost)
        if not (self._directory / lock.FILE_NAME).exists():
            raise CheckpointError(f"{self._directory} is gone: is its file system still mounted?")

    def _supersede(self, resumed_from: int) -> None:
        """Mark the checkpoints of a run that was given up; each keeps its files until replaced."""
        newer = [s for s in manifest.steps_in(self._directory) if s > resumed_from]
        start = f"step {resumed_from}" if resumed_from >= 0 else "the beginning"
        reason = f"a run started again from {start}"
        for step in newer:
            manifest.mark(self._directory / step, manifest.SUPERSEDED, reason)
        if newer:
            which = ", ".join(map(str, newer))
            self._events.log(f"checkpoints {which} are marked {manifest.SUPERSEDED}: {reason}")
        self.resumed_from = None

    def _start(
        self, step: int, leaves: list[pytree.Leaf], meta: dict[str, Any], outcome: Outcome
    ) -> Callable[[], dict[str, Any]] | None:
        """Decide on a save and begin to write it; None where `step` is saved already.

        Returns:
            As `_begin`; why nothing was begun is in `outcome.error`.
        """
        try:
            # A mount may be lost on one host alone. A save begun without it would fail on that
            # process inside Orbax, where the others wait.
            prepare = lambda unreachable: self._prepare(step, leaves, unreachable)
            if not self._group.decide_from(self._why_unreachable(), prepare):
                self._events.event("save_skipped", step=step, reason="already saved")
                self.last_committed = True
                return None
        except Exception as error:  # decided by process 0, so alike everywhere
            outcome.error = one_line(error)
            return dict
        return self._begin(step, leaves, meta, outcome)

    def _begin(
        self, step: int, leaves: list[pytree.Leaf], meta: dict[str, Any], outcome: Outcome
    ) -> Callable[[], dict[str, Any]]:
        """Begin to write; whatever the disk or Orbax raises must not stop training.

        Returns:
            What waits for the checksums and makes the document; it holds no array.

        Raises:
            CheckpointError: one process of several failed. The others may wait for it inside
                Orbax, where only the end of this process frees them.
        """
        try:
            arrays = [pytree.plain(leaf) for leaf in leaves]
            described = pytree.describe(leaves, arrays)
            crash_point("before_arrays")
            self._writer.start(self._directory / step, pytree.nest(leaves, arrays))
            checksums = start_checksums(arrays)  # on CPU devices they would delay the copy
            crash_point("during_arrays")
            complete = lambda: pytree.with_checksums(described, checksums())
            return lambda: {"step": step, "meta": meta, "arrays": complete()}
        except Exception as error:
            outcome.error = one_line(error)
            if self._group.num_processes > 1:
                raise CheckpointError(
                    f"the save of step {step} failed on process {self._group.process_id} after "
                    f"all had begun it: {outcome.error}"
                ) from error
            return dict

    def _finish(
        self,
        outcome: Outcome,
        begin: float,
        metrics: dict[str, float],
        document: Callable[[], dict[str, Any]],
    ) -> None:
        """In the background, on every process: what became of the save, the same for all."""
        described: dict[str, Any] = {}
        try:
            if not outcome.error:
                self._writer.wait()
                described = document()
                crash_point("after_arrays")
        except GivenUp:
            pass  # who gave up says why
        except Exception as failure:
            outcome.error = one_line(failure)
            self._writer.give_up()
        try:
            if errors := [text for text in self._background.gather(outcome.error) if text]:
                raise CheckpointError(errors[0])
            outcome.num_bytes = self._commit(outcome, metrics, described)
        except Exception as failure:
            outcome.error = one_line(failure)
            self._writer.close()
            if self._background.is_leader:
                self._delete_leftovers()
            self._events.failed(outcome, self._failures + 1, MAX_FAILURES)
            return
        outcome.written_s = time.perf_counter() - begin
        self._events.saved(outcome)
        if self._background.is_leader:
            crash_point("after_manifest")
            self._retain()

    def _commit(self, outcome: Outcome, metrics: dict[str, float], document: dict[str, Any]) -> int:
        """Write document and manifest, each process reading its share of the files; their bytes."""
        path = self._directory / outcome.step
        names = self._background.decide(lambda: self._write_document(path, document))
        mine = names[self._background.process_id :: self._background.num_processes]
        own, error = dict(self._writer.fingerprints or {}), ""
        try:
            own.update({name: crc32.fingerprint(path / name) for name in mine})
        except OSError as failure:  # the other processes wait for an answer all the same
            error = one_line(failure)
        shares = self._background.gather([own, error])
        if errors := [error for _, error in shares if error]:
            raise CheckpointError(errors[0])
        files = {name: entry for own, _ in shares for name, entry in own.items()}
        self._background.decide(lambda: self._write_manifest(outcome, files, metrics))
        return sum(size for size, _ in files.values())

    def _write_document(self, path: Location, document: dict[str, Any]) -> list[str]:
        self._check_reachable()  # it may have gone while the arrays were written
        orbax_io.write_document(path, document)
        return manifest.files_of(path) if self._writer.fingerprints is None else [manifest.DOCUMENT]

    def _write_manifest(
        self, outcome: Outcome, files: dict[str, list[int]], metrics: dict[str, float]
    ) -> None:
        self._check_reachable()  # it may have gone while the files were read
        path = self._directory / outcome.step
        if not path.is_local and (problems := manifest.size_problems(path, files)):
            raise CheckpointError(few(problems, 1))
        flush_appended()  # no step before this one may be missing in metrics.jsonl after a kill
        crash_point("before_manifest")
        manifest.write(path, outcome.step, files, metrics, halfway=outcome.halfway)

    def _delete_leftovers(self) -> None:
        """Free the space of failed saves, never a checkpoint that was there before.

        What cannot be deleted is no reason to fail: Orbax's threads may still be writing to the
        save that failed last.
        """
        try:
            manifest.delete_partial(self._directory)
        except OSError as error:
            self._events.log(f"leftovers of a failed save stay behind: {one_line(error)}")

    def _retain(self) -> None:
        if self._directory.is_local:
            self._delete_old()
            return
        # A store that hangs must not keep a run whose last checkpoint is committed.
        what = f"deleting old checkpoints of {self._directory}"
        in_time(what, self._delete_old, RETENTION_S, announce=False)

    def _delete_old(self) -> None:
        try:
            not_kept = steps_to_delete(self.complete(), self._config)
        except OSError as error:
            self._events.log(f"no old checkpoint is deleted now: {one_line(error)}")
            return
        for step in not_kept:
            try:
                manifest.delete(self._directory / step)
            except OSError as error:
                self._events.log(f"checkpoint {step} could not be deleted: {one_line(error)}")


@contextlib.contextmanager
def _prompt_thread_switches() -> Iterator[None]:
    """Let this thread, for which training waits, have the interpreter again within 0.1 ms.

    A thread that Orbax starts keeps it for Python's 5 ms by default, and every start waits for one.
    """
    usual = sys.getswitchinterval()
    sys.setswitchinterval(0.0001)
    try:
        yield
    finally:
        sys.setswitchinterval(usual)
