"""Line charts as SVG text: no library, no script, readable in light and dark pages."""

from __future__ import annotations

import dataclasses
import html
import math
import statistics
from collections.abc import Sequence

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#666666")
"""Told apart by people with any colour vision (after Okabe and Ito); reused beyond eight runs."""

_WIDTH, _HEIGHT = 900, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 16, 14, 46
_MAX_POINTS = 250
"""Points of a drawn line: about one for every three pixels of the chart's width."""


@dataclasses.dataclass(frozen=True)
class Line:
    """One curve: points in order of x; y that is not finite leaves a gap and a mark.

    Attributes:
        label: for tooltips.
        colour: any CSS colour.
        points: (x, y).
        dots: draw each point with a tooltip (few points) instead of a smoothed line (many).
    """

    label: str
    colour: str
    points: Sequence[tuple[float, float]]
    dots: bool = False


def chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """One chart with axes and a grid; "" when no line has a finite point.

    Long lines are drawn as the median of each stretch over a band from its least to its greatest
    value, so that a single spike stays visible.

    Args:
        title: above the chart.
        lines: what is drawn.
        x_label: below the axis.
        marks: vertical dashed lines at x, with a tooltip.
    """
    finite = [p for line in lines for p in line.points if all(map(math.isfinite, p))]
    if not finite:
        return ""
    x_ticks = ticks(min(x for x, _ in finite), max(x for x, _ in finite))
    y_ticks = ticks(min(y for _, y in finite), max(y for _, y in finite))
    frame = _Frame(
        x=(min(x for x, _ in finite), max(x for x, _ in finite)),
        y=(min(y_ticks[0], *(y for _, y in finite)), max(y_ticks[-1], *(y for _, y in finite))),
    )
    drawn = [
        *_grid(frame, x_ticks, y_ticks, x_label),
        *(_mark(frame, x, label) for x, label in marks if frame.holds_x(x)),
        *(part for line in lines for part in _draw(frame, line)),
    ]
    return "\n".join(
        [
            "<figure>",
            f"<figcaption>{html.escape(title)}</figcaption>",
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{html.escape(title)}">',
            *drawn,
            "</svg>",
            "</figure>",
        ]
    )


def ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Round numbers (1, 2, 2.5 or 5 times a power of ten) that span low ... high."""
    if high <= low:
        high = low + (abs(low) or 1.0) * 0.1
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def thin(
    points: Sequence[tuple[float, float]], size: int
) -> list[tuple[float, float, float, float]]:
    """Stretches of `size` points: (middle x, median, least, greatest) of each."""
    found = []
    for start in range(0, len(points), size):
        stretch = points[start : start + size]
        values = [y for _, y in stretch]
        middle = (stretch[0][0] + stretch[-1][0]) / 2
        found.append((middle, statistics.median(values), min(values), max(values)))
    return found


@dataclasses.dataclass(frozen=True)
class _Frame:
    """Data coordinates to pixels."""

    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, x: float, y: float) -> str:
        return f"{self.px(x):.1f},{self.py(y):.1f}"

    def px(self, x: float) -> float:
        span = (self.x[1] - self.x[0]) or 1.0
        return _LEFT + (x - self.x[0]) / span * (_WIDTH - _LEFT - _RIGHT)

    def py(self, y: float) -> float:
        span = (self.y[1] - self.y[0]) or 1.0
        return _HEIGHT - _BOTTOM - (y - self.y[0]) / span * (_HEIGHT - _TOP - _BOTTOM)

    def holds_x(self, x: float) -> bool:
        return self.x[0] <= x <= self.x[1]


def _grid(
    frame: _Frame, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str
) -> list[str]:
    parts = []
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for y in y_ticks:
        at = frame.py(y)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{_tick(y)}</text>')
    for x in x_ticks:
        if frame.holds_x(x):
            at = frame.px(x)
            parts.append(
                f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{bottom}" y2="{bottom + 5}"/>'
            )
            parts.append(
                f'<text x="{at:.1f}" y="{bottom + 19}" text-anchor="middle">{_tick(x)}</text>'
            )
    middle = (_LEFT + right) / 2
    label = html.escape(x_label)
    parts.append(f'<text x="{middle:.0f}" y="{_HEIGHT - 8}" text-anchor="middle">{label}</text>')
    return parts


def _mark(frame: _Frame, x: float, label: str) -> str:
    at = f"{frame.px(x):.1f}"
    return (
        f'<line class="mark" x1="{at}" x2="{at}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}">'
        f"<title>{html.escape(label)}</title></line>"
    )


def _draw(frame: _Frame, line: Line) -> list[str]:
    parts = []
    for x, y in line.points:
        if not math.isfinite(y) and frame.holds_x(x):
            at = frame.px(x)
            parts.append(
                f'<text class="bad" x="{at:.1f}" y="{_TOP + 8}" text-anchor="middle">'
                f"{_CROSS}<title>{html.escape(line.label)}: {y} at {_tick(x)}</title></text>"
            )
    for stretch in _finite_stretches(line.points):
        parts += _dots(frame, line, stretch) if line.dots else _curve(frame, line, stretch)
    return parts


_CROSS = "\u00d7"


def _curve(frame: _Frame, line: Line, points: Sequence[tuple[float, float]]) -> list[str]:
    size = math.ceil(len(line.points) / _MAX_POINTS)  # the same in all stretches of the line
    thinned = thin(points, size)
    parts = []
    if len(thinned) < len(points):
        upper = [frame.at(x, high) for x, _, _, high in thinned]
        lower = [frame.at(x, low) for x, _, low, _ in reversed(thinned)]
        parts.append(
            f'<polygon points="{" ".join(upper + lower)}" fill="{line.colour}" opacity="0.18"/>'
        )
    path = " ".join(frame.at(x, middle) for x, middle, _, _ in thinned)
    parts.append(
        f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="1.6">'
        f"<title>{html.escape(line.label)}</title></polyline>"
    )
    return parts


def _dots(frame: _Frame, line: Line, points: Sequence[tuple[float, float]]) -> list[str]:
    path = " ".join(frame.at(x, y) for x, y in points)
    parts = [
        f'<polyline points="{path}" fill="none" stroke="{line.colour}" stroke-width="1" '
        'stroke-dasharray="5 3"/>'
    ]
    for x, y in points:
        label = f"{line.label}: {y:.4g} at {_tick(x)}"
        parts.append(
            f'<circle cx="{frame.px(x):.1f}" cy="{frame.py(y):.1f}" r="3" fill="{line.colour}">'
            f"<title>{html.escape(label)}</title></circle>"
        )
    return parts


def _finite_stretches(
    points: Sequence[tuple[float, float]],
) -> list[list[tuple[float, float]]]:
    stretches: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if math.isfinite(y):
            stretches[-1].append((x, y))
        elif stretches[-1]:
            stretches.append([])
    return [stretch for stretch in stretches if stretch]


def _tick(value: float) -> str:
    """12500 -> "12.5k", 0.25 -> "0.25"."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
