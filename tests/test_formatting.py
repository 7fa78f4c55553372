"""Numbers and tables as every command shows them."""

import pytest

from jaxdist.runtime.formatting import numbers, tables


@pytest.mark.parametrize(
    ("show", "value", "expected"),
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
def test_numbers_are_formatted(show, value, expected):
    assert show(value) == expected


def test_labels_align_left_and_numbers_right():
    assert tables.columns([("a", "1", "22"), ("bbb", "333", "4")]) == [
        "a      1  22",
        "bbb  333   4",
    ]


def test_wrapped_lines_are_indented_below_their_label():
    lines = tables.wrap("one two --a.long-flag", 12, head="- ")
    assert lines == ["- one two", "  --a.long-flag"]
    assert tables.wrap("") == [""]
