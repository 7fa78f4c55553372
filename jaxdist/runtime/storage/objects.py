"""Files on Amazon S3, Google Cloud Storage or S3-compatible stores, through `obstore`.

Credentials, region and endpoint come from the environment. A growing file (`appender`) is a folder
of objects `part-…` (`parts`). Errors omit the server's text, because it may repeat a request.
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

from jaxdist.runtime.storage.location import (
    BLOCK_BYTES,
    Appender,
    Location,
    Locked,
    LockFile,
    panics_as,
)
from jaxdist.runtime.storage.parts import PartAppender, part_of, spool

_STORES = {"s3": "S3Store", "gs": "GCSStore"}
_EXTRAS = {"s3": "s3", "gs": "gcs"}
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, the path of a key file",
}
REQUESTS = 16
"""Concurrent requests to an object store; each mostly waits for the network."""

# Google accepts any size in one request; unlike multipart uploads, it leaves no hidden parts.
_ONE_REQUEST_BYTES = {"s3": 64 << 20, "gs": sys.maxsize}
_RENEWED = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS or GOOGLE_BEARER_TOKEN",
}
_CONNECT = {"allow_http": True, "connect_timeout": "5s"}
_TIMEOUT_S = 30  # without data before a request is repeated; longer for large uploads
_RETRY_S = 60  # total time of retries of an unreachable server
_BUSY_RETRY_S = 180  # total time of retries of a busy server (5xx)
_QUICK_BYTES, MIN_BYTES_PER_S = 1 << 20, 128 << 10
_DENIED = (401, 403)
_EXPIRED = ("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired")


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether this is a URL and not a path of a file system."""
    return bool(re.match("[a-z][a-z0-9+]*:/", os.fspath(path)))  # Path turns s3:// into s3:/


def canonical(path: str | os.PathLike[str]) -> str:
    """Return the URL with two slashes after its scheme and none at its end."""
    return re.sub("^([a-z0-9+]+):/+(.*?)/*$", r"\1://\2", os.fspath(path))


def url_problem(path: str | os.PathLike[str]) -> str:
    """Return why a URL cannot be used, or ""; raises `OSError` if its bucket is unreachable."""
    if not is_url(path):
        return ""
    url = canonical(path)
    scheme, _, rest = url.partition("://")
    bucket = rest.partition("/")[0]
    if scheme not in _STORES:
        supported = " or ".join(f"{name}://BUCKET/PATH" for name in _STORES)
        return f"{url!r} has an unsupported scheme. Use a path, or {supported}."
    if not bucket:
        return f"{url!r} has no bucket. Use {scheme}://BUCKET/PATH."
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
    import obstore

    with _translate_errors(f"{scheme}://{bucket}"):
        probe = _make_store(scheme, bucket, max_retries=1)
        next(iter(obstore.list(probe, chunk_size=1)), None)


@functools.cache
def _store(scheme: str, bucket: str, timeout_s: int) -> Any:
    # Refused connections use up ten retries in 3 s: only `_RETRY_S` limits their number.
    return _make_store(scheme, bucket, max_retries=10_000, timeout_s=timeout_s)


def _make_store(scheme: str, bucket: str, *, max_retries: int, timeout_s: int = _TIMEOUT_S) -> Any:
    from obstore import store

    total_s = max(600, 2 * timeout_s)
    limits = {"read_timeout": f"{timeout_s}s", "timeout": f"{total_s}s"}
    tries_s = datetime.timedelta(seconds=_RETRY_S)
    return getattr(store, _STORES[scheme])(
        bucket,
        client_options={**_CONNECT, **limits},
        retry_config={"max_retries": max_retries, "retry_timeout": tries_s},
    )


def _upload_timeout_s(num_bytes: int) -> int:
    if num_bytes <= _QUICK_BYTES:
        return _TIMEOUT_S
    return _TIMEOUT_S + (1 << (num_bytes - 1).bit_length()) // MIN_BYTES_PER_S


