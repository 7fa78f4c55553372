"""Store local saves of a run on this host's disk, and choose the valid one to restore."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import uuid
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxdist.checkpoint import manifest
from jaxdist.checkpoint.events import CorruptCheckpoint
from jaxdist.runtime.formatting.tables import few
from jaxdist.runtime.storage import Location

KEPT = 2
"""Number of newest saves that `LocalStore.retain` keeps."""

DOCUMENT = "document.json"

LINEAGE_FILE = "local_tier.json"
"""File in the checkpoint directory with an id of the run, the directory's path (a copy is another
run), and the step from which each generation (start or rollback) resumed. A local save is valid
unless a later generation resumed from an earlier step."""


@dataclasses.dataclass
class Lineage:
    """Id of the run on local disks, and the step each generation resumed from (-1 = none)."""

    run: str
    resumed_from: list[int]

    @property
    def generation(self) -> int:
        """Number of the newest generation (a start or a rollback), counted from 0; -1 = none."""
        return len(self.resumed_from) - 1

    def counts(self, generation: int, step: int) -> bool:
        """Return whether a save is valid: no later generation resumed from a step before `step`."""
        exists = 0 <= generation <= self.generation
        return exists and all(step <= later for later in self.resumed_from[generation + 1 :])


def read_lineage(directory: Location, log: Callable[[str], None] = lambda line: None) -> Lineage:
    """Return the lineage of a checkpoint directory; a new one if it has none that is valid."""
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        stored = (directory / LINEAGE_FILE).json()
        lineage = Lineage(str(stored["run"]), [int(step) for step in stored["resumed_from"]])
        here = str(directory.absolute())
        if (owner := stored.get("directory", here)) == here:
            return lineage
        log(f"local saves of {owner} are not used: {here} is its copy, or was moved")
    return Lineage(uuid.uuid4().hex[:16], [])  # existing local saves are unrelated


def write_lineage(directory: Location, lineage: Lineage) -> None:
    """Store the lineage durably."""
    record = {**dataclasses.asdict(lineage), "directory": str(directory.absolute())}
    (directory / LINEAGE_FILE).write(json.dumps(record))


class Save(NamedTuple):
    """One set of shards, named by its digest, of the local save of a step in a generation."""

    generation: int
    step: int
    shards: str

    @property
    def path(self) -> str:
        """Path below `LocalStore.root`."""
        return f"{self.generation}/{self.shards}/{self.step}"


class LocalStore:
    """The local saves of one run, in the directory `root`."""

    def __init__(self, root: Location) -> None:
        self.root = root

    def held(self) -> list[Save]:
        """Return this host's saves with valid manifest and file sizes; contents are not read."""
        return [save for save in self._all() if not self._lacks(save)]

    def write(self, save: Save, files: Iterable[tuple[str, Any]], document: str) -> int:
        """Write a save from (name, buffer) pairs, its manifest last; return its size in bytes."""
        location = self._cleared(save)
        entries: dict[str, list[int]] = {}
        for name, data in (*files, (DOCUMENT, document.encode())):
            # No fsync: the page cache survives a kill; the CRC-32 detects damage by a power cut.
            (location / name).write(data, durable=False)
            entries[name] = [len(data), zlib.crc32(data)]
        manifest.write(location, save.step, entries, {})
        return sum(size for size, _ in entries.values())

    def take(self, save: Save, fetch: Callable[[str], bytes]) -> None:
        """Copy a save of another host by `fetch` (path -> content); raises `CorruptCheckpoint`."""
        location = self._cleared(save)
        try:
            files: dict[str, list[int]] = json.loads(fetch(f"{save.path}/{manifest.FILE_NAME}"))[
                "files"
            ]
        except (ValueError, KeyError, TypeError):
            raise CorruptCheckpoint(f"{manifest.FILE_NAME} of {save.path} is unreadable") from None
        for name, entry in files.items():
            data = fetch(f"{save.path}/{name}")
            if [len(data), zlib.crc32(data)] != entry:
                raise CorruptCheckpoint(f"{name} of {save.path} has other content than was written")
            (location / name).write(data, durable=False)
        manifest.write(location, save.step, files, {})

    def problem(self, save: Save) -> str:
        """Read every file of a save; return why it must not be used, or ""."""
        try:
            return manifest.damage(self._location(save))
        except OSError as error:
            return f"it cannot be read ({error.strerror})"

    def read(self, save: Save, name: str) -> bytes:
        """Return the content of one file of a save."""
        return (self._location(save) / name).read()

    def document(self, save: Save) -> Mapping[str, Any]:
        """Return the document of a save: `step`, `meta` and `arrays`."""
        return dict((self._location(save) / DOCUMENT).json())

    def delete(self, saves: Iterable[Save]) -> None:
        """Delete these saves; errors are ignored."""
        for save in saves:
            with contextlib.suppress(OSError):
                manifest.delete(self._location(save))

    def retain(self) -> None:
        """Delete all but the newest `KEPT` saves."""
        saves = self._all()
        newest = sorted({save[:2] for save in saves})[-KEPT:]
        self.delete(save for save in saves if save[:2] not in newest)

    def clean(self, lineage: Lineage) -> None:
        """Delete unfinished saves and saves that are invalid by `Lineage.counts`."""
        for generation, shards in self._sets():
            with contextlib.suppress(OSError):
                manifest.delete_partial(self.root / generation / shards)
        self.forget(lineage)

    def forget(self, lineage: Lineage) -> None:
        """Delete saves that are invalid by `Lineage.counts`."""
        self.delete(s for s in self._all() if not lineage.counts(s.generation, s.step))

    def close(self) -> None:
        """Remove the directory `root` if it is empty."""
        with contextlib.suppress(OSError):
            os.rmdir(self.root)

    def discard(self) -> None:
        """Delete all saves of the run on this host; errors are ignored."""
        with contextlib.suppress(OSError):
            self.root.delete_tree()

    def _location(self, save: Save) -> Location:
        return self.root / save.path

    def _cleared(self, save: Save) -> Location:
        location = self._location(save)
        manifest.delete(location)
        location.make_directory()
        return location

    def _lacks(self, save: Save) -> str:
        try:
            files = manifest.read(self._location(save))["files"]
            return few(manifest.size_problems(self._location(save), files), 1)
        except (ValueError, OSError) as reason:
            return str(reason) or "it is gone"

    def _sets(self) -> list[tuple[str, str]]:
        generations = [name for name in self.root.entries() if name.isdecimal()]
        return [(name, shards) for name in generations for shards in (self.root / name).entries()]

    def _all(self) -> list[Save]:
        return [
            Save(int(generation), step, shards)
            for generation, shards in self._sets()
            for step in manifest.steps_in(self.root / generation / shards)
        ]


