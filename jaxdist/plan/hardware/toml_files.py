"""GPUs described in TOML: the form of our own list and of a user's file alike."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from jaxdist.plan.hardware.gpu import GIB, Gpu

_FILE_KEYS = {
    "like": "",
    "compute_capability": "compute_capability",
    "num_sms": "num_sms",
    "memory_gib": "memory_bytes",
    "peak_tflops": "peak_flops",
    "memory_gb_per_s": "memory_bandwidth",
    "link_gb_per_s": "link_bandwidth",
    "network_gb_per_s": "network_bandwidth",
    "gpus_per_node": "gpus_per_node",
    "gpus_per_fabric": "gpus_per_fabric",
    "price_per_hour": "price_per_hour",
    "spot_price_per_hour": "spot_price_per_hour",
}
"""Key of the file -> field of `Gpu`."""

_OPTIONAL = ("like", "gpus_per_fabric")

_SCALES: dict[str, float] = {
    "memory_gib": GIB,
    "memory_gb_per_s": 1e9,
    "link_gb_per_s": 1e9,
    "network_gb_per_s": 1e9,
}


def read_tables(
    tables: Mapping[str, Any], known: Mapping[str, Gpu], aliases: Mapping[str, str]
) -> tuple[dict[str, Gpu], list[str]]:
    """GPUs of a TOML file, a table each, and every problem found in it.

    With `like` a table starts from a known one and says what differs; without, every key must be
    there but `gpus_per_fabric`. `peak_tflops` is a table by dtype.

    Args:
        tables: what the file holds.
        known: GPUs that `like` may name.
        aliases: other names of these.
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
        f"[{name}] {key} is unknown. Use {', '.join(_FILE_KEYS)}."
        for key in table
        if key not in _FILE_KEYS
    ]
    if "like" in table:
        if str(table["like"]).lower() not in {**known, **aliases}:
            problems.append(f"[{name}] like={table['like']!r} is not one of {', '.join(known)}.")
    else:
        missing = [key for key in _FILE_KEYS if key not in (*table, *_OPTIONAL)]
        if missing:
            problems.append(
                f"[{name}] lacks {', '.join(missing)}. Give them, or start from a known GPU: "
                'like = "h100".'
            )
    return problems + [
        problem
        for key, value in table.items()
        if key in _FILE_KEYS and (problem := _value_problem(name, key, value))
    ]


def _value_problem(name: str, key: str, value: Any) -> str:
    if key == "like":
        return ""
    if key == "compute_capability":
        good = re.fullmatch(r"\d+\.\d", str(value)) is not None
        return "" if good else f'[{name}] {key}={value!r} is not like "9.0".'
    if key == "peak_tflops":
        dtypes = ("bfloat16", "float16", "float32", "float8")
        entries = value.items() if isinstance(value, dict) else []
        if entries and all(k in dtypes and _is_number(v) and v > 0 for k, v in entries):
            return ""
        return f"[{name}] {key} must be a table of TFLOP/s by {', '.join(dtypes)}."
    whole = key in ("num_sms", "gpus_per_node", "gpus_per_fabric")
    lowest = 0 if key in ("gpus_per_fabric", "price_per_hour", "spot_price_per_hour") else 1e-9
    if not _is_number(value) or value < lowest or (whole and value != int(value)):
        kind = "whole number" if whole else "number"
        above = "0 or more" if lowest == 0 else "above 0"
        return f"[{name}] {key}={value!r} must be a {kind} {above}."
    return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _gpu_from(
    name: str, table: Mapping[str, Any], known: Mapping[str, Gpu], aliases: Mapping[str, str]
) -> Gpu:
    fields: dict[str, Any] = {"name": name}
    for key, value in table.items():
        if key == "peak_tflops":
            fields["peak_flops"] = {dtype: tflops * 1e12 for dtype, tflops in value.items()}
        elif key != "like":
            scaled = value * _SCALES[key] if key in _SCALES else value
            fields[_FILE_KEYS[key]] = int(scaled) if key == "memory_gib" else scaled
    fields["compute_capability"] = str(fields.get("compute_capability", ""))
    if "like" in table:
        fields = {k: v for k, v in fields.items() if v != ""}
        like = str(table["like"]).lower()
        return dataclasses.replace(known[aliases.get(like, like)], **fields)
    # No device calls itself this: only the planner knows it.
    return Gpu(device_kind=re.escape(name), **fields)
