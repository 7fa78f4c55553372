"""GPUs described in TOML: the form of our own list and of a user's file alike."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxdist.hardware.gpu import GIB, Gpu
from jaxdist.settings import Bounds


class _Key(NamedTuple):
    """A number of the file: its field of `Gpu`, the unit, and what it may be."""

    field: str
    unit: float = 1
    bounds: Bounds = Bounds(gt=0)


_NUMBERS = {
    "num_sms": _Key("num_sms"),
    "memory_gib": _Key("memory_bytes", GIB),
    "memory_gb_per_s": _Key("memory_bandwidth", 1e9),
    "link_gb_per_s": _Key("link_bandwidth", 1e9),
    "network_gb_per_s": _Key("network_bandwidth", 1e9),
    "gpus_per_node": _Key("gpus_per_node"),
    "gpus_per_fabric": _Key("gpus_per_fabric", 1, Bounds(ge=0)),
    "power_w": _Key("power_w", 1, Bounds(ge=0)),
    "max_clock": _Key("max_clock"),
    "price_per_hour": _Key("price_per_hour", 1, Bounds(ge=0)),
    "spot_price_per_hour": _Key("spot_price_per_hour", 1, Bounds(ge=0)),
}
_KEYS = ("like", "compute_capability", *_NUMBERS, "peak_tflops")
_OPTIONAL = ("like", "gpus_per_fabric", "power_w", "max_clock")
_RATE = Bounds(gt=0)
_DTYPES = ("bfloat16", "float16", "float32", "float8", "float4")


def read_tables(
    tables: Mapping[str, Any], known: Mapping[str, Gpu], aliases: Mapping[str, str]
) -> tuple[dict[str, Gpu], list[str]]:
    """GPUs of a TOML file, a table each, and every problem found in it.

    `aliases` are other names of the `known` ones. `peak_tflops` is a table by dtype. A table that
    starts from no other (`like`) may leave out `gpus_per_fabric`, `power_w` and `max_clock`.
    """
    found: dict[str, Gpu] = {}
    problems: list[str] = []
    for name, table in tables.items():
        key, bad = name.lower().replace("_", "-"), _table_problems(name, table, known, aliases)
        if bad:
            problems += bad
        else:
            found[key] = _gpu_from(key, table, known, aliases)
    return found, problems


def _table_problems(
    name: str, table: Any, known: Mapping[str, Gpu], aliases: Mapping[str, str]
) -> list[str]:
    if not isinstance(table, dict):
        return [f"{name} is not a table. Write [{name}] and its keys below."]
    problems = [
        f"[{name}] {key} is unknown. Use {', '.join(_KEYS)}." for key in table if key not in _KEYS
    ]
    if "like" in table:
        if str(table["like"]).lower() not in {**known, **aliases}:
            problems.append(f"[{name}] like={table['like']!r} is not one of {', '.join(known)}.")
    else:
        missing = [key for key in _KEYS if key not in (*table, *_OPTIONAL)]
        if missing:
            problems.append(
                f"[{name}] lacks {', '.join(missing)}. Give them, or start from a known GPU: "
                'like = "h100".'
            )
    return problems + [
        problem
        for key, value in table.items()
        if key in _KEYS and (problem := _value_problem(name, key, value))
    ]


def _value_problem(name: str, key: str, value: Any) -> str:
    if key == "like":
        return ""
    if key == "compute_capability":
        good = re.fullmatch(r"\d+\.\d", str(value)) is not None
        return "" if good else f'[{name}] {key}={value!r} is not like "9.0".'
    if key == "peak_tflops":
        entries = value.items() if isinstance(value, dict) else []
        if entries and all(k in _DTYPES and _is_number(v) and _RATE.allow(v) for k, v in entries):
            return ""
        return f"[{name}] {key} must be a table of TFLOP/s by {', '.join(_DTYPES)}."
    bounds, whole = _NUMBERS[key].bounds, key in ("num_sms", "gpus_per_node", "gpus_per_fabric")
    if _is_number(value) and bounds.allow(value) and not (whole and value != int(value)):
        return ""
    return f"[{name}] {key}={value!r} must be a {'whole ' * whole}number {bounds}."


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _gpu_from(
    name: str, table: Mapping[str, Any], known: Mapping[str, Gpu], aliases: Mapping[str, str]
) -> Gpu:
    fields: dict[str, Any] = {
        number.field: table[key] * number.unit for key, number in _NUMBERS.items() if key in table
    }
    if "memory_gib" in table:
        fields["memory_bytes"] = int(fields["memory_bytes"])
    if "peak_tflops" in table:
        fields["peak_flops"] = {k: tflops * 1e12 for k, tflops in table["peak_tflops"].items()}
    if "compute_capability" in table:
        fields["compute_capability"] = str(table["compute_capability"])
    if "like" in table:
        like = str(table["like"]).lower()
        if "peak_tflops" in table:  # another chip: the power limit of the first says nothing of it
            fields = {"power_w": 0.0, "max_clock": 1.0, **fields}
        return dataclasses.replace(known[aliases.get(like, like)], name=name, **fields)
    # No device calls itself this: only the planner knows it.
    return Gpu(name=name, device_kind=re.escape(name), **fields)
