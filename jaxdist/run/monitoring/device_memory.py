"""Memory in use on the devices, where the backend reports it."""

from __future__ import annotations

from typing import Any


def device_memory(devices: list[Any]) -> dict[str, int]:
    """Return bytes of the fullest device of this process; {} on CPUs, which do not report them.

    Returns:
        `memory_bytes` in use, `memory_peak_bytes` so far, `memory_limit_bytes`.
    """
    stats = [s for s in (device.memory_stats() for device in devices) if s]
    names = {
        "bytes_in_use": "memory_bytes",
        "peak_bytes_in_use": "memory_peak_bytes",
        "bytes_limit": "memory_limit_bytes",
    }
    values = {key: [int(s[key]) for s in stats if key in s] for key in names}
    return {name: max(values[key]) for key, name in names.items() if values[key]}