class Selection(NamedTuple):
    """The chosen save and, per process, the process to read its shards from (itself if possible).

    If no save is complete, `sources` is empty and `reason` is why the newest was rejected ("" if
    there is none).
    """

    generation: int = 0
    step: int = 0
    sources: Sequence[int] = ()
    reason: str = ""


def newest(replies: Sequence[Sequence[Any]], at_least: int) -> Selection:
    """Return the newest save with step ≥ `at_least` whose sets of shards are all available.

    Each process replies with the shards that it needs and the `Save`s on its disk.
    """
    needs = [str(needed) for needed, _ in replies]
    disks: dict[Save, list[int]] = {}  # save -> the processes whose disk has it
    for process, (_, has) in enumerate(replies):
        for save in {Save(*each) for each in has}:
            disks.setdefault(save, []).append(process)
    reason = ""
    for generation, step in sorted({save[:2] for save in disks}, reverse=True):
        if step < at_least:
            continue
        required = [Save(generation, step, needed) for needed in needs]
        having = {save: disks.get(save, []) for save in set(required)}
        if all(having.values()):
            own = {(process, save) for save, at in having.items() for process in at}
            sources = [
                p if (p, save) in own else having[save][p % len(having[save])]
                for p, save in enumerate(required)
            ]
            return Selection(generation, step, sources)
        reason = reason or _why_not(step, required, having)
    return Selection(reason=reason)


def _why_not(step: int, required: Sequence[Save], having: Mapping[Save, Sequence[int]]) -> str:
    lacking = sum(not having[save] for save in required)
    if lacking == len(required):
        return (
            f"the local save of step {step} has another layout (mesh, processes, model or "
            "optimizer), and only the run directory can be restored onto this one"
        )
    return (
        f"the local save of step {step} is incomplete: the shards of {lacking} of "
        f"{len(required)} processes are on no disk"
    )
