"""How one save is made, and what becomes of it.

The order: see whether it can work at all (process 0; that the directory is there, all) → digest of
every array → copy to the host and begin writing → the loop goes on → all files are there → CRC-32
of every file, shared among the processes → manifest, then the step's name → delete what retention
does not keep. Process 0's answer is everyone's.
"""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from pathlib import Path
from typing import Any

from jaxdist.checkpoint import lock, manifest, pytree
from jaxdist.checkpoint.checksum import digests
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.coordination import make_barrier, make_group
from jaxdist.checkpoint.errors import CheckpointError
from jaxdist.checkpoint.events import Journal, Outcome, one_line, size_text
from jaxdist.checkpoint.orbax_io import Store
from jaxdist.checkpoint.retention import Saved, steps_to_delete
from jaxdist.runtime.coordination import GivenUp, Group

MAX_FAILURES = 3
"""Failed saves in a row after which a run stops: what it computes could not be kept."""


class Saver:
    """Writes checkpoints, one at a time, in the background.

    Attributes:
        continues: the newest step that this run continues from; checkpoints above it belong to a
            run that was given up and are set aside by the first save. None once that is done.
    """

    def __init__(
        self, directory: Path, config: CheckpointConfig, group: Group, journal: Journal
    ) -> None:
        self.continues: int | None = -1
        self.last_committed = True
        self._directory = directory
        self._config = config
        self._group = group
        self._background = make_group()  # the writing thread's exchanges keep an order of their own
        self._journal = journal
        self._barrier = make_barrier()
        self._store = Store(config, self._barrier)
        self._failures = 0
        self._pending: tuple[Outcome, threading.Thread] | None = None

    def start(
        self,
        step: int,
        state: Any,
        meta: dict[str, Any],
        metrics: dict[str, float],
        *,
        midway: bool = False,
    ) -> None:
        """Begin a save, after waiting for the one before; one `midway` is kept until the next."""
        leaves = pytree.leaves_of(state)
        json.dumps(meta)  # raises here and now, not as a save that fails again and again
        outcome = Outcome(step, midway=midway, waited_s=self.settle())
        begin = time.perf_counter()
        try:
            # A mount may be lost on one host alone. Begun without it, the save would fail on that
            # process amid Orbax, where the others wait.
            prepare = lambda absent: self._prepare(step, leaves, absent)
            if not self._group.decide_from(self._why_absent(), prepare):
                self._journal.event("save_skipped", step=step, reason="already saved")
                self.last_committed = True
                return
        except Exception as error:  # decided by process 0, so alike everywhere
            outcome.error = one_line(error)
        else:
            self._try_begin(step, leaves, meta, outcome)
        outcome.blocked_s = time.perf_counter() - begin
        # Not a daemon: a process that ends by an exception still completes the checkpoint.
        thread = threading.Thread(
            target=self._finish, args=(outcome, begin, metrics), name="checkpoint-finish"
        )
        self._pending = (outcome, thread)
        thread.start()

    def settle(self) -> float:
        """Wait for the save being written and count its outcome; seconds waited.

        Raises:
            CheckpointError: `MAX_FAILURES` saves in a row have failed.
        """
        if self._pending is None:
            return 0.0
        outcome, thread = self._pending
        start = time.perf_counter()
        thread.join()
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
        """Stop Orbax's threads."""
        self._store.close()

    def check_room(self, num_bytes: int) -> None:
        """Raise unless the disk has that much free space."""
        free = shutil.disk_usage(self._directory).free
        if free < num_bytes:
            raise CheckpointError(
                f"no space: a checkpoint takes {size_text(num_bytes)}, {self._directory} has "
                f"{size_text(free)} free. Free some, lower checkpoint.max_to_keep, or choose "
                "another --run-dir."
            )

    def complete(self) -> dict[int, Saved]:
        """What the manifest of each complete checkpoint says of it."""
        found = {}
        for step in manifest.steps_in(self._directory):
            try:
                body = manifest.read(self._directory / str(step))
            except ValueError:
                continue  # neither kept for its step nor deleted
            found[step] = Saved(body["metrics"], body["midway"])
        return found

    def _prepare(self, step: int, leaves: list[pytree.Leaf], absent: list[str]) -> bool:
        """On process 0: make room, look for reasons to fail; False when `step` is saved already.

        Args:
            step: to save.
            leaves: what of.
            absent: why processes cannot reach the directory, "" of each that can.
        """
        if reasons := [reason for reason in absent if reason]:
            more = f", and {len(reasons) - 1} more" if len(reasons) > 1 else ""
            raise CheckpointError(reasons[0] + more)
        manifest.remove_leftovers(self._directory)
        if self.continues is not None:
            self._supersede(self.continues)
        path = self._directory / str(step)
        if path.exists():
            try:
                manifest.read(path)
                return False
            except ValueError as reason:
                manifest.set_aside(path, "damaged")
                self._journal.line(f"checkpoint {step} set aside, it is saved anew: {reason}")
        self.check_room(sum(leaf.num_bytes for leaf in leaves))
        (self._directory / manifest.SAVING_NAME).mkdir(exist_ok=True)
        return True

    def _why_absent(self) -> str:
        """Why this process cannot reach the directory; "" where it can."""
        try:
            self._check_there()
        except (CheckpointError, OSError) as error:  # OSError: a file server's stale handle
            reason = str(error) if isinstance(error, CheckpointError) else one_line(error)
            if self._group.num_processes > 1:
                reason += f" (process {self._group.process_id} on {socket.gethostname()})"
            return reason
        return ""

    def _check_there(self) -> None:
        """Raise unless this is the directory that was opened.

        Made anew it would fill the disk below a lost mount, and hide when that is back. Orbax makes
        what is missing, so that a directory is no proof; the lock file in it is.
        """
        if not (self._directory / lock.FILE_NAME).exists():
            raise CheckpointError(f"{self._directory} is gone: is its file system still mounted?")

    def _supersede(self, continues: int) -> None:
        newer = [s for s in manifest.steps_in(self._directory) if s > continues]
        for step in newer:
            manifest.set_aside(self._directory / str(step), "superseded")
        if newer:
            start = f"step {continues}" if continues >= 0 else "the beginning"
            self._journal.line(
                f"checkpoints {', '.join(map(str, newer))} set aside (.superseded): "
                f"this run started again from {start}"
            )
        self.continues = None

    def _try_begin(
        self, step: int, leaves: list[pytree.Leaf], meta: dict[str, Any], outcome: Outcome
    ) -> None:
        """Begin to write; whatever the disk or Orbax raises must not stop training.

        Raises:
            CheckpointError: this process of several failed; the others may wait for it in Orbax,
                where nothing frees them but the end of this process.
        """
        try:
            self._begin(step, leaves, meta)
        except Exception as error:
            outcome.error = one_line(error)
            if self._group.num_processes > 1:
                raise CheckpointError(
                    f"the save of step {step} failed on process {self._group.process_id} after "
                    f"all had begun it: {outcome.error}"
                ) from error

    def _begin(self, step: int, leaves: list[pytree.Leaf], meta: dict[str, Any]) -> None:
        arrays = [pytree.plain(leaf) for leaf in leaves]
        document = {"step": step, "meta": meta, "arrays": pytree.describe(leaves, digests(arrays))}
        self._store.start_write(self._unsealed(step), pytree.nest(leaves, arrays), document)

    def _finish(self, outcome: Outcome, begin: float, metrics: dict[str, float]) -> None:
        """In the background, on every process: what became of the save, the same for all."""
        try:
            if not outcome.error:
                self._store.finish_write()
        except GivenUp:
            pass  # who gave up says why
        except Exception as failure:
            outcome.error = one_line(failure)
            self._barrier.give_up()
        try:
            errors = [text for text in self._background.gather(outcome.error) if text]
            if errors:
                raise CheckpointError(errors[0])
            outcome.num_bytes = self._seal(outcome, metrics)
        except Exception as failure:
            outcome.error = (
                str(failure) if isinstance(failure, CheckpointError) else one_line(failure)
            )
            self._store.close()
            if self._background.is_leader:
                self._discard(outcome.step)
            self._journal.failed(outcome, self._failures + 1, MAX_FAILURES)
            return
        outcome.written_s = time.perf_counter() - begin
        self._journal.saved(outcome)
        if self._background.is_leader:
            self._retain()

    def _seal(self, outcome: Outcome, metrics: dict[str, float]) -> int:
        """Write the manifest, each process fingerprinting its share of the files; their bytes."""
        path = self._unsealed(outcome.step)
        names = self._background.decide(lambda: manifest.files_of(path))
        mine = names[self._background.process_id :: self._background.num_processes]
        shares = self._background.gather(_fingerprints(path, mine))
        if errors := [share["error"] for share in shares if "error" in share]:
            raise CheckpointError(errors[0])
        files = {name: entry for share in shares for name, entry in share["files"].items()}
        self._background.decide(lambda: self._publish(outcome, files, metrics))
        return sum(size for size, _ in files.values())

    def _publish(
        self, outcome: Outcome, files: dict[str, list[int]], metrics: dict[str, float]
    ) -> None:
        """On process 0: the manifest, then the name. A kill before that leaves no checkpoint."""
        self._check_there()  # it may have gone while the save was written
        path = self._unsealed(outcome.step)
        manifest.write(path, outcome.step, files, metrics, midway=outcome.midway)
        manifest.publish(path, self._directory / str(outcome.step))

    def _unsealed(self, step: int) -> Path:
        return self._directory / manifest.SAVING_NAME / str(step)

    def _discard(self, step: int) -> None:
        """Free the space of a failed save."""
        try:
            manifest.remove_leftovers(self._directory)
        except OSError as error:
            self._journal.line(f"checkpoint {step}: leftovers stay behind: {one_line(error)}")

    def _retain(self) -> None:
        for step in steps_to_delete(self.complete(), self._config):
            try:
                manifest.delete(self._directory / str(step))
            except OSError as error:
                self._journal.line(f"checkpoint {step} could not be deleted: {one_line(error)}")


def _fingerprints(path: Path, names: list[str]) -> dict[str, Any]:
    """Size and CRC-32 of files, or why not: the other processes wait for an answer either way."""
    try:
        return {"files": {name: manifest.fingerprint(path / name) for name in names}}
    except OSError as error:
        return {"error": one_line(error)}
