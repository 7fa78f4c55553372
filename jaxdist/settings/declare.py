"""How a setting is declared, with its bounds, and which settings of a dataclass break theirs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

_FLOAT32_LEAST, _FLOAT32_MOST = 2.0**-126, 2.0**128 * (1 - 2.0**-24)
"""Sizes of a normal float32. Devices replace smaller ones by 0."""


class ConfigError(ValueError):
    """What the user asked for breaks rules; `problems` lists all of them, one line each.

    Every line says what was given, what is allowed and the fix. Commands print it and exit 2.

    Args:
        problems: one, or several.
        asked: the command or setting that was asked for; the text then begins with a heading.
    """

    def __init__(self, problems: str | list[str], *, asked: str = ""):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(_headed(asked, self.problems) if asked else self.problems))


_LONGEST = 2000  # characters of one problem


def _headed(asked: str, problems: list[str]) -> list[str]:
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return [
        f"{asked}: {count} in what was asked for; nothing was started.",
        *(f"  - {_shortened(problem)}" for problem in problems),
    ]


def _shortened(problem: str) -> str:
    """Without the middle of what was given, where that is a text of many pages."""
    if len(problem) <= _LONGEST:
        return problem
    half = _LONGEST // 2
    left_out = f" … ({len(problem) - _LONGEST} characters) … "
    return problem[:half] + left_out + problem[-half:]


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What a number, or each number of a list, may be; None = no bound. Never NaN or infinite.

    At least `ge`, above `gt`, at most `le`, below `lt`.
    """

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def allow(self, value: Any) -> bool:
        """Whether a value, or every item of a list, is within."""
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
        """In words: "1 or more", "above 0 and at most 1"."""
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
    """

    value: Any
    fix: str
    changes_results: bool = False


def setting(
    default: Any,
    doc: str,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    required: bool = False,
) -> Any:
    """A field of a settings dataclass.

    `doc` is one line of help: what it does, its unit, what a special value means. The bounds (see
    `Bounds`) hold for each item of a list. The default of a `required` one means "not given".
    """
    bounds = Bounds(ge, gt, le, lt) if (ge, gt, le, lt) != (None,) * 4 else None
    metadata = {"doc": doc, "bounds": bounds, "required": required}
    if isinstance(default, list | dict):
        copy = lambda: type(default)(default)
        return dataclasses.field(default_factory=copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def problems_of(config: Any, section: str = "", *, deep: bool = True) -> list[str]:
    """Every problem of settings and of the sections in them, one line each; [] where there is none.

    A dataclass may have a method `problems`, for rules between its settings. It is asked where its
    own settings are within their bounds; that of the outermost dataclass always. `section` is the
    dotted name of `config`, "" = the outermost; only with `deep` its own sections are looked into.
    """
    bad, found = [], []
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        name = f"{section}.{field.name}" if section else field.name
        bounds: Bounds | None = field.metadata.get("bounds")
        if dataclasses.is_dataclass(value) and deep:
            found += problems_of(value, name)
        elif bounds is not None and value is not None and not bounds.allow(value):
            bad.append(f"{name}={value} must be {bounds}. {_fix(field, bounds)}")
        elif wrong := list(outside_float32(value)):
            numbers = ", ".join(f"{number:g}" for number in wrong)
            bad.append(
                f"{name}={value} has {numbers}, which float32 cannot hold. Use 0, or a finite "
                f"number of a size from {_FLOAT32_LEAST:.3g} to {_FLOAT32_MOST:.3g}."
            )
    rules = config.problems() if hasattr(config, "problems") and not (bad and section) else []
    return [*bad, *found, *rules]


def outside_float32(value: Any) -> Iterator[float]:
    """Yield the numbers in a value that would be NaN, infinite or 0 on a device, at any depth."""
    if isinstance(value, float):
        size = abs(value)
        if value and not _FLOAT32_LEAST <= size <= _FLOAT32_MOST:
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
