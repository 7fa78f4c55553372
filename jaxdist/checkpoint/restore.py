"""Verify checkpoints and load their arrays onto another mesh."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Collection, Sequence
from typing import Any

import jax

from jaxdist.checkpoint import manifest, orbax_io, pytree
from jaxdist.checkpoint.checksum import checksums
from jaxdist.checkpoint.config import CheckpointConfig
from jaxdist.checkpoint.crash_points import crash_point
from jaxdist.checkpoint.events import (
    CheckpointError,
    CorruptCheckpoint,
    EventLog,
    MismatchError,
    one_line,
)
from jaxdist.runtime.coordination import Group
from jaxdist.runtime.formatting.tables import few
from jaxdist.runtime.storage import Location

_SMALL_BYTES = 1 << 20  # "quick" also reads files up to this size: metadata has no other checksum


@dataclasses.dataclass(kw_only=True)
class Reader:
    """Verify and load checkpoints; `choose` marks corrupt ones at once, with `is_held` at `commit`.

    With `read_only`, mark none.
    """

    directory: Location
    config: CheckpointConfig
    group: Group
    events: EventLog
    read_only: bool
    is_held: bool
    _verified: set[int] = dataclasses.field(default_factory=set, init=False)
    _corrupt: dict[int, str] = dataclasses.field(default_factory=dict, init=False)  # not marked yet

    def steps(self) -> list[int]:
        """Return the steps of all checkpoints, in order: corrupt ones too, superseded ones not."""
        return self.group.decide(lambda: manifest.steps_in(self.directory))

    def choose(self) -> int | None:
        """Return the newest valid step, marking newer, corrupt ones; None without checkpoints.

        If all are corrupt, marks none and raises `CheckpointError`.
        """
        passed_over: dict[int, str] = {}
        for step in reversed(self.steps()):
            if reason := self.problem(step):
                passed_over[step] = reason
                continue
            if not self.read_only:
                self._corrupt |= passed_over
                if not self.is_held:
                    self.commit()
            for corrupt, why in passed_over.items():
                self.events.event("checkpoint_skipped", step=corrupt, reason=why)
                self.events.log(
                    f"checkpoint {corrupt} is skipped, because it cannot be loaded: {why}"
                )
            return step
        if not passed_over:
            return None
        # Mark none, so that the next start accepts them if the user repairs their files.
        raise CheckpointError(
            f"no checkpoint in {self.directory} verifies, so nothing was loaded:\n"
            + "\n".join(f"  checkpoint {step}: {why}" for step, why in passed_over.items())
            + "\nRestore their files, or start again in another --run-dir."
        )

    def require(self, step: int | None) -> int:
        """Return `step`, or the newest valid one if None; `CheckpointError` if it is not valid."""
        if step is None:
            if (chosen := self.choose()) is None:
                raise CheckpointError(
                    f"there is no checkpoint in {self.directory}. Name a run that saved one, or "
                    "start without one."
                )
            return chosen
        exists = self.group.decide((self.directory / step).is_directory)
        if reason := self.problem(step) if exists else "it does not exist":
            others = ", ".join(str(s) for s in self.steps() if s != step) or "none"
            raise CheckpointError(
                f"checkpoint {step} in {self.directory} cannot be used: {reason}. "
                f"Others there: {others}."
            )
        return step

    def problem(self, step: int, *, full: bool = False) -> str:
        """Return why a checkpoint must not be loaded, or ""; `full` overrides `config.verify`."""
        if step in self._corrupt:
            return self._corrupt[step]
        level = "full" if full else self.config.verify
        path = self.directory / step

        files: dict[str, list[int]] = {}  # of process 0

        def listed() -> str:
            try:
                files.update(manifest.read(path)["files"])
                if level == "none":
                    return ""
                problems = manifest.size_problems(path, files)
                small = [name for name, (size, _) in files.items() if size <= _SMALL_BYTES]
                problems = problems or manifest.content_problems(path, files, small)
            except ValueError as reason:
                return str(reason)
            except OSError as error:
                raise _unknown(step, one_line(error)) from error
            return few(problems, 1)

        reason = self.group.decide(listed)
        if reason or level != "full" or (step in self._verified and not full):
            return reason
        parts, entries = self.group.num_processes, list(files.items())
        mine = dict(self.group.scatter(lambda: [entries[i::parts] for i in range(parts)]))
        try:
            share = [manifest.content_problems(path, mine, mine), ""]
        except OSError as error:  # do not raise yet: the other processes wait for an answer
            share = [[], one_line(error)]

        def merge(shares: list[Any]) -> str:
            reason = few([line for problems, _ in shares for line in problems], 1)
            if not reason and (errors := [error for _, error in shares if error]):
                raise _unknown(step, errors[0])
            return reason

        reason = self.group.decide_from(share, merge)
        if not reason:
            self._verified.add(step)
        return reason

    def commit(self) -> None:
        """Write the marker files of the checkpoints that verification or loading rejected."""
        self.is_held = False
        for step, reason in self._corrupt.items():
            self.group.decide(functools.partial(_mark_corrupt, self.directory / step, reason))
        self._corrupt.clear()  # the markers stay until the steps are saved again

    def remember_corrupt(self, step: int, reason: str) -> None:
        """Record why loading rejected a checkpoint, so that `choose` rejects it too."""
        self._corrupt[step] = reason

    def document(self, step: int) -> dict[str, Any]:
        """Return the JSON next to the arrays: `meta` and the description of every array."""
        try:
            return orbax_io.read_document(self.directory / step)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"checkpoint {step} in {self.directory} has no readable meta: {one_line(error)}. "
                "Restore its files, or name another checkpoint."
            ) from error

    def load(
        self,
        step: int,
        target: Any,
        *,
        items: Collection[str] = (),
        reinit: Collection[str] = (),
        optional: Collection[str] = (),
    ) -> Any:
        """Read the leaves of `target`, verified by `config.verify`; return them in its structure.

        `step` is a checkpoint whose files were verified; `target` must cover the `items`, () = all.
        `reinit` is as in `Checkpointer.restore_params`, `optional` as in `restore`. Raises
        `MismatchError` and `CheckpointError`.
        """
        start = time.perf_counter()
        everything = pytree.leaves_of(target)
        document = self.document(step)
        stored = {
            name: entry
            for name, entry in document["arrays"].items()
            if name.partition("/")[0] in (items or pytree.ITEMS)
        }
        lacked = [name for name in optional if not any(pytree.under(n, [name]) for n in stored)]
        kept = [*reinit, *lacked]
        leaves = [leaf for leaf in everything if not pytree.under(leaf.name, kept)]
        problems = pytree.mismatches(leaves, stored, ignore=[*reinit, *optional])
        names = [*(leaf.name for leaf in everything), *stored]
        problems += [
            f"reinit_params names {prefix}, a part of neither the model nor the checkpoint. Use "
            f"one of {few(names, 8)}."
            for prefix in reinit
            if not any(pytree.under(name, [prefix]) for name in names)
        ]
        if problems:
            raise MismatchError(step, problems, document)
        entries = [stored[leaf.name] for leaf in leaves]
        arrays = self._arrays(step, leaves, entries)
        values = (pytree.restored(*each) for each in zip(leaves, arrays, entries, strict=True))
        filled = [
            leaf.value if pytree.under(leaf.name, kept) else next(values) for leaf in everything
        ]
        spent = {"seconds": time.perf_counter() - start, "bytes": sum(x.num_bytes for x in leaves)}
        self.events.event("restore", step=step, **spent)
        return jax.tree.unflatten(jax.tree.structure(target), filled)

    def _arrays(
        self, step: int, leaves: list[pytree.Leaf], entries: list[dict[str, Any]]
    ) -> list[jax.Array]:
        """Return stored arrays [...], sharded as requested, verified unless `verify` is none."""
        targets = [pytree.target_of(leaf, e) for leaf, e in zip(leaves, entries, strict=True)]
        restored = self._read(step, pytree.nest(leaves, targets))
        arrays = [pytree.pick(restored, leaf) for leaf in leaves]
        crash_point("during_restore")
        if self.config.verify == "none":
            return arrays
        check_arrays(leaves, arrays, entries)
        return arrays

    def _read(self, step: int, targets: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        path = self.directory / step
        try:
            return orbax_io.read(path, targets)
        except Exception as error:
            reason = f"it could not be read ({one_line(error)})"
            damage = ""
            try:
                damage = manifest.damage(path)
            except OSError as failure:
                self.events.log(f"checkpoint {path} could not be verified: {one_line(failure)}")
            if not damage and "DATA_LOSS" in str(error):  # TensorStore's own checksums, of a part
                damage = reason
            if not damage:  # out of memory or a stale file handle: the files are intact
                raise CheckpointError(
                    f"checkpoint {step}: {reason}, but no damaged file was seen. Start "
                    "the same command again."
                ) from error
            if self.group.num_processes == 1:
                raise CorruptCheckpoint(damage) from error
            # The other processes wait inside Orbax until this one exits, so it cannot fall back.
            # Mark the checkpoint, so that the restart by the launcher uses an older one.
            if self.read_only:
                raise CheckpointError(
                    f"checkpoint {step}: {damage}. Name another, or restore its files."
                ) from error
            _mark_corrupt(path, damage)
            raise CheckpointError(
                f"checkpoint {step}: {damage}; the next start will skip it."
            ) from error


def check_arrays(
    leaves: Sequence[pytree.Leaf], arrays: Sequence[jax.Array], entries: Sequence[dict[str, Any]]
) -> None:
    """Raise `CorruptCheckpoint` unless the arrays [...] have the stored checksums."""
    wrong = [
        leaf.name
        for leaf, checksum, entry in zip(leaves, checksums(arrays), entries, strict=True)
        if checksum != entry["checksum"]
    ]
    if wrong:
        raise CorruptCheckpoint(f"wrong checksum of {few(wrong, 3)}")


def _unknown(step: int, error: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {step} could not be checked ({error}), and nothing was marked. Start the same "
        "command again when the storage can be reached."
    )


def _mark_corrupt(checkpoint: Location, reason: str) -> None:
    if not (checkpoint / manifest.CORRUPT).exists():
        manifest.mark(checkpoint, manifest.CORRUPT, reason)
