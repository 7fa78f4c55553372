"""`convert inspect RUN`: print the contents of a checkpoint."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

from jaxdist.checkpoint.pytree import ITEMS, OPTIONAL
from jaxdist.checkpoint.streaming_io import StoredArrays
from jaxdist.run.run_directory import flatten
from jaxdist.runtime.formatting.numbers import in_bytes
from jaxdist.runtime.formatting.tables import columns
from jaxdist.settings import setting
from jaxdist.tools.convert.checkpoint_paths import checkpoint_of

_WIDEST = 60
"""Characters of the longest list that is printed in full."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of `convert inspect`: checkpoint and extent of the output."""

    path: str = setting("", "run directory, its checkpoints/, or one checkpoint", required=True)
    step: int = setting(-1, "step of the checkpoint; -1 = as named by PATH, else the newest valid")
    settings: bool = setting(False, "also print the settings of the run")
    json: bool = setting(False, "print one JSON object instead of text")


def run(config: Config) -> int:
    """Print the arrays and metadata of a checkpoint; return 0."""
    stored = StoredArrays(checkpoint_of(config.path, config.step))
    meta = stored.document["meta"]
    facts = {
        "checkpoint": str(stored.checkpoint),
        "step": stored.document["step"],
        **{key: value for key, value in meta.items() if key != "config"},
        **_totals(stored),
    }
    names = [name for item in ITEMS for name in stored.entries if name.startswith(item + "/")]
    if config.json:
        arrays = {name: stored.entries[name] for name in names}
        print(json.dumps({**facts, "arrays": arrays, "config": meta.get("config")}))
        return 0
    rows = [(key, _short(value)) for key, value in flatten(facts).items()]
    print("\n".join(columns(rows, left=2)))
    print()
    print(_table(stored, names))
    if config.settings:
        print(f"\n{meta.get('config', 'no settings are stored')}")
    return 0


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    if len(text) <= _WIDEST or not isinstance(value, list):
        return text
    return f"{len(value)} values; --json prints them"


def _totals(stored: StoredArrays) -> dict[str, Any]:
    totals = {}
    for item in ITEMS:
        names = [name for name in stored.entries if name.startswith(item + "/")]
        if not names and item in OPTIONAL:
            continue
        elements = sum(math.prod(stored.entries[name]["shape"]) for name in names)
        num_bytes = sum(stored.num_bytes(name) for name in names)
        totals[item] = f"{len(names)} arrays, {elements:,} elements, {in_bytes(num_bytes)}"
    return totals


def _table(stored: StoredArrays, names: Sequence[str]) -> str:
    rows = [("array", "shape", "dtype", "size")]
    for name in names:
        entry = stored.entries[name]
        dtype = f"{entry['key']} key" if "key" in entry else entry["dtype"]
        rows.append((name, str(entry["shape"]), dtype, in_bytes(stored.num_bytes(name))))
    return "\n".join(columns(rows, left=3))