@contextlib.contextmanager
def _translate_errors(url: str) -> Iterator[None]:
    """In this block, convert errors but `_conflicts` to `OSError`, panics to `ConfigError`."""
    import obstore

    problem = (
        f"{url!r} cannot be used: a value in the environment is malformed ({{}}). Correct the S3 "
        f"endpoint (AWS_ENDPOINT_URL), region or {_CREDENTIALS[url.partition(':')[0]]}."
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
    from obstore import exceptions

    return exceptions.AlreadyExistsError, exceptions.PreconditionError


def _as_os_error(error: Exception, url: str) -> OSError:
    text, scheme = str(error), url.partition(":")[0]
    code = next(iter(re.findall(r"<Code>(\w+)</Code>", text)), "")
    status = int(next(iter(re.findall(r"status code: (\d+)", text)), 0))
    reply = " ".join(filter(None, [str(status or ""), code]))
    # Without credentials obstore requests them from the cloud machine's metadata server.
    if re.search("/latest/(api|meta-data)|/computeMetadata/|Missing(AccessKey|Secret)", text):
        what = f"no credentials were found: set {_CREDENTIALS[scheme]}"
        return OSError(errno.EACCES, what, url)
    if code == "NoSuchBucket":
        return OSError(errno.ENXIO, "no such bucket", url)
    if code in _EXPIRED:
        what = f"the credentials have expired ({reply}): set {_RENEWED[scheme]} to new ones"
        return OSError(errno.EACCES, what, url)
    if status in _DENIED or isinstance(error, PermissionError):
        what = f"access is denied ({reply}): {_RENEWED[scheme]} may be wrong, expired or lack "
        return OSError(errno.EACCES, f"{what}the permission", url)
    if isinstance(error, FileNotFoundError):
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), url)
    if "response body" in text:
        return ConnectionResetError(errno.ECONNRESET, "the response was cut short", url)
    if not status:
        return OSError(errno.EHOSTUNREACH, "the object store cannot be reached", url)
    kind = _Busy if status >= 500 or status == 429 else OSError
    return kind(errno.EIO, f"the object store refuses ({reply})", url)


class _Busy(OSError):
    """Raised if the server answered that it is busy."""


