"""Charts as SVG text: curves; no library, no script.

Colours of text and lines come from the page's stylesheet (`html`), so they suit light and dark.
"""

from __future__ import annotations

import dataclasses
import html
import math
import statistics
from collections.abc import Sequence

from jaxdist.runtime.formatting.numbers import in_si

COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"),
    *("#8c6bb1", "#666666", "#a6761d", "#a50026", "#a6d854", "#b8b800"),
)
"""Told apart by people with any colour vision as far as twelve can be (after Okabe and Ito)."""

_WIDTH, _HEIGHT = 900, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 16, 14, 46
_MAX_POINTS = 250
"""Points of a drawn line: about one for every three pixels of the chart's width."""


@dataclasses.dataclass(frozen=True)
class Line:
    """One curve: points (x, y) in order of x; y that is not finite leaves a gap and a mark.

    With `dots` each point is drawn with a tooltip (few points), else a smoothed line (many).
    """

    label: str
    colour: str
    points: Sequence[tuple[float, float]]
    dots: bool = False


def colour_of(index: int) -> str:
    """A colour of its own for each line: `COLOURS`, then hues that lie far from the last ones."""
    if index < len(COLOURS):
        return COLOURS[index]
    hue, light = 137.508 * index % 360, (35, 50, 65)[index % 3]  # the golden angle
    return f"hsl({hue:.1f} 70% {light}%)"


def chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str,
    marks: Sequence[tuple[float, str]] = (),
    log_x: bool = False,
    log_y: bool = False,
) -> str:
    """Curves with axes and a grid; "" when no line has a finite point.

    Long lines are drawn as the median of each stretch over a band from its least to its greatest
    value, so that a single spike stays visible. `marks` are vertical dashed lines at x, with a
    tooltip. `log_x` marks every x; all are above 0. `log_y` leaves out what is not above 0.
    """
    if log_y:
        above = lambda points: [(x, y) for x, y in points if y > 0 or not math.isfinite(y)]
        lines = [dataclasses.replace(line, points=above(line.points)) for line in lines]
    finite = [p for line in lines for p in line.points if all(map(math.isfinite, p))]
    if not finite:
        return ""
    xs, ys = [x for x, _ in finite], [y for _, y in finite]
    x_ticks = sorted(set(xs)) if log_x else ticks(min(xs), max(xs))
    y_ticks = (log_ticks if log_y else ticks)(min(ys), max(ys))
    y_ends = min(y_ticks[0], *ys), max(y_ticks[-1], *ys)
    frame = _Frame((min(xs), max(xs)), y_ends, log_x, log_y)
    drawn = [
        *_grid(frame, x_ticks, y_ticks, x_label),
        *(
            _line("mark", (frame.px(x),) * 2, (_TOP, _HEIGHT - _BOTTOM), _tip(label))
            for x, label in marks
            if frame.holds_x(x)
        ),
        *(part for line in lines for part in _draw(frame, line)),
    ]
    return _figure(title, _HEIGHT, drawn)


