"""Declaration of settings with bounds, and checks of their values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

_FLOAT32_MIN, _FLOAT32_MAX = 2.0**-126, 2.0**128 * (1 - 2.0**-24)
"""Magnitudes of a normal float32. Devices replace smaller ones by 0."""


class ConfigError(ValueError):
    """Raised for invalid settings or arguments; `problems` has one line for each error.

    Every line has the value, the allowed values and the fix. Commands print it and exit with 2.
    `heading` names the command or setting in a first line; "" = no first line.
    """

    def __init__(self, problems: str | list[str], *, heading: str = ""):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(_headed(heading, self.problems) if heading else self.problems))

    def _render_traceback_(self) -> list[str]:
        """Return the lines that a notebook shows: the problems, without a traceback."""
        return [f"{type(self).__name__}: {self}"]


_MAX_CHARS = 2000  # maximum length of one problem


def _headed(heading: str, problems: list[str]) -> list[str]:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = [f"{heading}: {count}; nothing was started."]
    half = _MAX_CHARS // 2
    for text in problems:
        if len(text) > _MAX_CHARS:
            text = f"{text[:half]} … ({len(text) - _MAX_CHARS} characters) … {text[-half:]}"
        lines.append(f"  - {text}")
    return lines


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Bounds of a number, or of each number of a list; None = no bound. NaN and Inf are invalid.

    At least `ge`, above `gt`, at most `le`, below `lt`.
    """

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def allow(self, value: Any) -> bool:
        """Return whether a value, or every item of a list, is within the bounds."""
        if isinstance(value, list | tuple):
            return all(map(self.allow, value))
        return (
            (isinstance(value, int) or math.isfinite(value))
            and (self.ge is None or value >= self.ge)
            and (self.gt is None or value > self.gt)
            and (self.le is None or value <= self.le)
            and (self.lt is None or value < self.lt)
        )

    def __str__(self) -> str:
        """Return the bounds in words: "1 or more", "above 0 and at most 1"."""
        ge, gt, le, lt = (
            str(n) if isinstance(n, int | None) else f"{n:g}"
            for n in (self.ge, self.gt, self.le, self.lt)
        )
        if self.le is None and self.lt is None:
            return f"{ge} or more" if self.ge is not None else f"above {gt}"
        low = [f"at least {ge}"] if self.ge is not None else []
        low = [f"above {gt}"] if self.gt is not None else low
        high = f"at most {le}" if self.le is not None else f"below {lt}"
        return " and ".join([*low, high])


@dataclasses.dataclass(frozen=True)
class Removed:
    """A removed setting: the value that is fixed now, and its replacement.

    A settings dataclass lists them by dotted name in a class variable `REMOVED`. The fixed value is
    accepted. Every other value is rejected with `fix`, except in the stored settings of a run if
    the setting did not change what the run computes.

    Attributes:
        value: the fixed value; None = every value is accepted.
        changes_results: a run with another value computed something else.
        item_of: name of a list setting; a true value adds the last part of the removed setting's
            name to it, and a false value removes it. "" = none.
    """

    value: Any
    fix: str
    changes_results: bool = False
    item_of: str = ""


def setting(
    default: Any,
    doc: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    required: bool = False,
    switch: tuple[str, str] | None = None,
) -> Any:
    """Declare a field of a settings dataclass.

    `doc` is one line of help: effect, unit, special values. The bounds (see `Bounds`) hold for each
    item of a list. The default of a `required` setting means that it is missing. `switch`: values
    that replace false and true of a setting that was a switch in older versions.
    """
    bounds = Bounds(ge, gt, le, lt) if (ge, gt, le, lt) != (None,) * 4 else None
    metadata = {"doc": doc, "bounds": bounds, "required": required, "switch": switch}
    if isinstance(default, list | dict):
        copy = lambda: type(default)(default)
        return dataclasses.field(default_factory=copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def problems_of(config: Any, section: str = "", *, deep: bool = True) -> list[str]:
    """Return every problem of settings and of their sections, one line each.

    A dataclass may have a method `problems` for rules between its settings. It is called if the
    settings of the section are within their bounds, and always for the outermost dataclass.
    `section` is the dotted name of `config`, "" = the outermost. `deep` includes inner sections.
    """
    out_of_bounds, inner = [], []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        name = f"{section}.{field.name}" if section else field.name
        bounds: Bounds | None = field.metadata.get("bounds")
        if dataclasses.is_dataclass(value) and deep:
            inner += problems_of(value, name)
        elif bounds is not None and value is not None and not bounds.allow(value):
            out_of_bounds.append(f"{name}={value} must be {bounds}. {_fix(field, bounds)}")
        elif wrong := list(outside_float32(value)):
            numbers = ", ".join(f"{number:g}" for number in wrong)
            out_of_bounds.append(
                f"{name}={value} has {numbers}, outside the range of float32. Use 0, or a number "
                f"whose magnitude is from {_FLOAT32_MIN:.3g} to {_FLOAT32_MAX:.3g}."
            )
    has_rules = hasattr(config, "problems") and not (out_of_bounds and section)
    return [*out_of_bounds, *inner, *(config.problems() if has_rules else [])]


def outside_float32(value: Any) -> Iterator[float]:
    """Yield the floats in a value, at any depth, that are neither normal float32 numbers nor 0."""
    if isinstance(value, float):
        if value and not _FLOAT32_MIN <= abs(value) <= _FLOAT32_MAX:
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from outside_float32(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from outside_float32(item)


def _fix(field: dataclasses.Field, bounds: Bounds) -> str:
    default = field.default
    if default in (dataclasses.MISSING, None) or not bounds.allow(default):
        return f"Use a number that is {bounds}."
    return f"The default is {default}: {field.metadata['doc']}."