@dataclasses.dataclass(frozen=True)
class ObjectLocation(Location):
    """One object, or all objects below a prefix; `str` and `os.fspath` return its URL."""

    is_local: ClassVar[bool] = False

    @property
    def parent(self) -> Self:
        """Parent prefix; a bucket is its own parent."""
        if not self._key:
            return self
        return dataclasses.replace(self, path=self.path.rpartition("/")[0])

    def absolute(self) -> Self:
        """Return this URL, which does not depend on the working directory."""
        return self

    def entries(self) -> list[str]:
        """Return the sorted names directly below; [] if there are none."""
        import obstore

        listing = self._repeat(lambda: obstore.list_with_delimiter(self._bucket, self._key or None))
        paths = [*listing["common_prefixes"], *(meta["path"] for meta in listing["objects"])]
        return sorted({path.rstrip("/").rpartition("/")[2] for path in paths})

    def files(self) -> list[str]:
        """Return the sorted relative paths of all files below."""
        return sorted(self.sizes())

    def sizes(self) -> dict[str, int]:
        """Return relative path -> size in bytes of every file below."""
        sizes: dict[str, int] = {}
        for meta in self._below():
            name = part_of(meta["path"].removeprefix(self._key).lstrip("/"))[0]
            sizes[name] = sizes.get(name, 0) + meta["size"]
        return sizes

    def tags(self) -> dict[str, tuple[int, str]]:
        """Return path -> (bytes, ETag, "" if appended) of files below, or "" -> that of itself."""
        tags: dict[str, tuple[int, str]] = {}
        for meta in self._below():
            name, is_part = part_of(meta["path"].removeprefix(self._key).lstrip("/"))
            size = tags[name][0] if name in tags else 0
            tags[name] = (size + meta["size"], "" if is_part else meta["e_tag"] or "")
        if not tags:
            with contextlib.suppress(FileNotFoundError):
                meta = self._head()
                tags[""] = (meta["size"], meta["e_tag"] or "")
        return tags

    def exists(self) -> bool:
        """Return whether there is an object, or any below."""
        try:
            self._head()
        except FileNotFoundError:
            return self.is_directory()
        return True

    def is_directory(self) -> bool:
        """Return whether there are objects below."""
        import obstore

        listing = lambda: obstore.list(self._bucket, prefix=self._key or None, chunk_size=1)
        return bool(self._repeat(lambda: next(iter(listing()), None)))

    def size(self) -> int:
        """Return the size of the file in bytes."""
        return sum(meta["size"] for meta in self._metas())

    def version(self) -> int:
        """Return the time of the last write in ns, often whole seconds; 0 if it cannot be read."""
        with contextlib.suppress(OSError):
            return max(int(meta["last_modified"].timestamp() * 1e9) for meta in self._metas())
        return 0

    def free_bytes(self) -> int:
        """Return the largest integer: an object store is never full."""
        return sys.maxsize

    def read(self) -> bytes:
        """Return the content of the file."""
        try:
            return self._get(self._key)[0]
        except FileNotFoundError:
            return b"".join(self._get(meta["path"])[0] for meta in self._parts())

    def stream(self) -> Iterator[bytes]:
        """Yield the file in blocks, or in its parts if it was appended, one request each."""
        try:
            size = self._head()["size"]
        except FileNotFoundError:
            for meta in self._parts():
                yield self._get(meta["path"])[0]
            return
        for start in range(0, size, BLOCK_BYTES):
            yield self.part(start, min(BLOCK_BYTES, size - start))

    def blocks_backward(self) -> Iterator[bytes]:
        """Yield the file in blocks, last block first; an appended file is read part by part."""
        try:
            self._head()
        except FileNotFoundError:
            for meta in reversed(self._parts()):
                yield self._get(meta["path"])[0]
        else:
            yield from super().blocks_backward()

    def part(self, start: int, length: int) -> bytes:
        """Return `length` bytes of the object from `start` on."""
        import obstore

        bucket, key = self._bucket, self._key
        return self._repeat(
            lambda: bytes(obstore.get_range(bucket, key, start=start, length=length))
        )

    def write(self, data: str | bytes | memoryview, *, durable: bool = True) -> None:
        """Create or replace the object; it is always durable."""
        import obstore

        content = data.encode() if isinstance(data, str) else data
        scheme, bucket, key = self._parsed
        most = _ONE_REQUEST_BYTES[scheme]
        store = _store(scheme, bucket, _upload_timeout_s(min(len(content), most)))
        self._repeat(lambda: obstore.put(store, key, content, use_multipart=len(content) > most))

    def create(self) -> bool:
        """Create the object, empty; False if it exists."""
        try:
            self._put_if(b"", "create")
        except _conflicts():
            return False
        return True

    def appender(self) -> Appender:
        """Open the file for appending, creating it if needed."""
        return PartAppender(self, self._next_part())

    def append_descriptor(self) -> int:
        """Return a descriptor of a local file that is uploaded every few seconds."""
        return spool(self, self._next_part)

    def lock(self) -> LockFile:
        """Open the lock file; only its content identifies the holder."""
        return ObjectLock(self)

    def make_directory(self) -> None:
        """Do nothing: an object store has no directories."""

    def missing(self) -> list[Self]:
        """Return []: an object store has no directories."""
        return []

    def delete(self) -> None:
        """Delete the object if it exists."""
        import obstore

        with contextlib.suppress(FileNotFoundError):
            self._repeat(lambda: obstore.delete(self._bucket, self._key))

    def delete_tree(self) -> None:
        """Delete all objects under this prefix, and the object of this name."""
        import obstore

        while paths := [meta["path"] for meta in self._below()]:
            try:
                self._repeat(functools.partial(obstore.delete, self._bucket, paths))
                break
            except FileNotFoundError:
                # Google fails on a missing object and skips later ones: list them again.
                continue
        self.delete()

    @property
    def _parsed(self) -> tuple[str, str, str]:
        scheme, _, rest = self.path.partition("://")
        bucket, _, key = rest.partition("/")
        return scheme, bucket, key

    @property
    def _bucket(self) -> Any:
        return _store(*self._parsed[:2], _TIMEOUT_S)

    @property
    def _key(self) -> str:
        return self._parsed[2]

    def _repeat(self, request: Callable[[], Any]) -> Any:
        """Run an idempotent request; repeat it if the store is busy or truncates its answer."""
        begun, pauses_s = time.monotonic(), [6.4, 1.6, 0.4, 0.1]
        while True:
            try:
                with _translate_errors(self.path):
                    return request()
            except (_Busy, ConnectionResetError) as error:
                tried_s = time.monotonic() - begun
                most_s = _BUSY_RETRY_S if isinstance(error, _Busy) else _RETRY_S
                if not pauses_s or tried_s > most_s:
                    raise
                time.sleep(pauses_s.pop())

    def _metas(self) -> list[Any]:
        """Return the metadata of the object, or of the parts of an appended file."""
        try:
            return [self._head()]
        except FileNotFoundError:
            return self._parts()

    def _head(self) -> Any:
        import obstore

        try:
            return self._repeat(lambda: obstore.head(self._bucket, self._key))
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EIO):
                self.is_directory()  # raises with the reason, which a response to HEAD lacks
            raise

    def _get(self, key: str) -> tuple[bytes, Any]:
        import obstore

        def request() -> tuple[bytes, Any]:
            got = obstore.get(self._bucket, key)
            return bytes(got.bytes()), got.meta

        return self._repeat(request)

    def _put_if(self, data: bytes, mode: Any) -> dict[str, Any]:
        import obstore

        with _translate_errors(self.path):
            return dict(obstore.put(self._bucket, self._key, data, mode=mode))

    def _below(self) -> Sequence[Any]:
        import obstore

        return self._repeat(lambda: obstore.list(self._bucket, prefix=self._key or None).collect())

    def _parts(self) -> list[Any]:
        parts = [meta for meta in self._below() if part_of(meta["path"]) == (self._key, True)]
        if not parts:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.path)
        return sorted(parts, key=lambda meta: meta["path"])

    def _next_part(self) -> int:
        try:
            newest = self._parts()[-1]["path"]
        except FileNotFoundError:
            return 1
        return int(newest.rpartition("/")[2].split("-")[1]) + 1


