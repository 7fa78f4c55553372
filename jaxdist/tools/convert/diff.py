"""`convert diff A B`: list the arrays of two checkpoints that differ, and by how much."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np

from jaxdist.checkpoint.blocks import block_shape, grid
from jaxdist.checkpoint.streaming_io import BLOCK_BYTES, StoredArrays
from jaxdist.runtime.formatting.numbers import percent
from jaxdist.settings import setting
from jaxdist.tools.convert.checkpoint_paths import checkpoint_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Settings of `convert diff`: the two checkpoints to compare, and the form of the output."""

    a: str = setting("", "run directory, its checkpoints/, or one checkpoint", required=True)
    b: str = setting(
        "", "run directory, its checkpoints/, or one checkpoint B, to compare with A", required=True
    )
    limit: int = setting(
        40, "number of differing arrays to print, largest difference first; 0 = all", ge=0
    )
    json: bool = setting(False, "print one JSON object instead of text")


def run(config: Config) -> int:
    """Print the differences of two checkpoints; return 0 if they are equal, else 1."""
    a, b = (StoredArrays(checkpoint_of(path, -1)) for path in (config.a, config.b))
    result = compare(a, b)
    if config.json:
        print(json.dumps(result))
    else:
        _show(a, b, result, config.limit)
    return 1 if any(result[part] for part in ("only_a", "only_b", "reshaped", "differing")) else 0


def compare(a: StoredArrays, b: StoredArrays) -> dict[str, Any]:
    """Return the arrays' names in lists `only_a`, `only_b`, `identical`; others with details.

    `reshaped` maps a name to both shapes, `differing` to statistics of the difference. Only arrays
    with a different dtype or checksum are read.
    """
    in_a, in_b = a.entries, b.entries
    result: dict[str, Any] = {
        "only_a": [name for name in in_a if name not in in_b],
        "only_b": [name for name in in_b if name not in in_a],
        "reshaped": {},
        "identical": [],
        "differing": {},
    }
    for name in in_a:
        if name not in in_b:
            continue
        one, other = in_a[name], in_b[name]
        if one["shape"] != other["shape"]:
            result["reshaped"][name] = [one["shape"], other["shape"]]
        elif (one["dtype"], one["checksum"]) == (other["dtype"], other["checksum"]):
            result["identical"].append(name)
        else:
            result["differing"][name] = _difference(a, b, name)
    return result


def _difference(a: StoredArrays, b: StoredArrays, name: str) -> dict[str, Any]:
    """Return the largest and mean absolute difference and the share of elements that differ.

    NaN equals only NaN. The difference of unequal values is inf if one of them is not finite.
    """
    entry = a.entries[name]
    shape = tuple(entry["shape"])
    worst, worst_index, total, count = 0.0, [0] * len(shape), 0.0, 0
    for index in grid(shape, block_shape(shape, 8, BLOCK_BYTES)):
        x, y = (side.read(name, index).astype(np.float64) for side in (a, b))
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        with np.errstate(invalid="ignore"):
            gap = np.where(same, 0.0, np.abs(x - y))
        gap = np.where(np.isnan(gap), np.inf, gap)
        if gap.size and gap.max() > worst:
            worst = float(gap.max())
            inside = np.unravel_index(int(gap.argmax()), gap.shape)
            worst_index = [int(at) + s.start for at, s in zip(inside, index, strict=True)]
        total += float(gap.sum())
        count += int((~same).sum())
    size = max(math.prod(shape), 1)
    return {
        "max_abs": worst,
        "at": worst_index,
        "mean_abs": total / size,
        "num_differing": count,
        "num_elements": size,
        "differing_share": count / size,
        "dtypes": [entry["dtype"], b.entries[name]["dtype"]],
    }


def _show(a: StoredArrays, b: StoredArrays, result: dict[str, Any], limit: int) -> None:
    print(f"a  {a.checkpoint}\nb  {b.checkpoint}")
    for part, text in (("only_a", "only in a"), ("only_b", "only in b")):
        for name in result[part]:
            print(f"{text}: {name}")
    for name, (one, other) in result["reshaped"].items():
        print(f"different shape: {name} is {one} in a and {other} in b")
    ranked = sorted(result["differing"].items(), key=lambda pair: -pair[1]["max_abs"])
    printed = ranked[: limit or None]
    for name, d in printed:
        one, other = d["dtypes"]
        dtypes = "" if one == other else f", {one} / {other}"
        print(
            f"differs: {name}: at most {d['max_abs']:.6g} at {d['at']}, mean {d['mean_abs']:.6g}, "
            f"{d['num_differing']:,} of {d['num_elements']:,} elements "
            f"({percent(d['differing_share'])}){dtypes}"
        )
    if len(ranked) > len(printed):
        print(f"… and {len(ranked) - len(printed)} more (--limit=0 prints all)")
    print(f"{len(result['identical'])} arrays identical, {len(ranked)} of equal shape differ")
