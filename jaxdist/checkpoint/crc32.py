"""Compute the CRC-32 of large files on several cores, by combining the CRCs of blocks."""

from __future__ import annotations

import functools
import os
import zlib
from concurrent.futures import ThreadPoolExecutor

from jaxdist.runtime.storage import BLOCK_BYTES, Location

_THREADS = min(os.cpu_count() or 1, 8)  # zlib releases the GIL; more threads do not speed up a disk
_POLYNOMIAL = 0xEDB88320  # CRC-32, with the lowest power in the highest bit


def fingerprint(file: Location) -> list[int]:
    """Return size in bytes and CRC-32 of a file."""
    if not file.is_local or (size := file.size()) <= BLOCK_BYTES:
        crc = size = 0
        for block in file.stream():
            crc = zlib.crc32(block, crc)
            size += len(block)
        return [size, crc]

    def read(start: int) -> tuple[int, int]:
        block = file.part(start, BLOCK_BYTES)
        return len(block), zlib.crc32(block)

    crc = total = 0
    with ThreadPoolExecutor(_THREADS, "checkpoint-crc") as pool:
        for length, of_block in pool.map(read, range(0, size, BLOCK_BYTES)):
            crc = combine(crc, of_block, length)
            total += length
    return [total, crc]


def combine(first: int, second: int, length: int) -> int:
    """Return the CRC-32 of A + B from both CRCs and B's length, like zlib's `crc32_combine`."""
    return _product(_power_of_x(8 * length), first) ^ second


@functools.lru_cache(maxsize=64)
def _power_of_x(exponent: int) -> int:
    power, square = 1 << 31, 1 << 30
    while exponent:
        if exponent & 1:
            power = _product(power, square)
        square = _product(square, square)
        exponent >>= 1
    return power


def _product(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ _POLYNOMIAL if b & 1 else b >> 1
    return product
