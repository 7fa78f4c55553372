"""Settings as TOML text that reads back equal."""

from __future__ import annotations

import dataclasses
from typing import Any


def write_toml(config: Any) -> str:
    """Return the resolved settings as TOML: plain fields first, then a table for each section.

    `None` has no TOML form and is omitted; the default of its field must be None.
    """
    import tomli_w

    return tomli_w.dumps(to_table(config))


def to_table(config: Any) -> dict[str, Any]:
    """Convert a settings dataclass to nested dicts."""
    table: dict[str, Any] = {}
    sections: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            sections[field.name] = to_table(value)
        elif isinstance(value, tuple):
            table[field.name] = list(value)
        elif value is not None:
            table[field.name] = value
    return {**table, **sections}
