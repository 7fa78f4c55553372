"""Find and read data files: on a file system, in ranges on an object store, or from the hub."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import glob
import hashlib
import io
import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, TypeAlias

from jaxdist.data.hub_sets import HubFile, hub_files, is_hub_set, regex_of
from jaxdist.runtime.formatting.tables import few
from jaxdist.runtime.storage import BLOCK_BYTES, Location, is_url, locate, open_regular
from jaxdist.settings import ConfigError

_NOT_LIBRARY = {
    "__pycache__", "dist-packages", "ensurepip", "idle_test", "idlelib", "lib-dynload", "lib2to3",
    "site-packages", "test", "tests", "turtledemo",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """An object of a store; `str` returns its URL, `tag` is its ETag when listed ("" = none)."""

    location: Location
    num_bytes: int
    tag: str = ""

    @property
    def name(self) -> str:
        """Last part of its URL."""
        return self.location.name

    def __str__(self) -> str:
        return str(self.location)


DataFile: TypeAlias = Path | StoredFile | HubFile


def library_files() -> list[Path]:
    """Return the `.py` files of Python's standard library, without tests, idlelib and the like.

    Ordered by a digest of their names, so that the held-out end is a random sample.
    """
    import sysconfig

    root = Path(sysconfig.get_path("stdlib"))
    names = []
    for folder, folders, files in os.walk(root):
        folders[:] = [f for f in folders if f not in _NOT_LIBRARY and not f.startswith("config-")]
        inside = Path(folder).relative_to(root)
        names += [inside / file for file in files if file.endswith(".py")]
    if not names:
        raise ConfigError(
            f'data.sources has "stdlib", but {str(root)!r} holds no .py files (a zipped or '
            "compiled Python). Give a text file or folder of your own."
        )
    digest = lambda name: hashlib.sha256(name.as_posix().encode()).hexdigest()
    return [root / name for name in sorted(names, key=digest)]


def find_files(source: str) -> list[DataFile]:
    """Return the files of a source, in an order independent of the file system."""
    if source == "stdlib":
        return [*library_files()]
    if is_hub_set(source):
        return [*hub_files(source)]
    files = _stored_files(source) if is_url(source) else _local_files(source)
    if not files:
        kind = (
            "is a folder without files" if Path(source).expanduser().is_dir() else "matches no file"
        )
        raise ConfigError(f"data source {source!r} {kind}. Check the path.")
    kinds = {kind_of(p) for p in files}
    if len(kinds) > 1:
        examples = ", ".join(next(p.name for p in files if kind_of(p) == k) for k in sorted(kinds))
        raise ConfigError(
            f"data source {source!r} mixes kinds of files ({examples}): the data "
            f"are ambiguous. Select one kind with a glob, e.g. {source.rstrip('/')}/**/*.parquet"
        )
    return files


def _local_files(source: str) -> list[DataFile]:
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    with read_errors(source):
        if path.is_dir():
            paths = _below(path)
        elif "**" in path.parts:
            paths = _matches_below(path)
        else:  # glob skips hidden files unless the pattern has them
            paths = [Path(p) for p in glob.glob(str(path), recursive=True)]
        irregular = [str(p) for p in paths if not p.is_file() and not p.is_dir()]
    if irregular:
        raise ConfigError(
            f"data source {source!r} has {few(sorted(irregular), 3)}, which is not a regular file: "
            "a broken link, a pipe, a socket or a device. Remove it, or select files with a glob."
        )
    return [*sorted((p for p in paths if p.is_file()), key=lambda p: p.as_posix())]


def _below(root: Path, *, hidden: bool = False) -> list[Path]:
    """List the files below a folder; a folder that several links reach counts once."""

    def stop(error: OSError) -> None:
        raise error

    visited, paths = set(), []
    for folder, folders, files in os.walk(root, followlinks=True, onerror=stop):
        if (real := os.path.realpath(folder)) in visited:
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if hidden or not name.startswith("."))
        paths += [Path(folder, name) for name in files if hidden or not name.startswith(".")]
    return paths


def _matches_below(pattern: Path) -> list[Path]:
    fixed = list(itertools.takewhile(lambda part: not glob.has_magic(part), pattern.parts))
    root, inside = Path(*fixed), "/".join(pattern.parts[len(fixed) :])
    fits = re.compile(regex_of(inside)).fullmatch
    paths = _below(root, hidden=bool(re.search(r"(^|/)\.", inside))) if root.is_dir() else []
    return [path for path in paths if fits(path.relative_to(root).as_posix())]


def _stored_files(url: str) -> list[DataFile]:
    fixed = re.split(r"[*?[]", url)[0]
    pattern = url[len(fixed.rpartition("/")[0]) + 1 :] if fixed != url else ""
    with read_errors(url):
        location = locate(fixed.rpartition("/")[0] if pattern else url)
        tags = location.tags()
        names = sorted(name for name in tags if not re.search(r"(^|/)\.", name))
        if pattern:
            fits = re.compile(regex_of(pattern)).fullmatch
            names = [name for name in names if name and fits(name)]
    return [StoredFile(location / name if name else location, *tags[name]) for name in names]


def size_of(path: DataFile) -> int:
    """Return the stored size of a file in bytes."""
    return path.stat().st_size if isinstance(path, Path) else path.num_bytes


def open_file(path: DataFile, block_bytes: int = BLOCK_BYTES) -> BinaryIO:
    """Open a file for reading; an object is read `block_bytes` at a time."""
    if isinstance(path, StoredFile):
        return io.BufferedReader(_Ranges(path), block_bytes)
    return open_regular(path.download() if isinstance(path, HubFile) else path)


def open_ranges(path: DataFile) -> Any:
    """Return a path, or a file object for a stored object, as input for pyarrow."""
    if isinstance(path, StoredFile):
        return _Ranges(path)
    return path.download() if isinstance(path, HubFile) else path


class _Ranges(io.RawIOBase):
    """A seekable file of a stored object; each read is one range request."""

    def __init__(self, file: StoredFile) -> None:
        self._location, self._size, self._at = file.location, file.num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        length = min(len(buffer), self._size - self._at)
        if length <= 0:
            return 0
        data = self._location.part(self._at, length)
        if len(data) != length:
            raise OSError(errno.EIO, "the file changed while it was read", str(self._location))
        buffer[:length] = data
        self._at += length
        return length


@contextlib.contextmanager
def read_errors(path: DataFile | str) -> Iterator[None]:
    """In this block, convert errors of reading a file to a one-line `ConfigError` with its name."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # from the decompressing library
            raise ConfigError(
                f"{str(path)!r} is damaged: it cannot be decompressed ({error}). Copy it again."
            ) from None
        # Errors of a store include their fix.
        fix = " Check the file and its permissions, or exclude it."
        raise ConfigError(
            f"{str(path)!r} cannot be read: {error.strerror or error}."
            f"{'' if is_url(str(path)) else fix}"
        ) from None


