"""Stream documents from files: text, JSON lines, Parquet and tars; long texts come in pieces."""

from __future__ import annotations

import codecs
import dataclasses
import io
import json
import re
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from jaxdist.data.files import DataFile, kind_of, open_file, read_errors
from jaxdist.data.parquet import read_columns
from jaxdist.data.tars import Member, read_members
from jaxdist.runtime.formatting.numbers import in_bytes
from jaxdist.settings import ConfigError

PIECE_BYTES = 4 << 20
"""Size from which text files are cut into pieces (see `_cut_position`)."""

LINE_BYTES = 64 << 20
"""Longest line of JSON."""

_EXPANSION, _EXPANSION_FROM = 200, 64 << 20
"""Largest expansion of a file, checked from this decompressed size on. Prose expands 3-10 times."""


@dataclasses.dataclass(frozen=True)
class TextPiece:
    """Part of a document; `last`: if it is the last; `position`: bytes of the file read so far."""

    text: str
    last: bool
    position: int


@dataclasses.dataclass(frozen=True)
class Record:
    """A JSON line or Parquet row; `source` is "file:number", `position` as in `TextPiece`."""

    value: dict[str, Any]
    source: str
    position: int


def read_pieces(path: DataFile, text_field: str) -> Iterator[TextPiece]:
    """Yield the documents of one file; a text file in pieces. Raises `ConfigError` if it is bad."""
    kind = kind_of(path)
    with read_errors(path):
        if kind == "parquet":
            fix = "Set data.text_field to the column with the text."
            for record in _parquet_rows(path, [text_field], fix, texts=True):
                if record.value[text_field]:
                    yield TextPiece(record.value[text_field], True, record.position)
            return
        if kind == "json":
            raise ConfigError(
                f"{str(path)!r} is .json, which may be JSON lines or one text. Rename it "
                "to .jsonl or .txt."
            )
        with open_file(path) as raw, _decompressed(path, raw) as stream:
            for name, kind, content in _members(path, stream, texts=True):
                if kind == "lines":
                    yield from _read_lines(name, content, raw, text_field)
                else:
                    yield from _read_text(name, content, raw)


def _members(path: DataFile, stream: BinaryIO, *, texts: bool) -> Iterator[Member]:
    """Yield the file itself, or for a tar its samples as in `read_members`."""
    kind = kind_of(path)
    if kind == "tar":
        yield from read_members(path, stream, texts=texts)
    else:
        yield Member(str(path), kind, stream)


def read_records(
    path: DataFile, columns: list[str], is_unread: Callable[[str], bool] | None = None
) -> Iterator[Record]:
    """Yield the records of one file: JSON, or Parquet (`columns`, and others not `is_unread`)."""
    kind = kind_of(path)
    with read_errors(path):
        if kind == "parquet":
            fix = "data.records determines the required columns."
            yield from _parquet_rows(path, columns, fix, texts=False, is_unread=is_unread)
            return
        with open_file(path) as raw, _decompressed(path, raw) as stream:
            for name, kind, content in _members(path, stream, texts=False):
                if kind != "lines":
                    raise ConfigError(
                        f"{name!r} is not .jsonl or .parquet: data.records needs such "
                        "files. Change data.sources, or use data.records=text."
                    )
                for number, value in _json_lines(name, content):
                    source = f"{name}:{number}"
                    if not isinstance(value, dict):
                        what = type(value).__name__
                        raise ConfigError(f"{source} is not an object but {what}. Repair the line.")
                    yield Record(value, source, raw.tell())


_OF_RECORDS = {"messages", "conversations", "instruction", "prompt", "completion"}


def is_text(path: DataFile, text_field: str) -> bool:
    """Return whether a file is text, or its first record has a text and no prompt or answer."""
    kind = kind_of(path)
    if kind == "tar":
        with read_errors(path), open_file(path) as raw, _decompressed(path, raw) as stream:
            kind = next((one.kind for one in read_members(path, stream, texts=False)), "text")
    if kind not in ("parquet", "lines"):
        return kind == "text"
    first = next(read_records(path, []), None)
    fields = set() if first is None else first.value.keys()
    return text_field in fields and not fields & _OF_RECORDS


def _decompressed(path: DataFile, raw: BinaryIO) -> Any:
    """Return the decompressed stream, without byte order mark; `raw.tell()` counts stored bytes."""
    kind = {".gz": "gzip", ".zst": "zstd"}.get(PurePosixPath(path.name).suffix)
    stream: Any = raw
    if kind is not None:
        import pyarrow as pa

        expanded = _Expanded(path, pa.input_stream(raw, compression=kind), raw)
        stream = io.BufferedReader(expanded)
    if stream.peek(3).startswith(codecs.BOM_UTF8):
        stream.read(3)
    return stream


class _Expanded(io.RawIOBase):
    """Stream of decompressed bytes; rejects files that expand too much."""

    def __init__(self, path: DataFile, stream: Any, stored: BinaryIO) -> None:
        self._path, self._stream, self._stored, self._count = path, stream, stored, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = int(self._stream.readinto(buffer))
        self._count += count
        if self._count > max(_EXPANSION_FROM, _EXPANSION * self._stored.tell()):
            raise ConfigError(
                [
                    f"{str(self._path)!r} expands more than {_EXPANSION} times, which "
                    "text does not. Decompress it yourself if it is text."
                ]
            )
        return count


