"""Saves and restores of one run: what the training loop and the commands talk to.

The order of a save: wait for the one before → look whether it can work at all (process 0) →
digest of every array → copy to the host, begin writing → the loop goes on → all files are there →
CRC-32 of every file, shared among the processes → manifest → delete what retention does not keep.

A save that fails is reported and counted; older checkpoints are untouched and training goes on
until `max_failures` in a row.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import shutil
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import jax

from jaxdist.checkpoint import manifest, store, tree
from jaxdist.checkpoint.agreement import Agreement
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.digest import digests
from jaxdist.checkpoint.errors import CheckpointError, Damaged
from jaxdist.checkpoint.lock import DirectoryLock
from jaxdist.checkpoint.retention import best_steps, steps_to_delete
from jaxdist.types import ConfigError

Event = dict[str, Any]

_CLOCK_STEPS = (
    10  # several processes agree on the wall clock only every so many steps: a round trip
)


class Checkpointer:
    """The checkpoints of one run.

    Every process of a job builds one and makes the same calls in the same order; process 0 decides.

    Args:
        directory: holds one directory per step; made if absent.
        config: when to save, what to keep, how far to trust.
        log: receives one line per event on process 0; default: the logger `jaxdist.checkpoint`.
        read_only: for commands that only read: no lock, nothing is renamed, made or deleted.

    Raises:
        ConfigError: another run uses the directory, or it cannot be written.
    """

    def __init__(
        self,
        directory: Path,
        config: CheckpointConfig,
        *,
        log: Callable[[str], None] | None = None,
        read_only: bool = False,
    ) -> None:
        self.directory = Path(directory).absolute()
        self.config = config
        self._log_line = log or logging.getLogger("jaxdist.checkpoint").warning
        self._read_only = read_only
        self._agreement = Agreement()
        self._finishing = Agreement()  # the background thread's own exchanges, in their own order
        self._store = store.Store(config)
        self._lock: DirectoryLock | None = None
        self._pending: _Write | None = None
        self._events: collections.deque[Event] = collections.deque()
        self._verified: set[int] = set()
        self._failures = 0
        self._last_step: int | None = None
        self._last_time = time.monotonic()
        self._last_committed = True
        if not read_only:
            self._agreement.decide(self._open)

    # -- saving ------------------------------------------------------------------------------------

    def due(self, step: int, now: float | None = None) -> bool:
        """Whether the policies ask for a save after `step`; the same answer on every process.

        Args:
            step: the step just finished.
            now: seconds of a clock that never runs backwards; default `time.monotonic()`.
        """
        if step == self._last_step:
            return False
        every = self.config.save_interval_steps
        if every and step % every == 0:
            return True
        minutes = self.config.save_interval_minutes
        if not minutes or (self._agreement.num_processes > 1 and step % _CLOCK_STEPS):
            return False
        now = time.monotonic() if now is None else now
        return self._agreement.decide(lambda: now - self._last_time >= 60 * minutes)

    def save(
        self,
        step: int,
        state: Any,
        meta: dict[str, Any],
        *,
        force: bool = False,
        metrics: dict[str, float] | None = None,
        now: float | None = None,
    ) -> None:
        """Save the state of `step`; blocks only while arrays are copied to the host.

        Waits first, visibly, for a save still being written. A failure is reported and counted.

        Args:
            step: number of finished steps; names the checkpoint.
            state: pytree of global `jax.Array`s, a dataclass or dict: `params`, `opt_state`, ...
            meta: JSON: data position, resolved config, versions, mesh.
            force: return only when it is committed or has failed (preemption, end of the run).
            metrics: evaluation metrics at this step, for `keep_best`.
            now: as in `due`.

        Raises:
            CheckpointError: `max_failures` saves in a row have failed.
        """
        waited_s = self._settle()
        self._last_step = step
        self._last_time = time.monotonic() if now is None else now
        leaves = tree.leaves_of(state)
        write = _Write(step, metrics or {}, waited_s)
        try:
            if self._agreement.decide(lambda: self._prepare(step, leaves)):
                self._begin(write, leaves, meta)
            else:
                self._emit({"event": "save_skipped", "step": step, "reason": "already saved"})
                self._last_committed = True
                return
        except Exception as error:  # whatever the disk or Orbax raises must not stop training
            write.error = _one_line(error)
            self._report_failure(write)
        self._pending = write
        if force or not self.config.async_save:
            self._settle()

    def wait(self) -> bool:
        """Wait for the save being written.

        Returns:
            Whether the last save asked for is committed (True when none was asked for).

        Raises:
            CheckpointError: `max_failures` saves in a row have failed.
        """
        self._settle()
        return self._last_committed

    def close(self) -> None:
        """Finish what is being written, stop the threads, give up the lock."""
        try:
            self._settle()
        finally:
            self._store.close()
            if self._lock is not None:
                self._lock.release()
                self._lock = None

    def pop_events(self) -> list[Event]:
        """What happened since the last call, for metrics: `event` save, save_failed, restore, ...

        A `save` holds step, blocked_s (copy to the host), waited_s (for the save before), written_s
        (until durable), bytes, gb_per_s. Events are collected on every process, alike.
        """
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    # -- restoring ---------------------------------------------------------------------------------

    def steps(self) -> list[int]:
        """Steps of all checkpoints in the directory, whole or not."""
        return self._agreement.decide(lambda: manifest.steps_in(self.directory))

    def choose(self) -> int | None:
        """The newest step that can be trusted; None when the directory holds no checkpoint.

        Each one passed over is set aside (`<step>.damaged`) with a one-line reason.

        Raises:
            CheckpointError: there are checkpoints and none is good: starting over needs a decision.
        """
        rejected = []
        for step in reversed(self.steps()):
            reason = self._problem(step)
            if not reason:
                return step
            rejected.append(f"checkpoint {step} skipped: {reason}")
            self._set_aside(step, reason)
        if not rejected:
            return None
        raise CheckpointError(
            f"no checkpoint in {self.directory} can be trusted, so nothing was resumed:\n  "
            + "\n  ".join(rejected)
            + "\nThey were kept for inspection. Start anew with --resume never and another "
            "--run-dir, or restore the files."
        )

    def verify(self, step: int) -> str:
        """Check every file of a checkpoint; "" when it is whole, else the one-line reason."""
        return self._problem(step, full=True)

    def best(self) -> int | None:
        """The complete checkpoint with the best `best_metric`, or None when none has it."""
        return self._agreement.decide(
            lambda: next(iter(best_steps(self._metrics_of(), self.config)), None)
        )

    def restore(self, abstract_state: Any, *, step: int | None = None) -> tuple[Any, dict, int]:
        """Load a checkpoint onto any mesh, verified.

        Args:
            abstract_state: tree like the one saved, of `jax.ShapeDtypeStruct` with sharding;
                another dtype than saved is cast.
            step: which one; None = the newest that can be trusted, falling back past damaged ones.

        Returns:
            (state, meta, step).

        Raises:
            ConfigError: leaves are missing, left over, or of other shapes; all are named.
            CheckpointError: nothing to restore, or the checkpoint asked for is damaged.
        """
        while True:
            chosen = self.choose() if step is None else self._trusted(step)
            if chosen is None:
                raise CheckpointError(f"there is no checkpoint in {self.directory} to restore.")
            try:
                state, document = self._load(chosen, abstract_state)
            except Damaged as error:
                if step is not None or self._read_only:
                    raise
                self._set_aside(chosen, str(error))
                continue
            return state, document["meta"], chosen

    def restore_params(
        self,
        target: Any,
        step: int | None = None,
        *,
        fresh: Collection[str] = (),
        unused: Collection[str] = (),
    ) -> Any:
        """Load parameters only: evaluation, generation, warm start, fine-tuning with a new head.

        Args:
            target: params tree of `jax.ShapeDtypeStruct` with sharding; leaves under `fresh` are
                `jax.Array`s and come back as they are.
            step: which checkpoint; None = the newest that can be trusted.
            fresh: names of leaves or subtrees that are not read, e.g. `head` or `params/head`.
            unused: names of leaves or subtrees of the checkpoint that may be left unread.

        Raises:
            ConfigError: leaves are missing, left over, of other shapes, or a name matches none.
            CheckpointError: nothing to restore, or the checkpoint is damaged.
        """
        chosen = self.choose() if step is None else self._trusted(step)
        if chosen is None:
            raise CheckpointError(f"there is no checkpoint in {self.directory} to restore.")
        fresh, unused = _in_params(fresh), _in_params(unused)
        params, _ = self._load(chosen, {"params": target}, fresh=fresh, unused=unused, only=True)
        return params["params"]

    def meta(self, step: int) -> dict[str, Any]:
        """What the caller of `save` gave as `meta`."""
        return self._document(step)["meta"]

    def probe(self, num_bytes: int = 0) -> None:
        """Try the save path now rather than at the first save: write, read back and compare.

        Args:
            num_bytes: size of a whole checkpoint, if known: the disk must have room for one.

        Raises:
            CheckpointError: with what does not work.
        """
        from jaxdist.checkpoint.probe import try_save_path

        start = time.perf_counter()
        self._agreement.decide(lambda: self._check_room(num_bytes))
        try_save_path(self.directory / ".probe", self.config, self._agreement)
        self._emit({"event": "probe", "seconds": time.perf_counter() - start})

    # -- a save, step by step ----------------------------------------------------------------------

    def _open(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                [
                    f"checkpoint directory {self.directory} cannot be made ({error.strerror}). "
                    "Choose another --run-dir or make its parent writable."
                ]
            ) from error
        self._lock = DirectoryLock(self.directory)
        if took_over := self._lock.acquire():
            self._log(f"checkpoint directory {self.directory}: {took_over}")
        manifest.remove_leftovers(self.directory)

    def _prepare(self, step: int, leaves: list[tree.Leaf]) -> bool:
        """On process 0: make room, look for reasons to fail; False when `step` is saved already."""
        self.directory.mkdir(parents=True, exist_ok=True)
        manifest.remove_leftovers(self.directory)
        path = self._path(step)
        if path.exists():
            try:
                manifest.read(path)
            except ValueError as reason:
                manifest.set_aside(path)
                self._log(f"checkpoint {step} set aside before saving it anew: {reason}")
            else:
                return False
        self._check_room(sum(leaf.num_bytes for leaf in leaves))
        return True

    def _check_room(self, num_bytes: int) -> None:
        free = shutil.disk_usage(self.directory).free
        if free < num_bytes:
            raise CheckpointError(
                f"no space: a checkpoint takes {_gb(num_bytes)}, {self.directory} has {_gb(free)} "
                "free. Free some, lower checkpoint.keep_newest, or choose another --run-dir."
            )

    def _begin(self, write: _Write, leaves: list[tree.Leaf], meta: dict[str, Any]) -> None:
        write.start = time.perf_counter()
        arrays = [tree.plain(leaf) for leaf in leaves]
        document = {
            "step": write.step,
            "meta": meta,
            "arrays": tree.describe(leaves, digests(arrays)),
        }
        self._store.start_write(self._path(write.step), tree.nest(leaves, arrays), document)
        write.blocked_s = time.perf_counter() - write.start
        write.thread = threading.Thread(
            target=self._finish, args=(write,), name="checkpoint-finish", daemon=True
        )
        write.thread.start()

    def _finish(self, write: _Write) -> None:
        """In the background: wait for the files, prove them, write the manifest, clean up."""
        error = ""
        try:
            self._store.finish_write()
        except Exception as failure:
            error = _one_line(failure)
        try:
            errors = [text for text in self._finishing.gather(error) if text]
            if errors:
                raise CheckpointError(errors[0])
            files = self._fingerprints(write.step)
            write.num_bytes = sum(size for size, _ in files.values())
            self._finishing.decide(
                lambda: manifest.write(self._path(write.step), write.step, files, write.metrics)
            )
        except Exception as failure:
            write.error = _one_line(failure)
            self._report_failure(write)
            return
        write.written_s = time.perf_counter() - write.start
        self._report_save(write)
        if self._agreement.leader:
            self._retain()

    def _fingerprints(self, step: int) -> dict[str, list[int]]:
        """Size and CRC-32 of every file, each process reading its share."""
        path = self._path(step)
        names = self._finishing.decide(lambda: manifest.files_of(path))
        mine = names[self._finishing.process :: self._finishing.num_processes]
        shares = self._finishing.gather({name: manifest.fingerprint(path / name) for name in mine})
        return {name: entry for share in shares for name, entry in share.items()}

    def _retain(self) -> None:
        for step in steps_to_delete(self._metrics_of(), self.config):
            try:
                manifest.delete(self._path(step))
            except OSError as error:
                self._log(f"checkpoint {step} could not be deleted: {_one_line(error)}")

    def _metrics_of(self) -> dict[int, dict[str, float]]:
        """Evaluation metrics of each complete checkpoint."""
        metrics = {}
        for step in manifest.steps_in(self.directory):
            try:
                metrics[step] = manifest.read(self._path(step))["metrics"]
            except ValueError:
                continue  # not complete: neither kept for its step nor deleted
        return metrics

    def _settle(self) -> float:
        """Wait for the pending save and count its outcome; seconds waited."""
        write, self._pending = self._pending, None
        if write is None:
            return 0.0
        start = time.perf_counter()
        if write.thread is not None:
            write.thread.join()
        waited_s = time.perf_counter() - start
        self._last_committed = not write.error
        if not write.error:
            self._failures = 0
            return waited_s
        self._failures += 1
        if self._agreement.leader:
            self._discard(write.step)
        if self._failures >= self.config.max_failures:
            raise CheckpointError(
                f"{self._failures} saves in a row have failed, the last at step {write.step}: "
                f"{write.error}\nThe run stops because it could not be resumed from here "
                "(checkpoint.max_failures). Older checkpoints are untouched."
            )
        return waited_s

    def _discard(self, step: int) -> None:
        """Free the space of a failed save."""
        try:
            manifest.remove_leftovers(self.directory)
            if self._path(step).is_dir():
                manifest.delete(self._path(step))
        except OSError as error:
            self._log(f"checkpoint {step}: leftovers stay behind: {_one_line(error)}")

    # -- a restore, step by step -------------------------------------------------------------------

    def _problem(self, step: int, *, full: bool = False) -> str:
        """Why a checkpoint must not be loaded, or ""; the same answer on every process."""
        level = "full" if full else self.config.verify
        path = self._path(step)

        def files() -> dict[str, Any]:
            try:
                listed = manifest.read(path)["files"]
            except ValueError as reason:
                return {"reason": str(reason)}
            found = [] if level == "none" else manifest.size_problems(path, listed)
            return {"reason": manifest.summary(found), "files": listed}

        answer = self._agreement.decide(files)
        if answer["reason"] or level != "full" or (step in self._verified and not full):
            return answer["reason"]
        names = list(answer["files"])[self._agreement.process :: self._agreement.num_processes]
        shares = self._agreement.gather(manifest.content_problems(path, answer["files"], names))
        reason = manifest.summary([line for share in shares for line in share])
        if not reason:
            self._verified.add(step)
        return reason

    def _trusted(self, step: int) -> int:
        if reason := self._problem(step) if self._exists(step) else "it does not exist":
            others = ", ".join(str(s) for s in self.steps() if s != step) or "none"
            raise CheckpointError(
                f"checkpoint {step} in {self.directory} cannot be used: {reason}. Others: {others}."
            )
        return step

    def _exists(self, step: int) -> bool:
        return self._agreement.decide(lambda: self._path(step).is_dir())

    def _set_aside(self, step: int, reason: str) -> None:
        if not self._read_only:
            self._agreement.decide(lambda: str(manifest.set_aside(self._path(step))))
        self._verified.discard(step)
        self._emit({"event": "checkpoint_skipped", "step": step, "reason": reason})
        self._log(f"checkpoint {step} skipped: {reason}")

    def _load(
        self,
        step: int,
        target: Any,
        *,
        fresh: Collection[str] = (),
        unused: Collection[str] = (),
        only: bool = False,
    ) -> tuple[Any, dict[str, Any]]:
        """Read, check and rebuild `target`; `only` = items it does not mention stay unread."""
        start = time.perf_counter()
        document = self._document(step)
        everything = tree.leaves_of(target)
        leaves = [leaf for leaf in everything if not tree.under(leaf.name, fresh)]
        items = {leaf.item for leaf in everything} if only else set(tree.ITEMS)
        stored = {
            name: entry
            for name, entry in document["arrays"].items()
            if name.partition("/")[0] in items
        }
        problems = tree.mismatches(leaves, stored, unused=[*unused, *fresh])
        problems += _unmatched(fresh, [leaf.name for leaf in everything], "fresh", "the model")
        problems += _unmatched(unused, list(stored), "unused", "the checkpoint")
        if problems:
            raise ConfigError([f"checkpoint {step} does not fit: {line}" for line in problems])
        entries = [stored[leaf.name] for leaf in leaves]
        targets = [tree.target_of(leaf, e) for leaf, e in zip(leaves, entries, strict=True)]
        restored = self._read(step, tree.nest(leaves, targets))
        arrays = [tree.pick(restored, leaf) for leaf in leaves]
        self._check_digests(step, leaves, arrays, entries)
        values = iter(
            tree.finished(leaf, a, e) for leaf, a, e in zip(leaves, arrays, entries, strict=True)
        )
        filled = [
            leaf.value if tree.under(leaf.name, fresh) else next(values) for leaf in everything
        ]
        seconds = time.perf_counter() - start
        num_bytes = sum(leaf.num_bytes for leaf in leaves)
        self._emit({"event": "restore", "step": step, "seconds": seconds, "bytes": num_bytes})
        return jax.tree.unflatten(jax.tree.structure(target), filled), document

    def _read(self, step: int, targets: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        path = self._path(step)
        try:
            return self._store.read(path, targets)
        except Exception as error:
            reason = f"it could not be read ({_one_line(error)})"
            if self._agreement.num_processes == 1:
                if damage := self._problem(step, full=True):
                    raise Damaged(damage) from error
                raise CheckpointError(f"checkpoint {step}: {reason}") from error
            # The other processes wait inside Orbax until this one is gone, so no fallback in place:
            # leave word for the next start and let the launcher make one.
            if not self._read_only:
                (path / manifest.REJECTED_NAME).write_text(reason)
            raise CheckpointError(
                f"checkpoint {step}: {reason}; the next start will go past it."
            ) from error

    def _check_digests(
        self, step: int, leaves: list[tree.Leaf], arrays: list[Any], entries: list[dict[str, Any]]
    ) -> None:
        if self.config.verify == "none":
            return
        wrong = [
            leaf.name
            for leaf, digest, entry in zip(leaves, digests(arrays), entries, strict=True)
            if digest != entry["digest"]
        ]
        if wrong:
            shown = ", ".join(wrong[:3]) + f" and {len(wrong) - 3} more" * (len(wrong) > 3)
            raise Damaged(f"other bits than were saved in {shown}")

    def _document(self, step: int) -> dict[str, Any]:
        try:
            return store.read_document(self._path(step))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"checkpoint {step} in {self.directory} has no readable meta: {_one_line(error)}"
            ) from error

    # -- reporting ---------------------------------------------------------------------------------

    def _path(self, step: int) -> Path:
        return self.directory / str(step)

    def _emit(self, event: Event) -> None:
        self._events.append(event)

    def _log(self, line: str) -> None:
        if self._agreement.leader:
            self._log_line(line)

    def _report_save(self, write: _Write) -> None:
        gb_per_s = write.num_bytes / 1e9 / max(write.written_s, 1e-9)
        self._emit(
            {
                "event": "save",
                "step": write.step,
                "blocked_s": write.blocked_s,
                "waited_s": write.waited_s,
                "written_s": write.written_s,
                "bytes": write.num_bytes,
                "gb_per_s": gb_per_s,
            }
        )
        waited = f", waited {write.waited_s:.2f} s for the save before" * (write.waited_s > 0.01)
        self._log(
            f"checkpoint {write.step} saved: {_gb(write.num_bytes)} in {write.written_s:.2f} s "
            f"({gb_per_s:.2f} GB/s), training blocked {write.blocked_s:.2f} s{waited}"
        )

    def _report_failure(self, write: _Write) -> None:
        self._emit({"event": "save_failed", "step": write.step, "reason": write.error})
        self._log(
            f"SAVE FAILED at step {write.step}: {write.error} "
            f"({self._failures + 1} in a row, the run stops at {self.config.max_failures}; "
            "older checkpoints are untouched, the next interval tries again)"
        )


@dataclasses.dataclass
class _Write:
    """One save on its way: measured by the loop and by the background thread."""

    step: int
    metrics: dict[str, float]
    waited_s: float
    start: float = 0.0
    blocked_s: float = 0.0
    written_s: float = 0.0
    num_bytes: int = 0
    error: str = ""
    thread: threading.Thread | None = None


def _in_params(names: Collection[str]) -> list[str]:
    return [name if tree.under(name, ["params"]) else f"params/{name}" for name in names]


def _unmatched(prefixes: Collection[str], names: list[str], role: str, where: str) -> list[str]:
    return [
        f"{role} names {prefix}, and {where} has no such part. Known: {', '.join(names[:8])}."
        for prefix in prefixes
        if not any(tree.under(name, [prefix]) for name in names)
    ]


def _one_line(error: BaseException) -> str:
    """The first line of an error, short: Orbax's run to hundreds of lines."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


def _gb(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.2f} MB"
