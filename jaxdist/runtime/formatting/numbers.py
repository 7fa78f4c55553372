"""Format sizes, counts, durations, money, shares and rates, one form for each."""

from __future__ import annotations

import math

MIB, GIB = 2**20, 2**30
TIMES = "\u00d7"
UNITS = {"tokens": "tok", "images": "img"}


def in_bytes(num_bytes: float) -> str:
    """Format bytes: 85899345920 -> "80.0 GiB"; also MiB, KiB and B."""
    for size, unit in ((GIB, "GiB"), (MIB, "MiB"), (2**10, "KiB")):
        if num_bytes >= size:
            return f"{num_bytes / size:,.1f} {unit}"
    return f"{num_bytes:.0f} B"


def in_si(number: float) -> str:
    """Format 8030261248 as "8.03B", as model cards do."""
    for value, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= 0.9995 * value:  # 999.6k is 1M with three digits
            return f"{number / value:.3g}{letter}"
    return f"{number:.3g}"


def count(value: float) -> str:
    """Format 1234 as "1,234"; numbers below 100 have two decimals."""
    return f"{value:,.0f}" if value >= 100 else f"{value:,.2f}"


def duration(seconds: float) -> str:
    """Format seconds as 12.3ms, 4.2s, 3m12s, 2h05m, 3d04h: two units at most."""
    if not math.isfinite(seconds):
        return "?"
    if 0 < seconds < 0.1:
        return f"{1e3 * seconds:.3g}ms"
    if seconds < 59.95:
        return f"{seconds:.1f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours}h{minutes:02d}m"
    days, hours = divmod(hours, 24)
    return f"{days:,}d{hours:02d}h"


def money(amount: float, currency: str = "") -> str:
    """Format an amount with two decimals, with none from 1,000, with four below 1."""
    digits = 0 if amount >= 1000 else 2 if amount >= 1 else 4
    return f"{amount:,.{digits}f} {currency}".rstrip()


def percent(share: float, digits: int = 1, *, sign: bool = False) -> str:
    """Format 0.4321 as "43.2 %"; with a sign, "+43.2 %"."""
    return f"{100 * share:{'+' if sign else ''}.{digits}f} %"


def relative_speed(seconds: float, other: float) -> str:
    """Compare `seconds` to `other`: "9 % slower"; from a factor of 2 on "10.6 times as fast"."""
    ratio = max(seconds, other) / min(seconds, other)
    if ratio < 2:
        return f"{percent(ratio - 1, 0)} {'faster' if seconds < other else 'slower'}"
    return f"{ratio:.1f} times as {'fast' if seconds < other else 'slow'}"


def rate(bytes_per_s: float) -> str:
    """Format 2.35e9 as "2.35 GB/s": decimal units, at least three digits."""
    units = ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"))
    size, unit = next((one for one in units if bytes_per_s >= one[0]), (1.0, "B/s"))
    value = bytes_per_s / size
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