def log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten from just below `low` to just above `high`.

    Round numbers where the two are so close that this would mark little but the ends.
    """
    if high < 4 * low:
        return [tick for tick in ticks(low, high) if tick > 0]
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = [m * 10.0**e for e in range(first - 1, last + 1) for m in (1, 2, 5)]
    below = max(tick for tick in every if tick <= low * (1 + 1e-9))
    above = min((tick for tick in every if tick >= high * (1 - 1e-9)), default=every[-1])
    return [tick for tick in every if below <= tick <= max(above, 2 * below)]


def ticks(low: float, high: float) -> list[float]:
    """About six round numbers (1, 2, 2.5 or 5 times a power of ten) that span low ... high."""
    if high <= low:
        high = low + (abs(low) or 1.0) * 0.1
    rough = (high - low) / 6
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
    log_x: bool
    log_y: bool

    def at(self, x: float, y: float) -> str:
        return f"{self.px(x):.1f},{self.py(y):.1f}"

    def px(self, x: float) -> float:
        return _LEFT + self._share(x, self.x, self.log_x) * (_WIDTH - _LEFT - _RIGHT)

    def py(self, y: float) -> float:
        return _HEIGHT - _BOTTOM - self._share(y, self.y, self.log_y) * (_HEIGHT - _TOP - _BOTTOM)

    def _share(self, value: float, ends: tuple[float, float], log: bool) -> float:
        """Where a value lies between the ends of an axis, 0 to 1."""
        low, high = ends
        if log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return (value - low) / ((high - low) or 1.0)

    def holds_x(self, x: float) -> bool:
        return self.x[0] <= x <= self.x[1]


def _grid(
    frame: _Frame, x_ticks: Sequence[float], y_ticks: Sequence[float], x_label: str
) -> list[str]:
    parts = []
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    for y in y_ticks:
        at = frame.py(y)
        parts.append(_line("grid", (_LEFT, right), (at, at)))
        parts.append(_text(_LEFT - 8, at + 4, _tick(y), anchor="end"))
    for x in filter(frame.holds_x, x_ticks):
        at = frame.px(x)
        parts.append(_line("grid", (at, at), (bottom, bottom + 5)))
        parts.append(_text(at, bottom + 19, _tick(x)))
    parts.append(_text((_LEFT + right) / 2, _HEIGHT - 8, x_label))
    return parts


def _line(kind: str, x: tuple[float, float], y: tuple[float, float], inside: str = "") -> str:
    ends = f'x1="{x[0]:.1f}" x2="{x[1]:.1f}" y1="{y[0]:.1f}" y2="{y[1]:.1f}"'
    return f'<line class="{kind}" {ends}>{inside}</line>'


def _draw(frame: _Frame, line: Line) -> list[str]:
    parts = []
    for x, y in line.points:
        if not math.isfinite(y) and frame.holds_x(x):
            at = f'x="{frame.px(x):.1f}" y="{_TOP + 8}"'
            tip = _tip(f"{line.label}: {y} at {_tick(x)}")
            parts.append(f'<text class="bad" {at} text-anchor="middle">\u00d7{tip}</text>')
    for stretch in _finite_stretches(line.points):
        parts += _dots(frame, line, stretch) if line.dots else _curve(frame, line, stretch)
    return parts


def _curve(frame: _Frame, line: Line, points: Sequence[tuple[float, float]]) -> list[str]:
    size = math.ceil(len(line.points) / _MAX_POINTS)  # the same in all stretches of the line
    thinned = thin(points, size)
    parts = []
    if len(thinned) < len(points):
        band = [frame.at(x, high) for x, _, _, high in thinned]
        band += [frame.at(x, low) for x, _, low, _ in reversed(thinned)]
        parts.append(f'<polygon points="{" ".join(band)}" fill="{line.colour}" opacity="0.18"/>')
    path = [frame.at(x, middle) for x, middle, _, _ in thinned]
    return [*parts, _polyline(path, line.colour, 'stroke-width="1.6"', _tip(line.label))]


def _dots(frame: _Frame, line: Line, points: Sequence[tuple[float, float]]) -> list[str]:
    path = [frame.at(x, y) for x, y in points]
    parts = [_polyline(path, line.colour, 'stroke-width="1" stroke-dasharray="5 3"')]
    for x, y in points:
        at = f'cx="{frame.px(x):.1f}" cy="{frame.py(y):.1f}"'
        tip = _tip(f"{line.label}: {y:.4g} at {_tick(x)}")
        parts.append(f'<circle {at} r="3" fill="{line.colour}">{tip}</circle>')
    return parts


def _polyline(path: Sequence[str], colour: str, style: str, inside: str = "") -> str:
    points = " ".join(path)
    return f'<polyline points="{points}" fill="none" stroke="{colour}" {style}>{inside}</polyline>'


def _tip(text: str) -> str:
    """Shown under the pointer."""
    return f"<title>{html.escape(text)}</title>"


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
    return in_si(value, digits=6)


def _text(x: float, y: float, text: str, *, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _figure(title: str, height: float, body: Sequence[str]) -> str:
    title = html.escape(title)
    size = f'viewBox="0 0 {_WIDTH} {height:.0f}"'
    return "\n".join(
        [
            f"<figure>\n<figcaption>{title}</figcaption>",
            f'<svg {size} role="img" aria-label="{title}">',
            *body,
            "</svg>\n</figure>",
        ]
    )
