"""Parquet files to rows. Pages that claim more memory than their file justifies are rejected."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

from jaxdist.core.settings import ConfigError
from jaxdist.data.files import DataFile, open_file, open_ranges, size_of

_BATCH_ROWS, _BATCH_BYTES = 1024, 64 << 20
"""Largest batch. Each of its rows may repeat a value that is as long as a page."""

_EXPANSION = 200
"""Text or a page above `_BATCH_BYTES` may be so many times larger than the file."""

_NUM_VALUES, _VALUES_PER_BYTE = 1 << 20, 16
"""A column of more values may have so many per byte of the file."""

_NUM_BYTES, _NUM_STORED, _DATA, _DICTIONARY, _DATA_V2 = (2,), (3,), (5, 1), (7, 1), (8, 1)
"""Fields of a page header: bytes without and with compression, values in each kind of page."""


def read_columns(
    path: DataFile, columns: list[str], fix: str, *, texts: bool
) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each row of some columns, and the bytes of the file up to it.

    With `texts` the columns must hold text.

    Raises:
        ConfigError: damaged, columns are missing or of another type (`fix` is the advice), or pages
            that are too large for their file.
    """
    import pyarrow as pa
    import pyarrow.parquet as parquet

    try:
        with parquet.ParquetFile(open_ranges(path)) as file, open_file(path, 512) as stream:
            if problem := _problem_of(file.schema_arrow, columns, texts):
                raise ConfigError(f"{str(path)!r} has {problem}. {fix}")
            number, grown, size = 0, 0, size_of(path)
            total = max(1, file.metadata.num_rows)
            for group in range(file.num_row_groups):
                largest = _check_pages(path, file.metadata.row_group(group), columns, stream)
                rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES // largest))
                for batch in file.iter_batches(rows, row_groups=[group], columns=columns):
                    for row in batch.to_pylist():
                        number += 1
                        grown += sum(len(value or "") for value in row.values()) if texts else 0
                        if grown > max(_BATCH_BYTES, _EXPANSION * size):
                            raise ConfigError(
                                f"{str(path)!r} holds more than {_EXPANSION} times its size: this "
                                "is no text. Decompress it yourself if it is."
                            )
                        yield row, size * number // total
    except (pa.ArrowException, UnicodeDecodeError, EOFError, RecursionError) as error:
        raise ConfigError(
            f"{str(path)!r} is not a whole Parquet file ({str(error).splitlines()[0]}). Copy it "
            "again, or write it anew."
        ) from None


def _problem_of(schema: Any, columns: list[str], texts: bool) -> str:
    """Return why the columns cannot be read from a file of this Arrow schema; "" if they can."""
    if doubled := [column for column in columns if schema.names.count(column) > 1]:
        return f"several columns named {', '.join(doubled)}"
    if missing := [column for column in columns if column not in schema.names]:
        return f"no column {', '.join(missing)} (it has: {', '.join(schema.names)})"
    kinds = {column: schema.field(column).type for column in columns if texts}
    wrong = [f"{name} of {kind}" for name, kind in kinds.items() if not _holds_text(kind)]
    return f"column {', '.join(wrong)}, not of text" if wrong else ""


def _holds_text(kind: Any) -> bool:
    """Return whether a Parquet column of this Arrow type holds text or bytes of text."""
    kind = getattr(kind, "value_type", kind) if str(kind).startswith("dictionary") else kind
    text = ("string", "large_string", "string_view", "binary", "large_binary", "binary_view")
    return str(kind) in text


def _check_pages(path: DataFile, group: Any, columns: list[str], stream: BinaryIO) -> int:
    """Return the largest page size of a row group in bytes, decompressed, from the page headers.

    Raises:
        ConfigError: a page claims more values or bytes than the size of the file justifies.
    """
    size, largest = size_of(path), 1
    for column in map(group.column, range(group.num_columns)):
        if not any(f"{column.path_in_schema}.".startswith(f"{name}.") for name in columns):
            continue
        at = min(column.dictionary_page_offset or column.data_page_offset, column.data_page_offset)
        num_values = 0
        while num_values < column.num_values:
            stream.seek(at)
            header = _read_header(stream)
            num_bytes, entries = header.get(_NUM_BYTES, -1), header.get(_DICTIONARY, 0)
            num_values += header.get(_DATA, 0) + header.get(_DATA_V2, 0)
            if not (
                0 <= entries <= num_bytes <= max(_BATCH_BYTES, _EXPANSION * size)
                and 0 <= num_values <= max(_NUM_VALUES, _VALUES_PER_BYTE * size)
            ):
                raise ConfigError(
                    f"{str(path)!r} has {size} bytes, but a page of {column.path_in_schema} claims "
                    f"{num_bytes} bytes and {max(entries, num_values)} values: the file is damaged "
                    "or no text. Copy it again, or write it anew."
                )
            largest = max(largest, num_bytes)
            at = stream.tell() + max(0, header.get(_NUM_STORED, 0))
    return largest


def _read_header(stream: BinaryIO, *inside: int) -> dict[tuple[int, ...], int]:
    """Read the integers of a page header, a structure of Thrift's compact protocol.

    Returns:
        Value by field number; for a nested structure, by all field numbers from the outside.
    """
    fields: dict[tuple[int, ...], int] = {}
    number = 0
    while head := _read_byte(stream):
        step, kind = head >> 4, head & 15
        number = number + step if step else _read_integer(stream)
        if kind in (4, 5, 6):
            fields[*inside, number] = _read_integer(stream)
        elif kind == 8:  # bytes of statistics
            stream.seek(_read_varint(stream), 1)
        elif kind == 12:
            fields |= _read_header(stream, *inside, number)
        elif kind not in (1, 2):  # booleans have no content
            raise EOFError(f"a page header has a field of type {kind}")
    return fields


def _read_integer(stream: BinaryIO) -> int:
    value = _read_varint(stream)
    return (value >> 1) ^ -(value & 1)


def _read_varint(stream: BinaryIO) -> int:
    value = 0
    for shift in range(0, 35, 7):
        byte = _read_byte(stream)
        value |= (byte & 127) << shift
        if byte < 128:
            break
    return value


def _read_byte(stream: BinaryIO) -> int:
    if data := stream.read(1):
        return data[0]
    raise EOFError("a page header is cut off")
