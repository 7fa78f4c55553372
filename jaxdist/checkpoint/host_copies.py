"""Copies of arrays in host memory that is kept from one save to the next.

Writing to new memory, which the system maps page by page, takes many times as long as writing to
memory in use, and training waits for these copies.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np


class HostCopies:
    """One copy for each key, overwritten by the next with that key."""

    def __init__(self) -> None:
        self._buffers: dict[Hashable, np.ndarray] = {}

    def take(self, key: Hashable, data: Any) -> np.ndarray:
        """Return a copy [...] of what one device holds, of any dtype, in row-major order."""
        values = np.asarray(data)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != values.shape or buffer.dtype != values.dtype:
            buffer = self._buffers[key] = np.empty(values.shape, values.dtype)
        np.copyto(buffer, values)
        return buffer

    def clear(self) -> None:
        """Give the memory back."""
        self._buffers.clear()
