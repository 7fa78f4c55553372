"""Read rows of Parquet files; reject pages that claim more memory than their file justifies."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from jaxdist.data.files import DataFile, open_file, open_ranges, size_of
from jaxdist.data.hub_sets import HubFile
from jaxdist.settings import ConfigError

_BATCH_ROWS, _BATCH_BYTES = 1024, 64 << 20
"""Largest batch of rows. Bounds memory, because each row may repeat a value as long as a page."""

_EXPANSION = 200
"""Largest ratio of text, or of a page above `_BATCH_BYTES`, to the size of the file."""

_NUM_VALUES, _VALUES_PER_BYTE = 1 << 20, 16
"""A column with more values may have at most this many per byte of the file."""

_FOOTER_BYTES = 64 << 10
"""Bytes at the end of a file that are read first; most footers fit."""

_BOOLEANS, _INTEGER, _BYTES, _LIST, _STRUCT = (1, 2), 4, 8, 9, 12
"""Types of Thrift's compact protocol."""

_BROKEN_HEADER = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError)
"""Errors of reading fields that are truncated or of a wrong type."""


def read_columns(
    path: DataFile,
    columns: list[str],
    fix: str,
    *,
    texts: bool,
    is_unread: Callable[[str], bool] | None = None,
) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each row of some columns, and an estimate of the bytes of the file read so far.

    With `texts` the columns must hold text. With `is_unread` each row also has the other columns
    for which it returns False. `fix` is the advice in errors about columns.
    """
    import pyarrow as pa
    import pyarrow.parquet as parquet

    try:
        with open_file(path, 512) as stream, parquet.ParquetFile(open_ranges(path)) as file:
            if is_unread is not None:
                others = [name for name in file.schema_arrow.names if not is_unread(name)]
                columns = list(dict.fromkeys([*columns, *others]))
            if problem := _problem_of(file.schema_arrow, columns, texts):
                raise ConfigError(f"{str(path)!r} has {problem}. {fix}")
            number, grown, size = 0, 0, size_of(path)
            total = max(1, file.metadata.num_rows)
            prefixes = tuple(f"{column}." for column in columns)
            leaves = [file.schema.column(i).path for i in range(len(file.schema))]
            read = [i for i, leaf in enumerate(leaves) if f"{leaf}.".startswith(prefixes)]
            groups = list(enumerate(_read_groups(stream, size)))
            if isinstance(path, HubFile):
                groups = [groups[number] for number in path.share(len(groups))]
            for group, chunks in groups:
                pages = [_check_pages(path, leaves[i], chunks[i], stream) for i in read]
                rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(pages, default=1)))
                for batch in file.iter_batches(rows, row_groups=[group], columns=columns):
                    for row in batch.to_pylist():
                        number += 1
                        grown += sum(len(value or "") for value in row.values()) if texts else 0
                        if grown > max(_BATCH_BYTES, _EXPANSION * size):
                            raise ConfigError(
                                f"{str(path)!r} expands more than {_EXPANSION} times, which "
                                "text does not. Decompress it yourself if it is text."
                            )
                        yield row, size * number // total
    except (pa.ArrowException, UnicodeDecodeError, *_BROKEN_HEADER) as error:
        is_header = not isinstance(error, pa.ArrowException | UnicodeDecodeError)
        reason = "broken header" if is_header else str(error).splitlines()[0]
        raise ConfigError(
            f"{str(path)!r} is not a complete Parquet file ({reason}). Copy or write it again."
        ) from None


def download_row_groups(file: HubFile, local: Path) -> None:
    """Download footer and row groups of a part, at their places in a new file, empty elsewhere."""
    import pyarrow.parquet as parquet

    file.create_empty(local)
    length = min(file.num_bytes, _FOOTER_BYTES)
    file.download_range(file.num_bytes - length, length, local)
    with local.open("rb") as stream:
        stream.seek(file.num_bytes - 8)
        footer = 8 + int.from_bytes(stream.read(4), "little")
    if length < footer <= file.num_bytes:
        file.download_range(file.num_bytes - footer, footer - length, local)
    try:
        about = parquet.read_metadata(local)
    except Exception:  # reading the rows reports it
        return
    groups = [about.row_group(number) for number in file.share(about.num_row_groups)]
    chunks = [group.column(n) for group in groups for n in range(group.num_columns)]
    if chunks:
        starts = [
            min(c.dictionary_page_offset or c.data_page_offset, c.data_page_offset) for c in chunks
        ]
        end = max(s + c.total_compressed_size for s, c in zip(starts, chunks, strict=True))
        file.download_range(min(starts), end - min(starts), local)


def _problem_of(schema: Any, columns: list[str], texts: bool) -> str:
    if doubled := [column for column in columns if schema.names.count(column) > 1]:
        return f"several columns named {', '.join(doubled)}"
    if missing := [column for column in columns if column not in schema.names]:
        return f"no column {', '.join(missing)} (it has: {', '.join(schema.names)})"
    kinds = {column: schema.field(column).type for column in columns if texts}
    wrong = [f"{name} of {kind}" for name, kind in kinds.items() if not _holds_text(kind)]
    return f"column {', '.join(wrong)}, not of text" if wrong else ""


def _holds_text(kind: Any) -> bool:
    kind = getattr(kind, "value_type", kind) if str(kind).startswith("dictionary") else kind
    text = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
    return str(kind) in text


def _read_groups(stream: BinaryIO, size: int) -> list[list[Any]]:
    stream.seek(size - 8)
    num_bytes = int.from_bytes(stream.read(4), "little")
    stream.seek(size - 8 - num_bytes)
    footer = _read_struct(io.BytesIO(stream.read(num_bytes)))
    return [[chunk[3] for chunk in group[1]] for group in footer.get(4, [])]


def _check_pages(path: DataFile, column: str, chunk: dict[int, Any], stream: BinaryIO) -> int:
    """Return the largest uncompressed page of a column chunk in bytes; reject implausible ones."""
    size, largest, num_values, at = size_of(path), 1, 0, min(chunk.get(11) or chunk[9], chunk[9])
    while num_values < chunk[5]:
        stream.seek(at)
        header = _read_struct(stream)
        at = stream.tell() + max(0, header[3])
        num_bytes, entries = header[2], header.get(7, {}).get(1, 0)  # of a dictionary page
        num_values += (header.get(5) or header.get(8) or {}).get(1, 0)
        if not (
            0 <= entries <= num_bytes <= max(_BATCH_BYTES, _EXPANSION * size)
            and 0 <= num_values <= max(_NUM_VALUES, _VALUES_PER_BYTE * size)
        ):
            raise ConfigError(
                f"{str(path)!r} has {size} bytes, but a page of {column} claims {num_bytes} bytes "
                f"and {max(entries, num_values)} values: the file is damaged or not text. Copy or "
                "write it again."
            )
        largest = max(largest, num_bytes)
    return largest


def _read_struct(stream: BinaryIO) -> dict[int, Any]:
    fields: dict[int, Any] = {}
    number = 0
    while head := stream.read(1)[0]:
        number = number + (head >> 4) if head >> 4 else _read_value(stream, _INTEGER)
        fields[number] = None if head & 15 in _BOOLEANS else _read_value(stream, head & 15)
    return fields


def _read_value(stream: BinaryIO, kind: int) -> Any:
    if kind == _STRUCT:
        return _read_struct(stream)
    if kind in _BOOLEANS:
        return stream.read(1)[0]
    if kind == _LIST:
        head = stream.read(1)[0]
        count = head >> 4 if head >> 4 < 15 else _read_varint(stream)
        return [_read_value(stream, head & 15) for _ in range(count)]
    value = _read_varint(stream)
    if kind != _BYTES:
        return (value >> 1) ^ -(value & 1)
    return stream.read(min(value, _BATCH_BYTES))


def _read_varint(stream: BinaryIO) -> int:
    value = shift = 0
    while (byte := stream.read(1)[0]) > 127:
        value |= (byte & 127) << shift
        shift += 7
    return value | byte << shift
