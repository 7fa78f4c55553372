"""Text in columns for a terminal: tables, labels next to text, wrapped lines."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

WIDTH = 100
"""Width of a line in characters."""


def columns(rows: Sequence[Sequence[str]], *, left: int = 1, gap: str = "  ") -> list[str]:
    """Return a line per row of cells, in aligned columns: the first `left` to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = ["<"] * left + [">"] * (len(widths) - left)
    return [
        gap.join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, aligned, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


def wrap(text: str, width: int = WIDTH, *, head: str = "") -> list[str]:
    """Return the lines of a text after `head`, wrapped at spaces and indented by its width."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_long_words=False,
        break_on_hyphens=False,
    ) or [head.rstrip()]


def few(names: Sequence[str], most: int, separator: str = ", ") -> str:
    """Return the first `most` names and the number of others: `a, b and 3 more`."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return separator.join(names[:most]) + more