def source_digest(files: Sequence[DataFile]) -> str:
    """Return a digest that changes with the content of the files.

    It covers URL, size and ETag of objects, and path, size and digest of files on the hub. If a
    file is local or has no ETag, all files are read instead.
    """
    stored = [f for f in files if not isinstance(f, Path) and f.tag]
    tags = [(f.path if isinstance(f, HubFile) else str(f), f.num_bytes, f.tag) for f in stored]
    if len(tags) < len(files):
        return content_digest(files)
    return hashlib.sha256(json.dumps(tags).encode()).hexdigest()


def changed_objects(files: Iterable[DataFile], sources: Iterable[str]) -> list[str]:
    """Return the URLs of the objects among `files` that a new listing of `sources` lacks."""
    current = {file for source in sources if is_url(source) for file in find_files(source)}
    return [str(file) for file in files if isinstance(file, StoredFile) and file not in current]


def content_digest(files: Iterable[DataFile]) -> str:
    """Return a digest of the files' bytes in order, independent of their names."""
    digest = hashlib.sha256()
    for path in files:
        with read_errors(path), open_file(path) as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())  # type: ignore[arg-type]
    return digest.hexdigest()


def kind_of(path: DataFile) -> str:
    """Return the kind of a file: "lines" of JSON, "parquet", "json", "tar" or "text"."""
    suffixes = [s for s in PurePosixPath(path.name).suffixes if s not in (".gz", ".zst")]
    kinds = {".jsonl": "lines", ".ndjson": "lines", ".parquet": "parquet"}
    kinds |= {".json": "json", ".tar": "tar"}
    return kinds.get(suffixes[-1].lower(), "text") if suffixes else "text"
