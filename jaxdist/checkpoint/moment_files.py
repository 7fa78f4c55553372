"""Optimizer moments in files of a local disk, and their way to checkpoints and back.

Each process has a directory of its own in the directory that the user named, with one file per
group of parameters: a header (format, CRC-32, step), then the group's part of each moment. A write
goes to a new file that replaces the old one, so that a kill leaves the old or the new file. A read
rejects a file whose CRC-32 or step is not the expected one. The files are deleted at the end of a
run, and those of a killed process by the next one. Checkpoints have the moments as ordinary
arrays, so that a run may resume with its moments in another memory or on another mesh.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import struct
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxdist.checkpoint import orbax_io, pytree
from jaxdist.checkpoint.blocks import Index, dtype_of, even_chunk
from jaxdist.checkpoint.checksum import part_checksum
from jaxdist.checkpoint.crash_points import crash_point
from jaxdist.checkpoint.events import CorruptCheckpoint, MismatchError
from jaxdist.checkpoint.streaming_io import StoredArrays
from jaxdist.core.step.grouped_update import Groups
from jaxdist.runtime.formatting.numbers import in_bytes
from jaxdist.runtime.storage import Location
from jaxdist.settings import ConfigError

_HEADER = struct.Struct("<4sIq")  # format, CRC-32 of step and moments, step
_FORMAT = b"JDM1"
_PREFIX = "jaxdist-moments-"


class DamagedMoments(RuntimeError):
    """Raised for a file of optimizer moments that is incomplete, damaged or of another step."""

    advice = (
        "check the disk of train.offload_optimizer, and that no other program writes there; then "
        "start the same command again: the run resumes from its newest checkpoint, which has all "
        "moments"
    )


class MomentPart(NamedTuple):
    """A parameter group's part of an optimizer moment: leaf of the train state, and slices."""

    leaf: pytree.Leaf
    slices: Index

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the part."""
        return tuple(s.stop - s.start for s in self.slices)

    @property
    def num_bytes(self) -> int:
        """Return the size of the part in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.leaf.value.dtype.itemsize


class MomentFiles:
    """Optimizer moments in files of `directory`, one file per parameter group.

    `groups` has the parts of each group. No file exists before `fill_zeros` or `load`.
    """

    def __init__(self, directory: str, groups: Sequence[Sequence[MomentPart]]):
        self.directory, self.groups = Path(directory), groups
        self.leaves = list({part.leaf.name: part.leaf for g in groups for part in g}.values())
        self.num_bytes = sum(leaf.num_bytes for leaf in self.leaves)
        self.close: Callable[[], None] = lambda: None  # deletes the files
        self._own: Path | None = None

    @classmethod
    def of(cls, groups: Groups, directory: str) -> MomentFiles:
        """Return the files of the moments of a train step, one per group of parameters."""
        leaves = [x for x in pytree.leaves_of(groups.state) if x.item == "opt_state"]
        parts = [
            [MomentPart(leaves[i], group.slices(leaves[i].value)) for i in groups.leaves(group)]
            for group in groups.groups
        ]
        return cls(directory, parts)

    def check(self) -> None:
        """Delete files of killed processes; `ConfigError` if the disk is unwritable or too full."""
        name = f"train.offload_optimizer=disk:{self.directory}"
        if not self.directory.is_dir() or not os.access(self.directory, os.W_OK | os.X_OK):
            raise ConfigError(
                f"{name}: this is not a directory where files can be written. Create it on a local "
                "disk, or name another."
            )
        with _locked(self.directory):
            for left in self.directory.glob(f"{_PREFIX}*"):
                with contextlib.suppress(OSError), _locked(left, wait=False):
                    shutil.rmtree(left)
        largest = max(sum(part.num_bytes for part in group) for group in self.groups)
        needed, free = 2 * self.num_bytes + largest, shutil.disk_usage(self.directory).free
        if free < needed:
            raise ConfigError(
                f"{name}: moments take {in_bytes(self.num_bytes)}, twice while a checkpoint is "
                f"written, in all {in_bytes(needed)}, and {in_bytes(free)} are free. Free some, or "
                "name a directory of another disk."
            )

    def fill_zeros(self) -> None:
        """Write zeros, the moments of a new run at step 0."""
        for number, group in enumerate(self.groups):
            zeros = [np.zeros(part.shape, part.leaf.value.dtype) for part in group]
            self._replace(number, self._write_new(number, 0, zeros))

    def load(self, stored: StoredArrays, step: int) -> None:
        """Copy the moments of a checkpoint, verified; other stored dtypes are cast.

        Raises `MismatchError` for missing moments and other shapes, and `CorruptCheckpoint`.
        """
        entries = {leaf.name: stored.entries.get(leaf.name) for leaf in self.leaves}
        present: Any = {name: entry for name, entry in entries.items() if entry is not None}
        if problems := pytree.mismatches(self.leaves, present):
            raise MismatchError(step, problems, stored.document)
        sums = dict.fromkeys(present, 0)
        for number, group in enumerate(self.groups):
            moments = []
            for part in group:
                name, dtype = part.leaf.name, part.leaf.value.dtype
                values = stored.gather(name, part.slices)
                sums[name] += part_checksum(values, _start(part), present[name]["shape"])
                moments.append(values.astype(dtype, copy=False))
            self._replace(number, self._write_new(number, step, moments))
        wrong = [name for name in sums if sums[name] % 2**32 != present[name]["checksum"]]
        if wrong:
            raise CorruptCheckpoint(f"wrong checksum of {wrong[0]} in {stored.checkpoint}")

    def read(self, group: int, step: int) -> list[np.ndarray]:
        """Return a group's moments, each [part], after `step` steps; raises `DamagedMoments`."""
        return _read(self._file(group), self.groups[group], step)

    def write(self, group: int, step: int, moments: Sequence[np.ndarray]) -> None:
        """Replace the optimizer moments [part] of a group by those after `step` steps."""
        new = self._write_new(group, step, moments)
        crash_point("during_moments")
        self._replace(group, new)

    def snapshot(self, step: int) -> Snapshot:
        """Keep the files of this step for a checkpoint, as links; replaces the last snapshot."""
        folder = self._file(0).parent / "snapshot"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        files = [folder / self._file(group).name for group in range(len(self.groups))]
        for group, file in enumerate(files):
            os.link(self._file(group), file)
        return Snapshot(self, files, step)

    def _file(self, group: int) -> Path:
        if self._own is None:
            with _locked(self.directory):  # nobody may delete the directory before it is locked
                self._own = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self.directory))
                lock = os.open(self._own, os.O_RDONLY)
                fcntl.flock(lock, fcntl.LOCK_EX)
            self.close = weakref.finalize(self, _delete, self._own, lock, os.getpid())
        return self._own / f"group-{group}"

    def _write_new(self, group: int, step: int, moments: Sequence[np.ndarray]) -> Path:
        """Write the moments [part] of a group durably to a new file; return its path."""
        new = self._file(group).with_suffix(".new")
        data: list[Any] = [
            np.ascontiguousarray(moment).reshape(-1).view(np.uint8) for moment in moments
        ]
        with open(new, "wb", buffering=0) as file:
            for block in (_HEADER.pack(_FORMAT, _crc_of(step, data), step), *data):
                view = memoryview(block)
                while len(view):
                    view = view[file.write(view) :]
            os.fdatasync(file.fileno())
            _drop_pages(file.fileno())
        return new

    def _replace(self, group: int, new: Path) -> None:
        os.replace(new, self._file(group))


