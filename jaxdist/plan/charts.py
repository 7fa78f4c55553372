"""Plots of a plan as SVG text: no library, no script, readable in light and dark pages."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence

from jaxdist.core.parallel.pipeline.schedule import Schedule
from jaxdist.core.parallel.pipeline.simulation import Costs

COLOURS = (
    *("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"),
    *("#8c6bb1", "#666666", "#a6761d", "#1b9e77", "#7570b3", "#b07aa1"),
)
"""Told apart by people with any colour vision as far as twelve can be (after Okabe and Ito)."""

_WIDTH = 900


def stacked_bars(
    title: str,
    bars: Sequence[tuple[str, Mapping[str, float]]],
    *,
    limit: float,
    limit_name: str,
    unit: str,
) -> str:
    """Horizontal bars cut into classes, with a line at the limit.

    Args:
        title: above the bars.
        bars: (label, class -> amount).
        limit: where the line stands.
        limit_name: what it is.
        unit: of amounts and limit.
    """
    names = list(dict.fromkeys(name for _, parts in bars for name in parts))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    left, step, height = 190, 30, 30 * len(bars) + 34
    most = max([limit, *(sum(parts.values()) for _, parts in bars)]) * 1.04
    scale = (_WIDTH - left - 10) / most
    body = []
    for row, (label, parts) in enumerate(bars):
        y, x = 8 + row * step, float(left)
        body.append(_text(left - 8, y + 15, label, anchor="end"))
        for name, amount in parts.items():
            width = amount * scale
            tip = f"{name}: {amount:,.1f} {unit}"
            body.append(_box(x, y, width, step - 9, colours[name], tip))
            x += width
    x = left + limit * scale
    bottom = 8 + len(bars) * step
    body.append(f'<line class="limit" x1="{x:.1f}" x2="{x:.1f}" y1="2" y2="{bottom}"/>')
    body.append(_text(x, bottom + 16, f"{limit_name} {limit:,.1f} {unit}", anchor="middle"))
    return _figure(title, height, body) + _legend(colours)


def timeline(title: str, schedule: Schedule, costs: Costs) -> str:
    """A schedule over time: one row for each stage, as wide as each action lasts."""
    split = schedule.splits_backward
    lasts = [
        max((costs.of(action.kind, split) for action in tick if action), default=0.0)
        for tick in schedule.ticks
    ]
    left, step = 70, 26
    scale = (_WIDTH - left - 10) / sum(lasts)
    kinds = {"forward": COLOURS[0], "backward": COLOURS[2], "weight": COLOURS[4]}
    body = [
        _text(left - 8, 8 + stage * step + 14, f"stage {stage}", anchor="end")
        for stage in range(schedule.num_stages)
    ]
    start = 0.0
    for tick, length in zip(schedule.ticks, lasts, strict=True):
        for stage, action in enumerate(tick):
            if action is None:
                continue
            x, width = left + start * scale, costs.of(action.kind, split) * scale
            tip = f"{action.kind} of microbatch {action.microbatch}, chunk {action.chunk}"
            body.append(_box(x, 8 + stage * step, width - 0.4, step - 5, kinds[action.kind], tip))
        start += length
    shown = {str(kind): kinds[kind] for kind in schedule.kinds}
    return _figure(title, schedule.num_stages * step + 16, body) + _legend(shown)


def points(
    title: str, lines: Mapping[str, Sequence[tuple[float, float]]], *, x_label: str, y_label: str
) -> str:
    """Curves over a logarithmic x with a logarithmic y, every point marked.

    Args:
        title: above the plot.
        lines: label -> (x, y), both above 0.
        x_label: below the axis.
        y_label: beside it.
    """
    drawn = {name: [p for p in line if min(p) > 0] for name, line in lines.items()}
    flat = [point for line in drawn.values() for point in line]
    if not flat:
        return ""
    left, top, height, bottom = 90, 12, 260, 44
    xs, ys = _Log(x for x, _ in flat), _Log(y for _, y in flat)
    at = lambda x, y: (
        left + xs.share(x) * (_WIDTH - left - 30),
        top + (1 - ys.share(y)) * height,
    )
    body = []
    for x in sorted({x for x, _ in flat}):
        body.append(_text(at(x, ys.low)[0], top + height + 18, f"{x:g}", anchor="middle"))
    for y in ys.ticks():
        level = at(xs.low, y)[1]
        body.append(
            f'<line class="grid" x1="{left}" x2="{_WIDTH - 30}" y1="{level:.1f}" y2="{level:.1f}"/>'
        )
        body.append(_text(left - 8, level + 4, f"{y:,.4g}", anchor="end"))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(drawn)}
    for name, line in drawn.items():
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in (at(*point) for point in line))
        body.append(
            f'<polyline points="{path}" fill="none" stroke="{colours[name]}" stroke-width="2"/>'
        )
        for point in line:
            a, b = at(*point)
            tip = html.escape(f"{name}: {point[0]:g} {x_label}, {point[1]:,.4g} {y_label}")
            body.append(
                f'<circle cx="{a:.1f}" cy="{b:.1f}" r="4" fill="{colours[name]}">'
                f"<title>{tip}</title></circle>"
            )
    body.append(_text(_WIDTH / 2, top + height + 38, x_label, anchor="middle"))
    return _figure(f"{title} ({y_label})", top + height + bottom, body) + _legend(colours)


class _Log:
    """A logarithmic axis over some values."""

    def __init__(self, values: Iterable[float]):
        found = list(values)
        self.low, self.high = min(found), max(found)
        if self.low == self.high:
            self.low, self.high = self.low / 2, self.high * 2

    def share(self, value: float) -> float:
        """Where a value lies, 0 to 1."""
        return math.log(value / self.low) / math.log(self.high / self.low)

    def ticks(self) -> list[float]:
        """1, 2 and 5 times powers of ten inside."""
        first = math.floor(math.log10(self.low))
        last = math.ceil(math.log10(self.high))
        every = [m * 10.0**e for e in range(first, last + 1) for m in (1, 2, 5)]
        return [tick for tick in every if self.low <= tick <= self.high]


def _box(x: float, y: float, width: float, height: float, colour: str, tip: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" '
        f'fill="{colour}"><title>{html.escape(tip)}</title></rect>'
    )


def _text(x: float, y: float, text: str, *, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _figure(title: str, height: float, body: Sequence[str]) -> str:
    return (
        f"<figure><figcaption>{html.escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img">{"".join(body)}</svg></figure>'
    )


def _legend(colours: Mapping[str, str]) -> str:
    items = "".join(
        f'<span class="key"><span class="swatch" style="background:{colour}"></span>'
        f"{html.escape(name)}</span>"
        for name, colour in colours.items()
    )
    return f'<p class="legend">{items}</p>'
