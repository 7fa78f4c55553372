"""Schema of a settings dataclass: its sections, fields and kinds, and parsing of values.

A tree of frozen dataclasses is the schema. A field whose type is a dataclass is a section. A field
whose type is a union of dataclasses is a section whose `kind` (a `Literal` of one value in each)
selects one of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import textwrap
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin

from jaxdist.settings.declare import Bounds, ConfigError

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
    """Raised for a value that a field does not take; the message gives the reason."""


def flag_of(name: str) -> str:
    """Return the flag of a setting. Flags have dashes, TOML keys have underscores."""
    return f"--{name.replace('_', '-')}"


@functools.cache
def types_of(cls: type) -> dict[str, Any]:
    """Return field name -> annotation of a dataclass, with strings resolved."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def kinds_of(annotation: Any) -> dict[str, type]:
    """Return kind -> dataclass of a section, {"": cls} without kinds; {} for a plain field."""
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
    """Parse a TOML value or the text of a flag; raise `BadValueError` if it does not fit.

    Args:
        raw: a TOML value, or `FlagText` with the characters after the flag.
        annotation: bool, int, float, str, Literal, X | None, X | Y (the first type that fits),
            list[X], tuple[X, ...], dict or Any. The text of a flag is a comma-separated list for
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
    """Return the choices as text: `a, b or c`."""
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
        listed = _toml_value(raw) if raw.startswith("[") else parts
        raw = parts if is_tuple and not isinstance(listed, list) else listed  # "[INST] Hi"
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


WIDTH = 100


def usage(command: str, positional: Sequence[str] = (), rest: str = "") -> str:
    """Return the usage of a command: "python -m jaxdist.evaluate RUN"."""
    words = [f"python -m {command}", *(name.upper() for name in positional)]
    return " ".join(words + ["--", rest.upper()] * bool(rest))


def help_text(
    cls: type,
    command: str,
    summary: str,
    aliases: Mapping[str, str],
    positional: Sequence[str] = (),
    rest: str = "",
    section: str = "",
) -> str:
    """Return the help of a command, or of one section of its settings."""
    groups = dict(groups_of(cls))
    names = ", ".join(dict.fromkeys(name.split(" ")[0] for name in groups if name))
    if section:
        chosen = [name for name in groups if name.split(" ")[0] == section]
        if not chosen:
            raise ConfigError(f"--help {section}: unknown section. Use one of {names}.")
        return "\n\n".join(_group(f"{n}: {groups[n][0]}", groups[n][1]) for n in chosen)
    spelled = {name: name.upper() for name in positional} | ({rest: f"-- {rest.upper()}"})
    flags = (
        " [--config FILE.toml|NAME] [--SECTION.NAME=VALUE ...]" if names else " [--NAME=VALUE ...]"
    )
    short = ", ".join(f"{flag_of(short)} = {flag_of(name)}" for short, name in aliases.items())
    parts = [
        f"usage: {usage(command, positional)}{flags}{f' -- {rest.upper()}' if rest else ''}",
        # Indented paragraphs are commands, which are not wrapped.
        *(p if p.startswith(" ") else _wrap(p, "") for p in summary.strip("\n").split("\n\n")),
        _wrap(_RULES if names else _SHORT_RULES, ""),
        _wrap(f"Short flags: {short}." if short else "", ""),
        _wrap(f"--help SECTION prints one of: {names}." if names else "", ""),
        *_root(cls, groups.pop("")[1], spelled),
        *(_group(f"{name}: {doc}", fields) for name, (doc, fields) in groups.items()),
    ]
    return "\n\n".join(part for part in parts if part.strip())


_SHORT_RULES = (
    "X,... is a comma-separated list: a,b,c. A true|false flag without a value means true."
)
_RULES = (
    f"Flags override the file, the file overrides the defaults. {_SHORT_RULES} In a file, names "
    "have underscores: --train.global-batch-size is global_batch_size in [train]."
)


def groups_of(cls: type) -> Iterator[tuple[str, tuple[str, list[Field]]]]:
    """Yield (heading, (doc, fields)) of the root and of each section and kind.

    The field `kind` is listed once, in the first kind, with all kinds as choices.
    """
    plain = [f for f in fields_of(cls) if len(f.path) == 1]
    yield "", (_doc(cls), plain)
    for name, annotation in types_of(cls).items():
        kinds = kinds_of(annotation)
        fields = {kind: list(fields_of(section, (name,))) for kind, section in kinds.items()}
        chooses = [f for of_kind in fields.values() for f in of_kind if f.path[1:] == ("kind",)]
        for kind, section in kinds.items():
            rest = [f for f in fields[kind] if f not in chooses]
            if chooses and kind == next(iter(kinds)):
                literal: Any = Literal
                docs = "; ".join(field.doc for field in chooses)
                choice = dataclasses.replace(chooses[0], type=literal[tuple(kinds)], doc=docs)
                rest.insert(0, choice)
            yield f"{name} (kind = {kind})" if kind else name, (_doc(section), rest)


def _doc(cls: type) -> str:
    return (cls.__doc__ or "").strip().splitlines()[0] if cls.__doc__ else ""


def _root(cls: type, fields: list[Field], spelled: Mapping[str, str]) -> Iterator[str]:
    own = [f for f in fields if f.name in spelled or f.name in vars(cls).get("__annotations__", {})]
    inherited = [f for f in fields if f not in own]
    yield _group("Options of this command" if inherited else "Options", own, spelled)
    yield _group("General", inherited, spelled)


def _group(title: str, fields: list[Field], spelled: Mapping[str, str] = {}) -> str:
    if not fields:
        return ""
    # Positional arguments come first.
    ordered = sorted(fields, key=lambda field: field.name not in spelled)
    return "\n".join([_wrap(title, "", hanging="  "), *(_field(f, spelled) for f in ordered)])


def _field(field: Field, spelled: Mapping[str, str]) -> str:
    flag, kind = spelled.get(field.name, field.flag), kind_of_value(field.type)
    line = f"  {flag} {kind} = {default_text(field)}"
    return "\n".join([_wrap(line, "", hanging="      "), _wrap(field.doc, "      ")])


def kind_of_value(annotation: Any) -> str:
    """Return the kind of value of a type, e.g. "INT", "{adamw,sgd}"."""
    if get_origin(annotation) is Literal:
        return "{" + ",".join(str(choice) for choice in get_args(annotation)) + "}"
    if get_origin(annotation) in (list, tuple):
        item = kind_of_value(get_args(annotation)[0])
        return f"{item},..." if (get_origin(annotation) is list) else f"{item} (repeatable)"
    if get_origin(annotation) is dict:
        return "{NAME=VALUE,...}"
    if parts := get_args(annotation):
        kinds = ["none" if part is type(None) else kind_of_value(part) for part in parts]
        return "|".join(kinds)
    return {bool: "true|false", int: "INT", float: "NUMBER", str: "TEXT"}.get(annotation, "VALUE")


def default_text(field: Field) -> str:
    """Return the default of a setting in words."""
    default = field.default
    if field.required or default is dataclasses.MISSING:
        return "(required)"
    if isinstance(default, bool):
        return str(default).lower()
    if isinstance(default, list | tuple):
        return ",".join(map(str, default)).replace("\n", "\\n") or "(empty)"
    if default == {} or default == "":
        return "(empty)"
    return "none" if default is None else str(default)


def _wrap(text: str, indent: str, hanging: str | None = None) -> str:
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent=indent,
        subsequent_indent=indent if hanging is None else hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