class Snapshot:
    """Links to the moment files of one step; they stay while later steps replace the files."""

    def __init__(self, moments: MomentFiles, files: Sequence[Path], step: int):
        self._moments, self._files, self._step = moments, files, step

    def add_to(self, checkpoint: Location, document: dict[str, Any]) -> None:
        """Write the moments, and `document` with their entries, to a checkpoint; delete links."""
        rows: dict[str, tuple[int, ...]] = {}
        for part in self._parts():
            rows.setdefault(part.leaf.name, part.shape)  # the first part is the largest
        arrays = [leaf.value for leaf in self._moments.leaves]
        entries = pytree.describe(self._moments.leaves, arrays)
        sums, handles = dict.fromkeys(entries, 0), {}
        for leaf in self._moments.leaves:
            dtype = dtype_of(leaf.value.dtype.name)
            chunk = even_chunk(rows[leaf.name], dtype.itemsize, orbax_io.CHUNK_BYTES)
            create = {"shape": leaf.value.shape, "chunks": chunk, "dtype": dtype}
            handles[leaf.name] = orbax_io.open_array(checkpoint, leaf.item, leaf.path, create)
        for group, file in zip(self._moments.groups, self._files, strict=True):
            for part, values in zip(group, _read(file, group, self._step), strict=True):
                name = part.leaf.name
                handles[name].write(part.slices, values)
                sums[name] += part_checksum(values, _start(part), part.leaf.value.shape)
            file.unlink()
        checksums = [total % 2**32 for total in sums.values()]
        document["arrays"] |= pytree.with_checksums(entries, checksums)
        orbax_io.write_frame(checkpoint, document)

    def _parts(self) -> Iterator[MomentPart]:
        return (part for group in self._moments.groups for part in group)


def _read(file: Path, parts: Sequence[MomentPart], step: int) -> list[np.ndarray]:
    """Return the moments [part] in a file of `step`; raises `DamagedMoments` for any other file."""
    data: Any = np.empty(sum(part.num_bytes for part in parts), np.uint8)
    length = 0
    with open(file, "rb", buffering=0) as opened:
        header = opened.read(_HEADER.size)
        while count := opened.readinto(memoryview(data)[length:]):
            length += count
        _drop_pages(opened.fileno())
        is_longer = bool(opened.read(1))
    if len(header) < _HEADER.size or length < len(data) or is_longer:
        raise DamagedMoments(f"{file} has another size than its moments: it is torn")
    kind, crc, stored_step = _HEADER.unpack(header)
    if kind != _FORMAT or crc != _crc_of(stored_step, [data]):
        raise DamagedMoments(f"{file} does not match its CRC-32: it is torn")
    if stored_step != step:
        raise DamagedMoments(
            f"{file} has moments of step {stored_step}, and the state is of step {step}"
        )
    ends = np.cumsum([part.num_bytes for part in parts])
    pieces = np.split(data, ends[:-1])
    return [
        piece.view(part.leaf.value.dtype).reshape(part.shape)
        for piece, part in zip(pieces, parts, strict=True)
    ]


def _crc_of(step: int, data: Sequence[Any]) -> int:
    crc = zlib.crc32(struct.pack("<q", step))
    for block in data:
        crc = zlib.crc32(block, crc)
    return crc


def _drop_pages(file: int) -> None:
    """Free the page cache of a file: the next read of its group is a complete step away."""
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def _start(part: MomentPart) -> list[int]:
    return [s.start for s in part.slices]


@contextlib.contextmanager
def _locked(directory: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a lock on a directory against other processes during a `with` block.

    If another process holds it: wait, or raise `BlockingIOError` if `wait` is False.
    """
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(handle)


def _delete(directory: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:  # not in a forked process
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)
