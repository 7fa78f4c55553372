"""Save and restore the checkpoints of one run, for the training loop and the commands."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxdist.checkpoint import manifest, orbax_io, pytree
from jaxdist.checkpoint.checksum import checksums
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.crash_points import crash_point
from jaxdist.checkpoint.events import (
    CheckpointError,
    CorruptCheckpoint,
    Event,
    EventLog,
    make_group,
    one_line,
)
from jaxdist.checkpoint.local.store import LINEAGE_FILE
from jaxdist.checkpoint.local.tier import LocalTier
from jaxdist.checkpoint.lock import DirectoryLock
from jaxdist.checkpoint.moment_store import MomentStore
from jaxdist.checkpoint.restore import Reader
from jaxdist.checkpoint.save import Saver
from jaxdist.checkpoint.save_schedule import Due, SaveSchedule
from jaxdist.checkpoint.streaming_io import StoredArrays
from jaxdist.core.weights import GROUPS, merged
from jaxdist.runtime.coordination import Group
from jaxdist.runtime.progress import waiting
from jaxdist.runtime.storage import Location, locate
from jaxdist.settings import ConfigError


class Checkpointer:
    """Checkpoints of one run.

    Every process of a job makes the same calls in the same order; process 0 makes the decisions. A
    run that resumes calls `choose` and `restore` before its first `save`; this save marks newer
    checkpoints as superseded. Call `close` after an exception too, because Orbax cannot complete a
    save during interpreter shutdown. Raises `ConfigError` if another run uses the directory.

    Args:
        directory: holds one directory per step; created if absent.
        log: receives the log lines on process 0; default: the logger `jaxdist.checkpoint`.
        read_only: do not lock, write or delete anything.
        is_held: take the lock, but change nothing else in the directory before `commit`; `close`
            without a `commit` undoes the lock file.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        config: CheckpointConfig,
        *,
        log: Callable[[str], None] | None = None,
        read_only: bool = False,
        is_held: bool = False,
    ) -> None:
        self.directory = locate(directory).absolute()
        self.config = config
        self._group = make_group()
        self._events = EventLog(
            log or logging.getLogger("jaxdist.checkpoint").warning, self._group.is_leader
        )
        self._saver = Saver(self.directory, config, self._group, self._events)
        self._reader = Reader(
            directory=self.directory,
            config=config,
            group=self._group,
            events=self._events,
            read_only=read_only,
            is_held=is_held,
        )
        self._read_only, self._is_held = read_only, is_held
        self._lock: DirectoryLock | None = None
        self._chosen: int | None = None
        self._preflight: concurrent.futures.Future[None] | None = None
        self._schedule = SaveSchedule(config, self._group)
        self._local: LocalTier | None = None
        self._chosen_locally = False
        if not read_only:
            self._group.decide(self._open)
            if config.local_dir:
                try:
                    self._local = LocalTier(self.directory, config, self._events)
                except BaseException:
                    self.close()  # releases the lock
                    raise
            if not is_held:
                self.commit()

    def commit(self) -> None:
        """Delete unfinished saves, mark rejected checkpoints, start due exports."""
        self._is_held = False
        self._group.decide(self._clean)
        self._reader.commit()
        if self._group.is_leader:
            self._saver.exports.resume(self._saver.resumed_from or 0)
        if self._local is not None:
            self._local.clean()
            if (step := self._saver.resumed_from) is not None and step >= 0:
                self._local.resumed(step)

    def due(self, step: int, now: float | None = None) -> Due:
        """Return the kind of save that is due after `step`, "" for none; see `SaveSchedule.due`."""
        return self._schedule.due(step, now)

    def save(
        self,
        step: int,
        state: Any,
        meta: dict[str, Any],
        *,
        due: Due = "",
        force: bool = False,
        metrics: dict[str, float] | None = None,
        moments: MomentStore | None = None,
    ) -> None:
        """Save the state of `step`; with `config.in_background` blocks only for the copy to host.

        Waits for the previous save first; a "local" save is skipped instead. A failure is reported
        and counted, and training continues. A step that is already saved is skipped. Raises
        `CheckpointError` after `MAX_FAILURES` failed saves in a row. In a job of several processes
        also raises it if this process fails after all began to write, because only its exit
        unblocks the others.

        Args:
            step: number of finished steps; names the checkpoint.
            state: tree of global `jax.Array`s, a dataclass or dict: `params`, `opt_state`, ...
            meta: JSON: data position, resolved config, versions, mesh.
            due: result of `due`; "" = an unscheduled save, kept like "interval". "local" saves to
                `checkpoint.local_dir` only and ignores `force`.
            force: return only after the save is committed or has failed (preemption, last step).
            metrics: evaluation metrics at this step, for `keep_best`.
            moments: the optimizer moments that are in a store and not in `state`.
        """
        if self._read_only:
            raise ValueError("this Checkpointer was opened read_only")
        self._schedule.saved(step, due)
        if self._local is not None and due == "local":
            self._local.save(step, state, meta)
            return
        if self._local is not None:
            self._local.begin()
        numbers = {name: float(value) for name, value in (metrics or {}).items()}
        halfway = due == "halfway"
        self._saver.start(step, state, meta, numbers, halfway=halfway, moments=moments)
        if force or not self.config.in_background:
            self._saver.wait()

    def wait(self, *, exports: bool = False) -> bool:
        """Wait for the current save; return whether the last requested save is committed.

        Ignores local saves. With `exports`, also wait for the exports of committed checkpoints.
        """
        self._saver.wait()
        if exports:
            self._saver.exports.wait()
        return self._saver.last_committed

    def close(self) -> None:
        """Finish the current save, stop the current export, stop the threads, release the lock."""
        try:
            with waiting("finishing the save"):
                if self._preflight is not None:
                    concurrent.futures.wait([self._preflight])
                self._saver.wait()
            if self._local is not None:
                self._local.close()
        finally:
            self._saver.close()
            if self._lock is not None:
                self._lock.release(undo=self._is_held)
                self._lock = None

    def pop_events(self) -> list[Event]:
        """Return the events since the last call, for metrics, on every process.

        `save` (step, halfway, blocked_s, waited_s, written_s, bytes, gb_per_s), `save_failed`
        (step, reason, in_a_row), `save_skipped` and `checkpoint_skipped` (step, reason), `restore`
        (step, seconds, bytes; of a local save also tier), `preflight` (seconds), only on process 0
        `export` (step, seconds) and `export_failed` (step, reason). Of local saves: `local_save`
        (step, blocked_s, written_s, bytes of this process), `local_save_failed` (step, reason),
        `local_save_skipped` (step), `local_save_damaged` (step, process, reason).
        """
        return self._events.pop()

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, in order: corrupt ones too, superseded ones not."""
        return self._reader.steps()

    def choose(self, target: Callable[[], Any] | None = None) -> int | None:
        """Return the newest step whose checkpoint passes verification; None without checkpoints.

        Marks newer checkpoints that it rejects (`<step>/CORRUPT`). Includes local saves if `target`
        returns the abstract state for `restore`. If nothing passes verification, marks none and
        raises `CheckpointError`, so that a run never starts over silently.
        """
        self._saver.wait()  # a save in progress has no manifest yet
        abstract = target() if self._local is not None and target is not None else None
        steps = self._reader.steps() if abstract is not None else []
        self._chosen = self._choose_locally(abstract, max(steps, default=0))
        if self._chosen is not None:
            return self._chosen
        try:
            self._chosen = self._reader.choose()
        except CheckpointError:  # all are corrupt: use an older local save
            if (older := self._choose_locally(abstract, 0)) is None:
                raise
            self._chosen = older
            return older
        if steps and self._chosen != steps[-1]:
            older = self._choose_locally(abstract, (self._chosen or 0) + 1)
            self._chosen = self._chosen if older is None else older
        return self._chosen

    @property
    def is_local(self) -> bool:
        """Return whether local saves are configured; `save` then needs `meta` in every process."""
        return self._local is not None

    def survivable(self, state: Any) -> str:
        """Return which host losses a local save survives, in one line; "" without local saves."""
        return "" if self._local is None else self._local.survivable(state)

    def discard_local(self) -> None:
        """Delete the local saves of a finished run, whose last state is in the directory."""
        if self._local is not None:
            self._local.discard()

    def verify(self, step: int) -> str:
        """Check every file of a checkpoint; return why it must not be loaded, or ""."""
        self._saver.wait()
        return self._reader.problem(step, full=True)

    def restore(
        self,
        abstract_state: Any,
        *,
        step: int | None = None,
        optional: Collection[str] = (),
        moments: MomentStore | None = None,
    ) -> tuple[Any, dict[str, Any], int]:
        """Load a checkpoint onto any mesh by `checkpoint.verify`; return (state, meta, step).

        `abstract_state` is a tree like the saved one, of `jax.ShapeDtypeStruct` with sharding.
        Arrays of another dtype are cast. Without `step`, or with the result of `choose`, loads the
        newest valid checkpoint (or the local save of `choose`), or an older one if its checksums
        are wrong and this is not `read_only`. Parts in `optional` (`pytree.OPTIONAL`) may be
        missing in checkpoint or state: if the checkpoint lacks one, its abstract value is
        returned. `moments` are loaded into the store. Raises `ConfigError` for missing or extra
        leaves and other shapes, and `CheckpointError` if none, or not the chosen one, can be read.
        """
        self._saver.wait()
        if step is not None and step == self._chosen:
            step = None
        while step is None and self._chosen_locally:
            if (restored := self._restore_locally(abstract_state)) is not None:
                return restored
        optional = [*optional, *(leaf.name for leaf in (moments.leaves if moments else ()))]
        while True:
            chosen = self._reader.require(step)
            try:
                state = self._reader.load(chosen, abstract_state, optional=optional)
                if moments is not None:
                    moments.load(StoredArrays(self.directory / chosen), chosen)
            except CorruptCheckpoint as error:
                if step is not None or self._read_only:
                    raise
                self._reader.remember_corrupt(chosen, str(error))
                continue
            self._resumed(chosen)
            return state, self._reader.document(chosen)["meta"], chosen

    def restore_params(
        self,
        target: Any,
        step: int | None = None,
        *,
        weights: pytree.Weights = "auto",
        reinit: Collection[str] = (),
    ) -> Any:
        """Load parameters only: for evaluation, generation, warm starts and fine-tuning.

        Raises the errors of `restore`, and `ConfigError` if "ema" is requested and missing.

        Args:
            target: params tree of `jax.ShapeDtypeStruct` with sharding; leaves under `reinit` are
                `jax.Array`s and are returned unchanged.
            step: checkpoint to load; None = the newest valid one.
            weights: "ema" = the moving average, "raw" = as trained, "auto" = the average if the
                checkpoint has one.
            reinit: names of leaves or subtrees, of the target or of the checkpoint, that are not
                read, e.g. `head` or `params/head`.
        """
        self._saver.wait()
        chosen = self._reader.require(step)
        arrays = self._reader.document(chosen)["arrays"]
        item = pytree.weights_item(weights, arrays)
        own, others = pytree.split_stored(target, item, arrays)
        loaded = self._reader.load(
            chosen, {item: own}, items=(item,), reinit=pytree.in_params(reinit, item)
        )[item]
        model = GROUPS["model"].item
        if not (missing := {leaf.name for leaf in pytree.leaves_of({model: others})}):
            return loaded
        unread = [name for name in arrays if pytree.under(name, [model]) and name not in missing]
        rest = self._reader.load(chosen, {model: others}, items=(model,), reinit=unread)
        return merged(loaded, rest[model])

    def meta(self, step: int) -> dict[str, Any]:
        """Return the JSON that was passed to `save` as `meta`."""
        return self._reader.document(step)["meta"]

    def weights_kind(self, step: int, weights: pytree.Weights) -> str:
        """Return which weights `restore_params` loads, "ema" or "raw"; raises its errors."""
        item = pytree.weights_item(weights, self._arrays(step))
        return {group.item: name for name, group in GROUPS.items()}[item].replace("model", "raw")

    def copies(self, step: int) -> list[str]:
        """Return the names of a checkpoint's parameter groups besides the model's, e.g. "ema"."""
        return pytree.stored_copies(self._arrays(step))

    def _arrays(self, step: int) -> dict[str, Any]:
        if self._local is not None and self._chosen_locally and step == self._chosen:
            return self._local.arrays()
        return self._reader.document(step)["arrays"]

    def preflight(self, state: Any = None) -> None:
        """Write and read a small array, check free space for `state`; raises `CheckpointError`."""
        start = time.perf_counter()
        leaves = pytree.leaves_of(state)
        self._group.decide(lambda: self._saver.check_room(sum(x.num_bytes for x in leaves)))
        checksums([pytree.plain(leaf) for leaf in leaves])
        try_save_path(self.directory, self._group)
        self._events.event("preflight", seconds=time.perf_counter() - start)

    def start_preflight(self, state: Any = None) -> None:
        """Start `preflight` on a thread, e.g. while the step compiles.

        The caller must not change `state` or save until `finish_preflight` returns. With several
        processes it runs synchronously, because two threads could run device programs in a
        different order on each process.
        """
        if self._group.num_processes > 1:
            self.preflight(state)
            return
        thread = concurrent.futures.ThreadPoolExecutor(1, "preflight")
        self._preflight = thread.submit(self.preflight, state)
        thread.shutdown(wait=False)

    def finish_preflight(self) -> None:
        """Wait for the preflight, if one was started, and raise its error."""
        started, self._preflight = self._preflight, None
        if started is not None:
            started.result()

    def _choose_locally(self, target: Any, at_least: int) -> int | None:
        step = None
        if self._local is not None and target is not None:
            step = self._local.choose(target, at_least)
        self._chosen_locally = step is not None
        return step

    def _restore_locally(self, abstract_state: Any) -> tuple[Any, dict[str, Any], int] | None:
        assert self._local is not None and self._chosen is not None
        try:
            state, meta = self._local.load(abstract_state)
        except CorruptCheckpoint as error:
            self._events.log(f"loading a local save failed, choosing another save: {error}")
            self.choose(lambda: abstract_state)
            return None
        self._resumed(self._chosen)
        return state, meta, self._chosen

    def _resumed(self, step: int) -> None:
        self._schedule.saved(step, "")
        self._saver.resumed_from = step
        if self._local is not None and not self._is_held:
            self._local.resumed(step)

    def _open(self) -> None:
        try:
            self.directory.make_directory()
        except OSError as error:
            raise ConfigError(
                f"checkpoint directory {self.directory} cannot be created ({error.strerror}). "
                "Choose another --run-dir or make its parent writable."
            ) from error
        self._lock = DirectoryLock(self.directory, self._log)
        self._lock.acquire()
        self._saver.lock_lost = self._lock.lost
        crash_point("lock_taken")

    def _log(self, text: str) -> None:
        self._events.log(f"checkpoint directory {self.directory}: {text}")

    def _clean(self) -> None:
        if partial := manifest.delete_partial(self.directory):
            self._log(f"removed unfinished saves of steps {', '.join(map(str, partial))}")
        if not self.config.local_dir:
            (self.directory / LINEAGE_FILE).delete()  # later local saves start a new one


def try_save_path(parent: Location, group: Group) -> None:
    """Write a small array sharded over all devices and read it back, or raise; delete it.

    If only one process fails, the others may hang inside Orbax until they are killed.
    """
    directory = parent / ".preflight"
    try:
        _round_trip(directory, group)
    except Exception as failure:
        # Raise immediately: the others may hang in Orbax, and this process's exit ends them.
        raise CheckpointError(
            f"a test save in {parent} before training failed: {one_line(failure)}. "
            f"Fix that, or choose another --run-dir."
        ) from failure
    finally:
        if group.is_leader:
            with contextlib.suppress(OSError):
                directory.delete_tree()


def _round_trip(directory: Location, group: Group) -> None:
    group.decide(directory.delete_tree)
    group.decide(directory.make_directory)
    devices = jax.devices()
    mesh = Mesh(np.asarray(devices, dtype=object), ("all",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, PartitionSpec("all"))
    make = jax.jit(
        lambda: jnp.arange(len(devices) * 128.0).reshape(-1, 128), out_shardings=sharding
    )
    leaves = pytree.leaves_of({"params": {"preflight": make()}})
    arrays = [leaf.value for leaf in leaves]
    writer = orbax_io.make_writer(directory)
    try:
        writer.start(directory / "0", pytree.nest(leaves, arrays))
        writer.wait()
        group.synchronize()  # each process waits for its own part only
        targets = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for a in arrays]
        restored = orbax_io.read(directory / "0", pytree.nest(leaves, targets))
    finally:
        writer.close()
    group.synchronize()  # all have read before the directory is deleted
    if group.is_leader:
        manifest.write(directory / "0", 0, {}, {})
    if checksums([pytree.pick(restored, leaf) for leaf in leaves]) != checksums(arrays):
        raise CheckpointError("the data read back differ from the data written")
