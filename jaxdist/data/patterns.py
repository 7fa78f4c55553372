"""Patterns of file names."""

from __future__ import annotations

import re


def regex_of(pattern: str) -> str:
    """Return a regular expression for a pattern with *, **, ? and [...], as in `glob`."""
    words = {"**/": "(.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^]]+\])", pattern)
    return "".join(
        words.get(part) or (part.replace("[!", "[^") if part[:1] == "[" else re.escape(part))
        for part in parts
    )