class ObjectLock(LockFile):
    """A lock file replaced by conditional writes; the heartbeat in it decides who holds it."""

    def __init__(self, location: ObjectLocation) -> None:
        self.is_exclusive = False
        self._location = location
        self._seen: Any = "create"  # or the tag of the content last read or written
        self._unanswered: set[bytes] = set()  # contents of failed writes that may still succeed

    def read(self) -> bytes:
        """Return the content; b"" if there is no file."""
        try:
            content, meta = self._location._get(self._location._key)
        except FileNotFoundError:
            self._seen = "create"
            return b""
        self._seen = _tag(meta)
        return content

    def write(self, data: bytes) -> None:
        """Replace the content last read or written; raises `Locked` if it changed since then."""
        self._unanswered.add(data)
        while True:
            try:
                self._seen = _tag(self._location._put_if(data, self._seen))
                break
            except _conflicts():
                content = self.read()
                if content == data:  # an earlier try of this request succeeded
                    break
                if content not in self._unanswered:  # otherwise an earlier request succeeded
                    raise Locked(content) from None
        self._unanswered.clear()

    def close(self) -> None:
        """Do nothing: the content already shows that the lock is released."""


def _tag(meta: Mapping[str, Any]) -> dict[str, str]:
    return {key: meta[key] for key in ("e_tag", "version") if meta.get(key)}
