"""Read WebDataset tars of text: adjacent members, named alike up to a dot, are a sample.

The text of sample `000` is `000.txt`, its record `000.json`, and `000.jsonl` has several records.
Source of the rule for names: webdataset, `tariterators.py`.
"""

from __future__ import annotations

import codecs
import io
import math
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

from jaxdist.data.files import DataFile
from jaxdist.data.hub_sets import HubFile
from jaxdist.settings import ConfigError

_MEMBER_BYTES = 64 << 20
"""Largest member, because members are read into memory."""

_BLOCK = tarfile.BLOCKSIZE

_MORE_BYTES = 1 << 20
"""Bytes after a part that are downloaded at first, to find the end of its last sample."""

_KINDS = {".txt": "text", ".json": "lines", ".jsonl": "lines"}


class Member(NamedTuple):
    """Text or records: "FILE" or "TAR/NAME", kind ("text" or "lines" of JSON), content."""

    source: str
    kind: str
    content: BinaryIO


class _Blocks:
    """The bytes of a stream from `start` to `end`, which `tarfile` reads once and in order.

    `last` has the bytes of the last read: at the end of the archive, its last header.
    """

    def __init__(self, stream: BinaryIO, start: int, end: float) -> None:
        self._stream, self._at, self._end, self.last = stream, start, end, b""

    def read(self, size: int) -> bytes:
        self.last = self._stream.read(max(0, int(min(size, self._end - self._at))))
        self._at += len(self.last)
        return self.last

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int) -> None:
        while self._at < offset and self.read(min(offset - self._at, _MORE_BYTES)):
            pass


def read_members(path: DataFile, stream: BinaryIO, *, texts: bool) -> Iterator[Member]:
    """Yield one member of each sample: its text or, if it has none, its file of records.

    Without `texts`, records are preferred to texts. Raises `ConfigError` for a damaged archive,
    members that are of another kind or too large, and samples with several members to choose from.
    """
    sample: list[Member] = []
    before = ""
    for key, member in _members(path, stream):
        if key != before and sample:
            yield _chosen(sample, texts)
            sample = []
        before = key
        sample.append(member)
    if sample:
        yield _chosen(sample, texts)


def _chosen(sample: list[Member], texts: bool) -> Member:
    order = ("text", "lines") if texts else ("lines", "text")
    some = next(filter(None, ([m for m in sample if m.kind == kind] for kind in order)))
    if len(some) > 1:
        raise ConfigError(
            f"{some[0].source} and {PurePosixPath(some[1].source).name} are one sample, because "
            "their names are equal up to the first dot: which of them is meant is ambiguous. Use "
            "one text or record in a sample."
        )
    return some[0]


def _members(path: DataFile, stream: BinaryIO) -> Iterator[tuple[str, Member]]:
    """Yield sample key and content of each member; skip folders, hidden and dotless names."""
    start, stop = _bounds(path, stream)
    if start == stop:
        return
    blocks, problem = _Blocks(stream, start, math.inf), "a damaged header, or its end is missing"
    try:
        # errors="replace": names are printed
        tar: Any = tarfile.TarFile(fileobj=blocks, errors="replace")  # type: ignore[arg-type]
        while (info := tar.next()) is not None:
            if info.offset >= stop:
                return
            tar.members.clear()  # else memory grows with their number
            name = PurePosixPath(info.name).name
            if not info.isdir() and "." in name and not name.startswith("."):
                yield _key(info), _read(path, tar, info)
        if stop == math.inf and blocks.last == bytes(_BLOCK):
            return
    except tarfile.TarError as error:
        problem = str(error)
    raise ConfigError(
        f"{str(path)!r} is not a complete tar file ({problem}). Copy or write it again."
    )


def _key(info: tarfile.TarInfo) -> str:
    folder, _, name = info.name.rpartition("/")
    return f"{folder}/{name.partition('.')[0]}"


def _read(path: DataFile, tar: tarfile.TarFile, info: tarfile.TarInfo) -> Member:
    source, suffix = f"{path}/{info.name}", PurePosixPath(info.name).suffix.lower()
    kind = _KINDS.get(suffix)
    file = tar.extractfile(info) if info.isreg() else None
    if kind is None or file is None:
        raise ConfigError(
            f"{source} is not a text: only .txt, .json and .jsonl files in tar files are read. "
            "For images or audio, set data.sources to module:function, a function that returns "
            "rows (docs/data.md)."
        )
    if info.size > _MEMBER_BYTES:
        raise ConfigError(
            f"{source} has {info.size} bytes, and a member of a tar file may have {_MEMBER_BYTES}. "
            "Use it as a file of its own."
        )
    content = file.read().removeprefix(codecs.BOM_UTF8)
    # JSON has line ends only between its words.
    return Member(
        source, kind, io.BytesIO(content.replace(b"\n", b" ") if suffix == ".json" else content)
    )


def _bounds(path: DataFile, stream: BinaryIO) -> tuple[int, float]:
    """Return at which bytes the samples of a file, or of its part, begin and end; inf = its end."""
    if not isinstance(path, HubFile) or path.num_parts == 1:
        return 0, math.inf
    start, stop = (_boundary(stream, cut, path.num_bytes) for cut in _cuts(path))
    stream.seek(start)
    return (start, stop) if start == stop or stop < path.num_bytes else (start, math.inf)


def _cuts(file: HubFile) -> tuple[int, int]:
    blocks = file.share(file.num_bytes // _BLOCK)
    return blocks.start * _BLOCK, blocks.stop * _BLOCK


def _boundary(stream: BinaryIO, cut: int, end: int) -> int:
    """Return the offset of the first sample that clearly begins after `cut`, else `end`.

    It is the first one after the second member behind `cut`: the sample of the first member may
    begin before `cut`, and so may its name, which can be in a header of its own. Every part that
    ends or begins at `cut` computes the same offset. Bytes from `end` on are not read.
    """
    if not cut:
        return 0
    stream.seek(cut)
    header = next((at for at in range(cut, end, _BLOCK) if _is_header(stream.read(_BLOCK))), end)
    stream.seek(header)
    try:
        tar: Any = tarfile.TarFile(fileobj=_Blocks(stream, header, end))  # type: ignore[arg-type]
        tar.next()
        key = None
        while (info := tar.next()) is not None:
            tar.members.clear()
            if key not in (None, _key(info)):
                return info.offset
            key = _key(info)
    except tarfile.TarError:  # cut off at `end`
        pass
    return end


def _is_header(block: bytes) -> bool:
    """Return whether a block is a header of a member; text is none, as it has no NUL bytes."""
    try:
        return block[257:262] == b"ustar" and bool(tarfile.TarInfo.frombuf(block, "utf-8", ""))
    except tarfile.TarError:
        return False


def download_samples(file: HubFile, local: Path) -> None:
    """Download the bytes of a part's samples into a new file, at their offsets in the tar."""
    file.create_empty(local)
    (end, stop), size = _cuts(file), file.num_bytes
    length = stop - end + _MORE_BYTES
    while end < size:
        length = min(length, size - end)
        file.download_range(end, length, local)
        end += length
        with local.open("rb") as stream:
            if _boundary(stream, stop, end) < end:
                return
