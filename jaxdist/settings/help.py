"""`--help`: every setting with its type, choices, default and meaning, in 100 columns."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin

from jaxdist.settings.declare import ConfigError
from jaxdist.settings.schema import Field, fields_of, flag_of, kinds_of, types_of

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
        return "\n\n".join(_section(name, *groups[name]) for name in chosen)
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
        *(_section(name, *group) for name, group in groups.items()),
    ]
    return "\n\n".join(part for part in parts if part.strip())


_SHORT_RULES = "Lists are comma-separated: a,b,c. A true|false flag without a value means true."
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
    """Yield the groups outside of sections, starting with settings that the command adds."""
    own = [f for f in fields if f.name in spelled or f.name in vars(cls).get("__annotations__", {})]
    inherited = [f for f in fields if f not in own]
    yield _group("Options of this command" if inherited else "Options", own, spelled)
    yield _group("General", inherited, spelled)


def _section(heading: str, doc: str, fields: list[Field]) -> str:
    return _group(f"{heading}: {doc}", fields, {})


def _group(title: str, fields: list[Field], spelled: Mapping[str, str]) -> str:
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
