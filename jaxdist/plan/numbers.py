"""Times, money and sizes as people say them."""

from __future__ import annotations

from jaxdist.plan.estimate.memory import GIB, MIB


def in_days(days: float) -> str:
    """Days, hours or minutes."""
    if days >= 1.5:
        return f"{days:,.1f} days"
    return f"{days * 24:.1f} hours" if days * 24 >= 1 else f"{days * 1440:.0f} minutes"


def duration(seconds: float) -> str:
    """Seconds to days."""
    if seconds >= 2 * 86400:
        return f"{seconds / 86400:,.1f} days"
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 120:
        return f"{seconds / 60:.0f} min"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def in_usd(money: float) -> str:
    """Dollars, cents where they matter."""
    return f"{money:,.0f} USD" if money >= 100 else f"{money:.2f} USD"


def in_gib(size: float) -> str:
    """GiB, or MiB where it is little."""
    return f"{size / GIB:,.1f} GiB" if size >= 0.1 * GIB else f"{size / MIB:,.1f} MiB"


def in_si(number: float) -> str:
    """8,030,261,248 -> 8.03B."""
    for value, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= value:
            return f"{number / value:.3g}{letter}"
    return f"{number:.0f}"
