"""Files of data: which ones a source names, on a file system or a store, and reading them.

An object of a store is read by ranges: text and lines from front to back, of Parquet the columns
that are needed. Whether it has changed its tag tells, without a read.
"""

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

from jaxdist.runtime.formatting.tables import few
from jaxdist.runtime.storage import BLOCK_BYTES, Location, is_url, locate, open_regular
from jaxdist.settings import ConfigError

_NOT_LIBRARY = {
    "__pycache__", "dist-packages", "ensurepip", "idle_test", "idlelib", "lib-dynload", "lib2to3",
    "site-packages", "test", "tests", "turtledemo",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class StoredFile:
    """An object of a store; `str` gives its URL.

    Attributes:
        num_bytes: its size when it was found.
        tag: the store's ETag of its content when it was found; "" = the store gives none.
    """

    location: Location
    num_bytes: int
    tag: str = ""

    @property
    def name(self) -> str:
        """The last part of its URL."""
        return self.location.name

    def __str__(self) -> str:
        return str(self.location)


DataFile: TypeAlias = Path | StoredFile


def library_files() -> list[Path]:
    """The `.py` files of this Python's standard library, without tests and installed packages.

    Ordered by a digest of their names, so that the held-out end is a fair sample of the library
    and not its modules from t to z.

    Raises:
        ConfigError: this Python has no library sources on disk.
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
    """The files that a source names, in an order that does not depend on the file system.

    Raises:
        ConfigError: nothing there, or a folder that mixes text with JSON lines or Parquet.
    """
    if source == "stdlib":
        return [*library_files()]
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
            f"data source {source!r} mixes kinds of files ({examples}): which of them are data "
            f"is not clear. Name one kind with a glob, e.g. {source.rstrip('/')}/**/*.parquet"
        )
    return files


def _local_files(source: str) -> list[DataFile]:
    path = Path(source).expanduser()
    if path.is_file():
        return [path]
    with read_errors(source):
        if path.is_dir():
            found = _below(path)
        elif "**" in path.parts:
            found = _matches_below(path)
        else:  # glob leaves hidden files out unless the pattern names them
            found = [Path(p) for p in glob.glob(str(path), recursive=True)]
        irregular = [str(p) for p in found if not p.is_file() and not p.is_dir()]
    if irregular:
        raise ConfigError(
            f"data source {source!r} has {few(sorted(irregular), 3)}, which is not a regular file: "
            "a broken link, a pipe, a socket or a device. Remove it, or name the files with a glob."
        )
    return [*sorted((p for p in found if p.is_file()), key=lambda p: p.as_posix())]


def _below(root: Path, *, hidden: bool = False) -> list[Path]:
    """List the files below a folder. A folder that links reach several times counts once."""

    def stop(error: OSError) -> None:
        raise error

    visited, found = set(), []
    for folder, folders, files in os.walk(root, followlinks=True, onerror=stop):
        if (real := os.path.realpath(folder)) in visited:
            folders.clear()
            continue
        visited.add(real)
        folders[:] = sorted(name for name in folders if hidden or not name.startswith("."))
        found += [Path(folder, name) for name in files if hidden or not name.startswith(".")]
    return found


def _matches_below(pattern: Path) -> list[Path]:
    """List the files that match a pattern with `**`; links that form a cycle do not repeat them."""
    fixed = list(itertools.takewhile(lambda part: not glob.has_magic(part), pattern.parts))
    root, inside = Path(*fixed), "/".join(pattern.parts[len(fixed) :])
    fits = re.compile(_regex_of(inside)).fullmatch
    found = _below(root, hidden=bool(re.search(r"(^|/)\.", inside))) if root.is_dir() else []
    return [path for path in found if fits(path.relative_to(root).as_posix())]


def _stored_files(url: str) -> list[DataFile]:
    """The object of a URL, those below it, or those that its pattern fits."""
    fixed = re.split(r"[*?[]", url)[0]
    pattern = url[len(fixed.rpartition("/")[0]) + 1 :] if fixed != url else ""
    with read_errors(url):
        place = locate(fixed.rpartition("/")[0] if pattern else url)
        found = place.tags()
        names = sorted(name for name in found if not re.search(r"(^|/)\.", name))
        if pattern:
            fits = re.compile(_regex_of(pattern)).fullmatch
            names = [name for name in names if name and fits(name)]
    return [StoredFile(place / name if name else place, *found[name]) for name in names]


def _regex_of(pattern: str) -> str:
    """A regular expression for what a pattern with *, **, ? and [...] fits, as `glob` has it."""
    words = {"**/": "(.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^]]+\])", pattern)
    return "".join(
        words.get(part) or (part.replace("[!", "[^") if part[:1] == "[" else re.escape(part))
        for part in parts
    )


def size_of(path: DataFile) -> int:
    """Bytes of a file as it is stored."""
    return path.num_bytes if isinstance(path, StoredFile) else path.stat().st_size


def open_file(path: DataFile, block_bytes: int = BLOCK_BYTES) -> BinaryIO:
    """Open a file for reading; an object is read `block_bytes` at a time."""
    if isinstance(path, StoredFile):
        return io.BufferedReader(_Ranges(path), block_bytes)
    return open_regular(path)


def open_ranges(path: DataFile) -> Any:
    """What pyarrow reads parts of a file from."""
    return _Ranges(path) if isinstance(path, StoredFile) else path


class _Ranges(io.RawIOBase):
    """An object as a file that can be read anywhere: each read is a request for its range."""

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
        wanted = min(len(buffer), self._size - self._at)
        if wanted <= 0:
            return 0
        data = self._location.part(self._at, wanted)
        if len(data) != wanted:
            raise OSError(errno.EIO, "it changed while it was read", str(self._location))
        buffer[:wanted] = data
        self._at += wanted
        return wanted


@contextlib.contextmanager
def read_errors(path: DataFile | str) -> Iterator[None]:
    """What may go wrong while a file is read, as one line that names it."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # no error of the system, but of the decompressing library
            raise ConfigError(
                f"{str(path)!r} is damaged: it cannot be decompressed ({error}). Copy it again."
            ) from None
        # A store's refusal says by itself what to do.
        fix = " Check the file and its rights, or leave it out."
        raise ConfigError(
            f"{str(path)!r} cannot be read: {error.strerror or error}."
            f"{'' if is_url(str(path)) else fix}"
        ) from None


def source_digest(files: Sequence[DataFile]) -> str:
    """A digest that is another one where the files hold something else.

    Objects of a store are told by URL, size and ETag, which a list of them gives. Files of a disk,
    and objects without an ETag, are read.
    """
    tags = [(str(f), f.num_bytes, f.tag) for f in files if isinstance(f, StoredFile) and f.tag]
    if len(tags) < len(files):
        return content_digest(files)
    return hashlib.sha256(json.dumps(tags).encode()).hexdigest()


def changed_objects(files: Iterable[DataFile], sources: Iterable[str]) -> list[str]:
    """Which objects among the files are not any more what they were; `sources` named them.

    Raises:
        ConfigError: a source has no files any more, or cannot be read.
    """
    found = {file for source in sources if is_url(source) for file in find_files(source)}
    return [str(file) for file in files if isinstance(file, StoredFile) and file not in found]


def content_digest(files: Iterable[DataFile]) -> str:
    """A digest of the files' bytes in order; names and places do not count."""
    whole = hashlib.sha256()
    for path in files:
        with read_errors(path), open_file(path) as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())  # type: ignore[arg-type]
    return whole.hexdigest()


def kind_of(path: DataFile) -> str:
    """What a file holds by its name: "lines" of JSON, "parquet", "json" or "text"."""
    suffixes = [s for s in PurePosixPath(path.name).suffixes if s not in (".gz", ".zst")]
    kinds = {".jsonl": "lines", ".ndjson": "lines", ".parquet": "parquet", ".json": "json"}
    return kinds.get(suffixes[-1].lower(), "text") if suffixes else "text"
