"""Schema of a settings dataclass: its sections, fields and kinds, and parsing of values.

A tree of frozen dataclasses is the schema. A field whose type is a dataclass is a section. A field
whose type is a union of dataclasses is a section whose `kind` (a `Literal` of one value in each)
selects one of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import tomllib
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from jaxdist.settings.declare import Bounds

Path = tuple[str, ...]
"""Names from the root to a field: ("train", "steps")."""


@dataclasses.dataclass(frozen=True)
class Field:
    """One setting: its path, its annotation, and the arguments of `declare.setting`."""

    path: Path
    type: Any
    default: Any
    doc: str
    bounds: Bounds | None = None
    required: bool = False
    switch: tuple[str, str] | None = None

    @property
    def name(self) -> str:
        """Dotted path: "train.global_batch_size"."""
        return ".".join(self.path)

    @property
    def flag(self) -> str:
        """The flag: "--train.global-batch-size"."""
        return flag_of(self.name)


class BadValueError(ValueError):
    """Raised for a value of a wrong type; the message describes what the field takes."""


def flag_of(name: str) -> str:
    """Return the flag of a setting. Flags have dashes, TOML keys have underscores."""
    return f"--{name.replace('_', '-')}"


@functools.cache
def types_of(cls: type) -> dict[str, Any]:
    """Return the annotation by field name, with strings resolved."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def kinds_of(annotation: Any) -> dict[str, type]:
    """Return the dataclass by kind of a section: {"": cls} without kinds; {} for a plain field."""
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return {"": annotation}
    parts = get_args(annotation) if _is_union(annotation) else ()
    if not parts or not all(dataclasses.is_dataclass(part) for part in parts):
        return {}
    return {get_args(types_of(part)["kind"])[0]: part for part in parts}


def fields_of(cls: type, prefix: Path = ()) -> Iterator[Field]:
    """Yield every plain field below `cls`, for all kinds of every section, in declared order."""
    for field in dataclasses.fields(cls):
        path = (*prefix, field.name)
        kinds = kinds_of(types_of(cls)[field.name])
        for kind in kinds.values():
            yield from fields_of(kind, path)
        if not kinds:
            about = {"doc": "", **field.metadata}
            yield Field(path, types_of(cls)[field.name], default_of(field), **about)


def default_of(field: dataclasses.Field) -> Any:
    """Return the default value of a field, or `dataclasses.MISSING`."""
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def read_value(raw: Any, annotation: Any) -> Any:
    """Parse a TOML value or the text of a flag.

    Args:
        raw: a TOML value, or `FlagText` with the characters after the flag.
        annotation: bool, int, float, str, Literal, X | None, X | Y (the first type that fits),
            list[X], tuple[X, ...] or dict. The text of a flag is a comma-separated list for
            list[X] and one item for tuple[X, ...] (texts that may contain commas); both also take
            TOML's `[a, b]`.
    """
    if _is_union(annotation):
        if isinstance(raw, FlagText) and raw in ("none", "None"):
            return None
        *others, last = (part for part in get_args(annotation) if part is not type(None))
        for part in others:
            with contextlib.suppress(BadValueError):
                return read_value(raw, part)
        return read_value(raw, last)
    if get_origin(annotation) is Literal:
        choices = get_args(annotation)
        for choice in choices:
            same = str(choice) == raw if isinstance(raw, FlagText) else choice == raw
            if same and (isinstance(raw, FlagText) or type(choice) is type(raw)):
                return choice
        raise BadValueError(f"is not a choice: {join_choices(choices)}")
    if is_list(annotation):
        return _read_list(raw, annotation)
    if get_origin(annotation) is dict or annotation is dict:
        value = _toml_value(raw) if isinstance(raw, FlagText) else raw
        if not isinstance(value, dict):
            raise BadValueError("is not a table of names and values, e.g. {width=8}")
        return value
    if isinstance(raw, FlagText):
        raw = _read_text(raw, annotation)
    if annotation in (int, float) and isinstance(raw, int) and abs(raw) >= 2**63:
        raise BadValueError("is too large: a whole number has 63 bits at most")
    if annotation is float and isinstance(raw, int) and not isinstance(raw, bool):
        return float(raw)
    if isinstance(raw, str) and "\0" in raw:
        raise BadValueError("contains a NUL character")
    if annotation is not Any and type(raw) is not annotation:
        raise BadValueError(f"is not {describe(annotation)}")
    return raw


class FlagText(str):
    """The text of a flag, parsed by the type of its field. TOML values already have a type."""

    __slots__ = ()


def describe(annotation: Any) -> str:
    """Describe the values of a field in words: "a whole number", "adamw, sgd or lion"."""
    if _is_union(annotation):
        parts = [part for part in get_args(annotation) if part is not type(None)]
        none = ", or none" if len(parts) < len(get_args(annotation)) else ""
        return " or ".join(map(describe, parts)) + none
    if get_origin(annotation) is Literal:
        return join_choices(get_args(annotation))
    if get_origin(annotation) in (list, tuple):
        return f"a list: each item {describe(get_args(annotation)[0])}"
    if get_origin(annotation) is dict:
        return "a table of names and values"
    return _WORDS.get(annotation, "a value")


def join_choices(choices: typing.Iterable[Any]) -> str:
    """Join as in `a, b or c`."""
    *most, last = [str(choice) for choice in choices]
    return f"{', '.join(most)} or {last}" if most else last


_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, types.UnionType)


def _read_text(text: FlagText, annotation: Any) -> Any:
    if annotation is bool:
        if text not in ("true", "false"):
            raise BadValueError("is not true or false")
        return text == "true"
    if annotation in (int, float):
        try:
            return annotation(text)
        except ValueError:
            raise BadValueError(f"is not {describe(annotation)}") from None
    if annotation is Any:
        return _toml_value(text)
    return str(text)


def _read_list(raw: Any, annotation: Any) -> Any:
    item_type = (get_args(annotation) or (Any,))[0]
    if isinstance(raw, FlagText):
        is_tuple = (get_origin(annotation) or annotation) is tuple
        parts = [raw] if is_tuple else [FlagText(part.strip()) for part in raw.split(",") if raw]
        raw = _toml_value(raw) if raw.startswith("[") else parts
    if not isinstance(raw, list):
        raise BadValueError(f"is not {describe(annotation)}")
    try:
        items = [read_value(item, item_type) for item in raw]
    except BadValueError as error:
        raise BadValueError(f"has an item that {error}") from None
    return tuple(items) if (get_origin(annotation) or annotation) is tuple else items


def _toml_value(text: str) -> Any:
    try:
        value = tomllib.loads(f"x = {text}\n")
    except (ValueError, RecursionError):  # not TOML, a number of 4300 digits, brackets in brackets
        return str(text)
    return value["x"] if len(value) == 1 else str(text)


def is_list(annotation: Any) -> bool:
    """Return whether a field is a list, whose flag may be repeated."""
    return get_origin(annotation) in (list, tuple) or annotation in (list, tuple)


def example(field: Field) -> str:
    """Return an example value of the field for a flag."""
    default = field.default
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, list | tuple):
        return ",".join(map(str, default)) or "a,b"
    if default is dataclasses.MISSING or default is None or default == "":
        return {int: "1", float: "1.0"}.get(field.type, "TEXT")
    if isinstance(default, float) and math.isfinite(default):
        return f"{default:g}"
    return str(default)
