"""Optimizer moments in files of a local disk.

Each process has a directory of its own in the directory that the user named, with one file per
group of parameters: a header (format, CRC-32, step), then the process's shards of the group. A
write goes to a new file that replaces the old one, so that a kill leaves the old or the new file. A
read rejects a file whose CRC-32 or step is not the expected one. The files are deleted at the end
of a run, and those of a killed process by the next run.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import struct
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxdist.checkpoint.crash_points import crash_point
from jaxdist.checkpoint.moment_store import MomentStore, Shard
from jaxdist.core.step.grouped_update import Groups
from jaxdist.runtime.formatting.numbers import in_bytes
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


class MomentFiles(MomentStore):
    """Optimizer moments in files of `directory`, one file per parameter group."""

    def __init__(self, groups: Groups, directory: str):
        super().__init__(groups)
        self.directory = Path(directory)
        self._finalize: Callable[[], None] = lambda: None
        self._own: Path | None = None

    def close(self) -> None:
        """Delete the files."""
        self._finalize()

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
        sizes = [sum(shard.num_bytes for shard in group) for group in self.shards]
        needed, free = 2 * sum(sizes) + max(sizes), shutil.disk_usage(self.directory).free
        if free < needed:
            raise ConfigError(
                f"{name}: moments of a process take {in_bytes(sum(sizes))}, with the copies "
                f"during writes {in_bytes(needed)}, and {in_bytes(free)} are free. Free some, or "
                "name a directory of another disk."
            )

    def read(self, group: int, step: int) -> list[np.ndarray]:
        """Return the shards [...] of a group after `step` steps; raises `DamagedMoments`."""
        return _read(self._file(group), self.shards[group], step)

    def put(self, group: int, step: int, shards: Sequence[np.ndarray]) -> None:
        """Replace the shards [...] of a group by those after `step` steps."""
        os.replace(self._write_new(group, step, shards), self._file(group))

    def write(self, group: int, step: int, shards: Sequence[np.ndarray]) -> None:
        """Replace the shards [...] of a group by those after `step` steps."""
        new = self._write_new(group, step, shards)
        crash_point("during_moments")
        os.replace(new, self._file(group))

    def take_snapshot(self, step: int) -> list[Callable[[], list[np.ndarray]]]:
        """Keep the files of this step as links to read shards [...]; replaces the last snapshot."""
        folder = self._file(0).parent / "snapshot"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        files = [folder / self._file(group).name for group in range(len(self.shards))]
        for group, file in enumerate(files):
            os.link(self._file(group), file)

        def take(group: int) -> list[np.ndarray]:
            """Return the shards [...] of a group, and delete its link."""
            shards = _read(files[group], self.shards[group], step)
            files[group].unlink()
            return shards

        return [functools.partial(take, group) for group in range(len(files))]

    def _file(self, group: int) -> Path:
        if self._own is None:
            with _locked(self.directory):  # nobody may delete the directory before it is locked
                self._own = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self.directory))
                lock = os.open(self._own, os.O_RDONLY)
                fcntl.flock(lock, fcntl.LOCK_EX)
            self._finalize = weakref.finalize(self, _delete, self._own, lock, os.getpid())
        return self._own / f"group-{group}"

    def _write_new(self, group: int, step: int, shards: Sequence[np.ndarray]) -> Path:
        """Write the shards [...] of a group durably to a new file; return its path."""
        new = self._file(group).with_suffix(".new")
        data: list[Any] = [np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in shards]
        with open(new, "wb", buffering=0) as file:
            for block in (_HEADER.pack(_FORMAT, _crc_of(step, data), step), *data):
                view = memoryview(block)
                while len(view):
                    view = view[file.write(view) :]
            os.fdatasync(file.fileno())
            _drop_pages(file.fileno())
        return new


def _read(file: Path, shards: Sequence[Shard], step: int) -> list[np.ndarray]:
    """Return the shards [...] in a file; `DamagedMoments` if it is not intact and of `step`."""
    data: Any = np.empty(sum(shard.num_bytes for shard in shards), np.uint8)
    length = 0
    with open(file, "rb", buffering=0) as opened:
        header = opened.read(_HEADER.size)
        while count := opened.readinto(memoryview(data)[length:]):
            length += count
        _drop_pages(opened.fileno())
        is_longer = bool(opened.read(1))
    if len(header) < _HEADER.size or length < len(data) or is_longer:
        raise DamagedMoments(f"{file} has another size than its moments: it is damaged")
    kind, crc, stored_step = _HEADER.unpack(header)
    if kind != _FORMAT or crc != _crc_of(stored_step, [data]):
        raise DamagedMoments(f"{file} does not match its CRC-32: it is damaged")
    if stored_step != step:
        raise DamagedMoments(
            f"{file} has moments of step {stored_step}, and the state is of step {step}"
        )
    ends = np.cumsum([shard.num_bytes for shard in shards])
    pieces = np.split(data, ends[:-1])
    return [
        piece.view(shard.dtype).reshape(shard.shape)
        for piece, shard in zip(pieces, shards, strict=True)
    ]


def _crc_of(step: int, data: Sequence[Any]) -> int:
    crc = zlib.crc32(struct.pack("<q", step))
    for block in data:
        crc = zlib.crc32(block, crc)
    return crc


def _drop_pages(file: int) -> None:
    """Free the page cache of a file: the next read of its group is a complete step away."""
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


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
