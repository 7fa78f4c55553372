"""Numbers, tables and charts as every command shows them."""

import dataclasses
import re
from xml.etree import ElementTree

import pytest

from jaxdist.runtime.formatting import charts, html, numbers, tables


@pytest.mark.parametrize(
    ("show", "value", "shown"),
    [
        (numbers.in_bytes, 80 * 2**30, "80.0 GiB"),
        (numbers.in_bytes, 2**30 - 1, "1,024.0 MiB"),
        (numbers.in_bytes, 1536, "1.5 KiB"),
        (numbers.in_bytes, 0, "0 B"),
        (numbers.in_si, 8_030_261_248, "8.03B"),
        (numbers.in_si, 124_439_808, "124M"),
        (numbers.in_si, 999, "999"),
        (numbers.count, 1234.4, "1,234"),
        (numbers.count, 12.345, "12.35"),
        (numbers.duration, 0.0123, "12.3ms"),
        (numbers.duration, 59.9, "59.9s"),
        (numbers.duration, 59.96, "1m00s"),
        (numbers.duration, 7500, "2h05m"),
        (numbers.duration, 3 * 86400 + 4 * 3600, "3d04h"),
        (numbers.duration, float("inf"), "?"),
        (numbers.money, 0.0533, "0.0533"),
        (numbers.money, 12.5, "12.50"),
        (numbers.money, 9250.4, "9,250"),
        (numbers.percent, 0.4321, "43.2 %"),
        (lambda share: numbers.percent(share, 0, sign=True), 0.4321, "+43 %"),
        (lambda share: numbers.percent(share, 2, sign=True), -0.004321, "-0.43 %"),
        (numbers.rate, 3.35e12, "3.35 TB/s"),
        (numbers.rate, 27_400_000_000, "27.4 GB/s"),
        (numbers.rate, 850e6, "850 MB/s"),
        (numbers.rate, 12, "12.0 B/s"),
        (lambda ratio: numbers.relative_speed(ratio, 1.0), 1.09, "9 % slower"),
        (lambda ratio: numbers.relative_speed(1.0, ratio), 1.09, "9 % faster"),
        (lambda ratio: numbers.relative_speed(ratio, 1.0), 10.6, "10.6 times as slow"),
        (lambda ratio: numbers.relative_speed(1.0, ratio), 10.6, "10.6 times as fast"),
    ],
)
def test_numbers_have_one_form(show, value, shown):
    assert show(value) == shown


def test_columns_align_labels_left_and_numbers_right():
    assert tables.columns([("a", "1", "22"), ("bbb", "333", "4")]) == [
        "a      1  22",
        "bbb  333   4",
    ]


def test_wrapped_lines_hang_below_their_head():
    lines = tables.wrap("one two --a.long-flag", 12, head="- ")
    assert lines == ["- one two", "  --a.long-flag"]
    assert tables.wrap("") == [""]


def points_of(figure: str) -> list[list[float]]:
    svg = ElementTree.fromstring(re.search(r"<svg.*</svg>", figure, re.S)[0])
    (line,) = svg.iter("polyline")
    return [[float(x) for x in point.split(",")] for point in line.attrib["points"].split()]


def test_equal_factors_are_equal_distances_on_logarithmic_axes():
    line = charts.Line("l", "red", [(1, 1.0), (10, 10.0), (100, 100.0)], dots=True)
    (x1, y1), (x2, y2), (x3, y3) = points_of(
        charts.chart("t", [line], x_label="x", log_x=True, log_y=True)
    )
    assert x2 - x1 == pytest.approx(x3 - x2, abs=0.2)
    assert y1 - y2 == pytest.approx(y2 - y3, abs=0.2)


@pytest.mark.parametrize(("low", "high"), [(1, 1), (0.03, 0.04), (7, 7000), (1e-6, 2e-6)])
def test_logarithmic_ticks_span_the_data(low, high):
    found = charts.log_ticks(low, high)
    assert found[0] <= low * (1 + 1e-9) and found[-1] >= high * (1 - 1e-9)
    assert found == sorted(set(found)) and len(found) >= 2


@pytest.mark.parametrize(("low", "high"), [(24.5, 26.8), (1, 3.9), (0.9, 1.1), (8e6, 9e6)])
def test_values_close_together_have_ticks_between_them(low, high):
    found = charts.log_ticks(low, high)
    assert sum(low <= tick <= high for tick in found) >= 3 and min(found) > 0


def test_lines_have_colours_of_their_own():
    assert len({charts.colour_of(index) for index in range(60)}) == 60


def test_a_logarithmic_axis_leaves_out_what_is_not_above_0():
    line = charts.Line("l", "red", [(1, 1.0), (2, 0.0), (3, 10.0)], dots=True)
    figure = charts.chart("t", [line], x_label="x", log_y=True)
    assert len(points_of(figure)[0]) == 2
    assert (
        charts.chart("t", [dataclasses.replace(line, points=[(1, -1.0)])], x_label="x", log_y=True)
        == ""
    )


def test_columns_of_sentences_stand_to_the_left():
    table = html.table(["mesh", "s", "why"], [("a", "1", "x" * 50), ("b", "2", "y")])
    for part in ('<th class="text">why<', '<td class="text">y<', "<th>s<", "<td>2<"):
        assert part in table


def test_what_users_name_cannot_break_a_page():
    table = html.table(["<i>", "b"], [("<script>", "&")])
    page = html.page("<b>", [table])
    assert "<script>" not in page and "&lt;script&gt;" in page and "&lt;b&gt;" in page