def _decode(path: DataFile | str, data: bytes, start: int, line: int | None = None) -> str:
    try:
        text = data.decode("utf-8")
        if "\0" not in text:
            return text
        position = f"byte {start + data.index(0)} is" if line is None else f"line or row {line} has"
        raise ConfigError(
            f"{str(path)!r} is not text: {position} a NUL byte. It is probably "
            f"{_binary_kind(data)}. Convert it to UTF-8 text, or exclude it with a glob for "
            "text files."
        )
    except UnicodeDecodeError as error:
        position = f"byte {start + error.start} is" if line is None else f"line or row {line} has"
        raise ConfigError(
            f"{str(path)!r} is not UTF-8 text ({position} 0x{data[error.start]:02x}). Convert "
            "it, or exclude it with a glob for text files."
        ) from None


def _binary_kind(data: bytes) -> str:
    if data.startswith(b"MMIDIDX"):
        return "the index of a Megatron data set"
    for zeros, others in ((data[1::2], data[::2]), (data[::2], data[1::2])):
        if zeros.count(0) > len(zeros) // 2:
            is_text = all(byte >= 32 or byte in b"\t\n\r" for byte in others[:1000])
            return "UTF-16 text" if is_text else "token numbers of 16 or 32 bits"
    return "a binary file"


def _is_json_lines(data: bytes) -> bool:
    """Return whether data begin with one or two JSON objects, or a long one, also in an array."""
    lines = [line.strip().rstrip(b",") for line in data.lstrip(b"[ \t\r\n").split(b"\n", 20)]
    first = [line for line in lines if line][:2]
    try:
        return bool(first) and all(
            isinstance(json.loads(line.rstrip(b"]")), dict) for line in first
        )
    except (ValueError, RecursionError):  # one long line, cut off or an array
        is_long = len(data) >= PIECE_BYTES or data.rstrip().endswith(b"}]")
        starts = re.match(rb'[\s\[]*\{\s*"[^"\n]*"\s*:', data)
        return len(first) == 1 and is_long and bool(starts)


def _read_text(path: str, stream: BinaryIO, raw: BinaryIO) -> Iterator[TextPiece]:
    held, start = b"", 0
    while True:
        block = stream.read(PIECE_BYTES)
        if not held and not start and _is_json_lines(block):
            raise ConfigError(
                f"{str(path)!r} holds JSON lines, but has the suffix of a text. Rename it to "
                ".jsonl (one object per line), so that only the field data.text_field is read."
            )
        held += block
        if not block:
            if held or start:
                yield TextPiece(_decode(path, held, start), True, raw.tell())
            return
        if len(held) >= PIECE_BYTES and (cut := _cut_position(held)):
            yield TextPiece(_decode(path, held[:cut], start), False, raw.tell())
            held, start = held[cut:], start + cut


def _cut_position(data: bytes) -> int:
    """Return the index after the last newline between two non-blank bytes; 0 = read more.

    A newline next to other white space may share a token with it. Text without such a newline in
    four pieces is cut between two characters.
    """
    at = len(data) - 1
    while (at := data.rfind(b"\n", 1, at)) > 0:
        if not data[at - 1 : at].isspace() and not data[at + 1 : at + 2].isspace():
            return at + 1
    if len(data) < 4 * PIECE_BYTES:
        return 0
    at = len(data) - 1
    while at > 0 and data[at] & 0xC0 == 0x80:  # inside a character
        at -= 1
    return at


def _read_lines(path: str, stream: BinaryIO, raw: BinaryIO, field: str) -> Iterator[TextPiece]:
    for number, record in _json_lines(path, stream):
        if not isinstance(record, dict) or not isinstance(record.get(field), str):
            have = ", ".join(record) if isinstance(record, dict) else type(record).__name__
            what = "no text" if isinstance(record, dict) and field in record else "no field"
            raise ConfigError(
                f"{path}:{number} has {what} {field!r} (it has: {have}). Set data.text_field "
                f"to the field with the text{_other_kind(record)}."
            )
        if record[field]:
            yield TextPiece(record[field], True, raw.tell())


_CONVERSATIONS = ("messages", "conversations", "instruction")


def _other_kind(record: Any) -> str:
    if isinstance(record, dict) and not record.keys().isdisjoint(_CONVERSATIONS):
        return ", or data.records=chat for conversations"
    if isinstance(record, dict) and {"prompt", "completion"} <= record.keys():
        return ", or data.records=completion for prompts and completions"
    return ""


def _json_lines(path: str, stream: BinaryIO) -> Iterator[tuple[int, Any]]:
    """Yield line number (from 1) and parsed JSON of each line that is not blank."""
    for number, data in enumerate(iter(lambda: stream.readline(LINE_BYTES + 1), b""), start=1):
        if len(data) > LINE_BYTES:
            raise ConfigError(
                [f"{path}:{number} is longer than {in_bytes(LINE_BYTES)}. Cut or remove the line."]
            )
        line = _decode(path, data, 0, number)
        if not line.strip():
            continue
        try:
            value = json.loads(line)
            if "\\ud" in line.lower():  # a surrogate, which must be paired
                json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = ord(error.object[error.start])
            raise ConfigError(
                f"{path}:{number} has an unpaired surrogate (\\u{half:x}). "
                "Repair or remove the line."
            ) from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(
                f"{path}:{number} is not JSON ({error}). Repair or remove the line."
            ) from None
        yield number, value


def _parquet_rows(
    path: DataFile,
    columns: list[str],
    fix: str,
    *,
    texts: bool,
    is_unread: Callable[[str], bool] | None = None,
) -> Iterator[Record]:
    rows = read_columns(path, columns, fix, texts=texts, is_unread=is_unread)
    for number, (row, position) in enumerate(rows, start=1):
        for name, value in row.items():
            if isinstance(value, bytes):
                row[name] = _decode(path, value, 0, number)
        yield Record(row, f"{path}:{number}", position)
