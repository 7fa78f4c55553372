"""Files on Amazon S3, Google Cloud Storage or what speaks S3, through `obstore`.

A directory exists while it has entries. A file that grows (`appender`) is a folder of objects
`part-…` (`parts`), which readers receive joined.

Credentials, region and endpoint come from the environment. Errors name the server's code only:
its text may repeat parts of a request.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import functools
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

from jaxdist.runtime.storage.location import BLOCK_BYTES, Appender, Location, Locked, LockFile
from jaxdist.runtime.storage.panics import panics_as
from jaxdist.runtime.storage.parts import PartAppender, part_of, spool

_STORES = {"s3": "S3Store", "gs": "GCSStore"}
_EXTRAS = {"s3": "s3", "gs": "gcs"}
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, the path of a key file",
}
REQUESTS = 16
"""To make of an object store at a time: each waits for the network more than for a core."""

# Google takes an object of any size in one request, and no invisible parts can be left there.
_ONE_REQUEST_BYTES = {"s3": 64 << 20, "gs": sys.maxsize}
_RENEWED = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_BEARER_TOKEN",
}
_CONNECT = {"allow_http": True, "connect_timeout": "5s"}
_SILENCE_S = 30  # then a request is repeated; a large upload gets time by its size
_SILENT_TRIES_S = 60  # until none is made again: a server that is gone keeps nobody for longer
_BUSY_TRIES_S = 180  # the same where the server answers that it is busy (5xx): it is there
_QUICK_BYTES, _SLOWEST_BYTES_PER_S = 1 << 20, 128 << 10
_DENIED = (401, 403)
_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired")


def is_url(path: str | os.PathLike[str]) -> bool:
    """Whether this is a URL and no path of a file system."""
    return bool(re.match("[a-z][a-z0-9+]*:/", os.fspath(path)))  # Path makes s3:/ of s3://


def canonical(path: str | os.PathLike[str]) -> str:
    """The URL with two slashes behind its scheme and none at its end."""
    return re.sub("^([a-z0-9+]+):/+(.*?)/*$", r"\1://\2", os.fspath(path))


def problem_of(url: str | os.PathLike[str]) -> str:
    """Why a URL cannot be used; "" when its bucket answers. Asked once for each bucket.

    Raises:
        OSError: the server cannot be reached; another time it may.
    """
    url = canonical(url)
    scheme, _, rest = url.partition("://")
    bucket = rest.partition("/")[0]
    if scheme not in _STORES:
        known = " or ".join(f"{name}://BUCKET/PATH" for name in _STORES)
        return f"{url!r} is a URL of a kind that is not known. Use a path, or {known}."
    if not bucket:
        return f"{url!r} names no bucket. Use {scheme}://BUCKET/PATH."
    try:
        _reach(scheme, bucket)
    except ModuleNotFoundError:
        extra = _EXTRAS[scheme]
        return f"{url!r} needs a library that is not installed: pip install 'jaxdist[{extra}]'."
    except OSError as error:
        if error.errno not in (errno.ENXIO, errno.EACCES):
            raise
        return f"{url!r} cannot be used: {error.strerror}."
    return ""


@functools.cache
def _reach(scheme: str, bucket: str) -> None:
    """Ask a bucket for its first names."""
    import obstore

    with _told(f"{scheme}://{bucket}"):
        probe = _make_store(scheme, bucket, max_retries=1)
        next(iter(obstore.list(probe, chunk_size=1)), None)


@functools.cache
def _store(scheme: str, bucket: str, silence_s: int) -> Any:
    return _make_store(scheme, bucket, max_retries=10, silence_s=silence_s)


def _make_store(scheme: str, bucket: str, *, max_retries: int, silence_s: int = _SILENCE_S) -> Any:
    from obstore import store

    whole_s = max(600, 2 * silence_s)
    limits = {"read_timeout": f"{silence_s}s", "timeout": f"{whole_s}s"}
    tries_s = datetime.timedelta(seconds=_SILENT_TRIES_S)
    return getattr(store, _STORES[scheme])(
        bucket,
        client_options={**_CONNECT, **limits},
        retry_config={"max_retries": max_retries, "retry_timeout": tries_s},
    )


def _silence_of_upload(num_bytes: int) -> int:
    """Seconds until an upload of so many bytes is given up; a few values, each of them a client."""
    if num_bytes <= _QUICK_BYTES:
        return _SILENCE_S
    return _SILENCE_S + (1 << (num_bytes - 1).bit_length()) // _SLOWEST_BYTES_PER_S


@contextlib.contextmanager
def _told(url: str) -> Iterator[None]:
    """Translate errors of `obstore` to an `OSError` of one line, and its panics to `ConfigError`.

    It panics if the environment holds a malformed endpoint URL, region or key.
    """
    import obstore

    problem = (
        f"{url!r} cannot be used: a value in the environment is malformed ({{}}). Correct the "
        f"endpoint (AWS_ENDPOINT_URL), the region or {_CREDENTIALS[url.partition(':')[0]]}."
    )
    try:
        with panics_as(problem):
            yield
    except (FileNotFoundError, PermissionError) as error:
        raise _as_os_error(error, url) from None
    except obstore.exceptions.BaseError as error:
        if isinstance(error, _conflicts()):
            raise
        raise _as_os_error(error, url) from None


def _conflicts() -> tuple[type[Exception], ...]:
    """What a conditional write raises when the object is another than was expected."""
    from obstore import exceptions

    return exceptions.AlreadyExistsError, exceptions.PreconditionError


def _as_os_error(error: Exception, url: str) -> OSError:
    text, scheme = str(error), url.partition(":")[0]
    code = next(iter(re.findall(r"<Code>(\w+)</Code>", text)), "")
    status = int(next(iter(re.findall(r"status code: (\d+)", text)), 0))
    said = " ".join(filter(None, [str(status or ""), code]))
    # Where none are set, the machine's own are asked for.
    if re.search("/latest/(api|meta-data)|/computeMetadata/|Missing(AccessKey|Secret)", text):
        what = f"no credentials were found: set {_CREDENTIALS[scheme]}"
        return OSError(errno.EACCES, what, url)
    if code == "NoSuchBucket":
        return OSError(errno.ENXIO, "there is no such bucket", url)
    if code in _EXPIRED:
        what = f"the credentials have expired ({said}): put new ones into {_RENEWED[scheme]}"
        return OSError(errno.EACCES, what, url)
    if status in _DENIED or isinstance(error, PermissionError):
        what = f"access is denied ({said}): {_RENEWED[scheme]} may be wrong, expired or without "
        return OSError(errno.EACCES, f"{what}a right to this", url)
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url)
    if "response body" in text:
        return ConnectionResetError(errno.ECONNRESET, "the answer was cut short", url)
    if not status:
        return OSError(errno.EHOSTUNREACH, "the object store cannot be reached", url)
    kind = _Busy if status >= 500 or status == 429 else OSError
    return kind(errno.EIO, f"the object store refuses ({said})", url)


class _Busy(OSError):
    """The server answered that it cannot answer now."""


@dataclasses.dataclass(frozen=True)
class ObjectLocation(Location):
    """One object, or all that lies below a prefix; `str` and `os.fspath` give its URL."""

    is_local: ClassVar[bool] = False

    @property
    def parent(self) -> Self:
        """The prefix that this lies below; that of a bucket is the bucket."""
        if not self._key:
            return self
        return dataclasses.replace(self, path=self.path.rpartition("/")[0])

    def absolute(self) -> Self:
        """The same place: a URL does not depend on the working directory."""
        return self

    def uri(self) -> str:
        """The URL."""
        return self.path

    def entries(self) -> list[str]:
        """Names directly below, sorted; [] where there is nothing."""
        import obstore

        found = self._ask(lambda: obstore.list_with_delimiter(self._bucket, self._key or None))
        paths = [*found["common_prefixes"], *(meta["path"] for meta in found["objects"])]
        return sorted({path.rstrip("/").rpartition("/")[2] for path in paths})

    def files(self) -> list[str]:
        """Every file below, by its path relative to this place, sorted."""
        return sorted(self.sizes())

    def sizes(self) -> dict[str, int]:
        """Bytes of every file below, by its path relative to this place."""
        found: dict[str, int] = {}
        for meta in self._below():
            name = part_of(meta["path"].removeprefix(self._key).lstrip("/"))[0]
            found[name] = found.get(name, 0) + meta["size"]
        return found

    def tags(self) -> dict[str, tuple[int, str]]:
        """Bytes and ETag of every file below, or of the object of this name, with the path ""."""
        found: dict[str, tuple[int, str]] = {}
        for meta in self._below():
            name, is_part = part_of(meta["path"].removeprefix(self._key).lstrip("/"))
            size = found[name][0] if name in found else 0
            found[name] = (size + meta["size"], "" if is_part else meta["e_tag"] or "")
        if not found:
            with contextlib.suppress(FileNotFoundError):
                meta = self._head()
                found[""] = (meta["size"], meta["e_tag"] or "")
        return found

    def exists(self) -> bool:
        """Whether there is an object, or any below."""
        try:
            self._head()
        except FileNotFoundError:
            return self.is_directory()
        return True

    def is_directory(self) -> bool:
        """Whether anything lies below."""
        import obstore

        listing = lambda: obstore.list(self._bucket, prefix=self._key or None, chunk_size=1)
        return bool(self._ask(lambda: next(iter(listing()), None)))

    def size(self) -> int:
        """Bytes of the file."""
        try:
            return self._head()["size"]
        except FileNotFoundError:
            return sum(meta["size"] for meta in self._parts())

    def version(self) -> int:
        """When the file was last written, in ns; the clock of most stores has whole seconds."""
        try:
            try:
                found = [self._head()]
            except FileNotFoundError:
                found = self._parts()
        except OSError:
            return 0
        return max(int(meta["last_modified"].timestamp() * 1e9) for meta in found)

    def free_bytes(self) -> int:
        """An object store is never full."""
        return sys.maxsize

    def read(self) -> bytes:
        """All of the file."""
        try:
            return self._get(self._key)[0]
        except FileNotFoundError:
            return b"".join(self._get(meta["path"])[0] for meta in self._parts())

    def stream(self) -> Iterator[bytes]:
        """The file in blocks of `BLOCK_BYTES`, a request each: a cut connection costs one."""
        try:
            size = self._head()["size"]
        except FileNotFoundError:
            for meta in self._parts():
                yield self._get(meta["path"])[0]
            return
        for start in range(0, size, BLOCK_BYTES):
            yield self.part(start, min(BLOCK_BYTES, size - start))

    def blocks_backward(self) -> Iterator[bytes]:
        """Yield the file in blocks, the last block first; a file that grew, one part at a time."""
        try:
            self._head()
        except FileNotFoundError:
            for meta in reversed(self._parts()):
                yield self._get(meta["path"])[0]
        else:
            yield from super().blocks_backward()

    def part(self, start: int, length: int) -> bytes:
        """That many bytes of the object from `start` on."""
        import obstore

        bucket, key = self._bucket, self._key
        return self._ask(lambda: bytes(obstore.get_range(bucket, key, start=start, length=length)))

    def write(self, data: str | bytes | memoryview, *, durable: bool = True) -> None:
        """Make or replace the object; it is durable in any case."""
        import obstore

        content = data.encode() if isinstance(data, str) else data
        scheme, bucket, key = self._place
        most = _ONE_REQUEST_BYTES[scheme]
        store = _store(scheme, bucket, _silence_of_upload(min(len(content), most)))
        self._ask(lambda: obstore.put(store, key, content, use_multipart=len(content) > most))

    def create(self) -> bool:
        """Make the object, empty; False where there is one already."""
        try:
            self._put_if(b"", "create")
        except _conflicts():
            return False
        return True

    def appender(self) -> Appender:
        """The file, open for appending; made if absent."""
        return PartAppender(self, self._next_part())

    def append_descriptor(self) -> int:
        """A descriptor of a local file that is copied here every few seconds and at the end."""
        return spool(self, self._next_part)

    def lock(self) -> LockFile:
        """Open the lock file; who may have it is told by its content alone."""
        return ObjectLock(self)

    def make_directory(self) -> None:
        """Nothing: directories are not made here."""

    def missing(self) -> list[Self]:
        """Return []: an object store has no directories."""
        return []

    def delete(self) -> None:
        """Delete the object; nothing without one."""
        import obstore

        with contextlib.suppress(FileNotFoundError):
            self._ask(lambda: obstore.delete(self._bucket, self._key))

    def delete_tree(self) -> None:
        """Delete all that lies below, and the object of this name."""
        import obstore

        while paths := [meta["path"] for meta in self._below()]:
            try:
                self._ask(functools.partial(obstore.delete, self._bucket, paths))
                break
            except FileNotFoundError:
                # Google refuses to delete what is gone, by another process or by a try whose answer
                # was lost, and what follows is not deleted then: the next list names it.
                continue
        self.delete()

    # -- one request each --------------------------------------------------------------------------

    @property
    def _place(self) -> tuple[str, str, str]:
        scheme, _, rest = self.path.partition("://")
        bucket, _, key = rest.partition("/")
        return scheme, bucket, key

    @property
    def _bucket(self) -> Any:
        return _store(*self._place[:2], _SILENCE_S)

    @property
    def _key(self) -> str:
        return self._place[2]

    def _ask(self, request: Callable[[], Any]) -> Any:
        """A request that may be made twice, and is where the store is busy or cuts its answer.

        `obstore` repeats by itself, for a minute, what was refused or not answered at all.
        """
        begun, pauses_s = time.monotonic(), [6.4, 1.6, 0.4, 0.1]
        while True:
            try:
                with self._told():
                    return request()
            except (_Busy, ConnectionResetError) as error:
                tried_s = time.monotonic() - begun
                most_s = _BUSY_TRIES_S if isinstance(error, _Busy) else _SILENT_TRIES_S
                if not pauses_s or tried_s > most_s:
                    raise
                time.sleep(pauses_s.pop())

    def _told(self) -> contextlib.AbstractContextManager[None]:
        return _told(self.path)

    def _head(self) -> Any:
        import obstore

        try:
            return self._ask(lambda: obstore.head(self._bucket, self._key))
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EIO):
                self.is_directory()  # the answer to a list says why, that to HEAD has no text
            raise

    def _get(self, key: str) -> tuple[bytes, Any]:
        import obstore

        def request() -> tuple[bytes, Any]:
            got = obstore.get(self._bucket, key)
            return bytes(got.bytes()), got.meta

        return self._ask(request)

    def _put_if(self, data: bytes, mode: Any) -> dict[str, Any]:
        """Write under a condition; raises one of `_conflicts` where it does not hold."""
        import obstore

        with self._told():
            return dict(obstore.put(self._bucket, self._key, data, mode=mode))

    def _below(self) -> Sequence[Any]:
        import obstore

        return self._ask(lambda: obstore.list(self._bucket, prefix=self._key or None).collect())

    def _parts(self) -> list[Any]:
        """The objects that a file grew by, in order; raises where there are none."""
        found = [meta for meta in self._below() if part_of(meta["path"]) == (self._key, True)]
        if not found:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path)
        return sorted(found, key=lambda meta: meta["path"])

    def _next_part(self) -> int:
        try:
            newest = self._parts()[-1]["path"]
        except FileNotFoundError:
            return 1
        return int(newest.rpartition("/")[2].split("-")[1]) + 1


class ObjectLock(LockFile):
    """A lock file that its holders replace under a condition: that nobody else has done so.

    The store keeps nobody out by itself, so the holder's heartbeat decides (`is_exclusive` is
    False). Of two that see the same content, one alone gets to write.
    """

    def __init__(self, location: ObjectLocation) -> None:
        self.is_exclusive = False
        self._location = location
        self._seen: Any = "create"  # or the tag of what was read or written last
        self._unanswered: set[bytes] = set()  # contents whose write failed, and may come through

    def read(self) -> bytes:
        """The content; b"" where there is none."""
        try:
            content, meta = self._location._get(self._location._key)
        except FileNotFoundError:
            self._seen = "create"
            return b""
        self._seen = _tag(meta)
        return content

    def write(self, data: bytes) -> None:
        """Replace what was read or written last.

        Raises:
            Locked: another process has written since.
        """
        self._unanswered.add(data)
        while True:
            try:
                self._seen = _tag(self._location._put_if(data, self._seen))
                break
            except _conflicts():
                found = self.read()
                if found == data:  # an earlier try of this request came through
                    break
                if found not in self._unanswered:  # else an earlier request did
                    raise Locked(found) from None
        self._unanswered.clear()

    def close(self) -> None:
        """Nothing: what was written last tells that the lock is given up."""


def _tag(meta: Mapping[str, Any]) -> dict[str, str]:
    """What tells this content of an object from every other."""
    return {key: meta[key] for key in ("e_tag", "version") if meta.get(key)}
