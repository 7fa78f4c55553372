"""Read settings of all sources into one dataclass; report all problems in one error."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar, get_args, get_origin

from jaxdist.settings.declare import ConfigError, Removed, problems_of
from jaxdist.settings.schema import (
    BadValueError,
    Field,
    FlagText,
    Path,
    default_of,
    default_text,
    describe,
    fields_of,
    flag_of,
    help_text,
    is_list,
    join_choices,
    kind_of_value,
    kinds_of,
    read_value,
    types_of,
    usage,
)
from jaxdist.settings.sources import (
    Input,
    flatten,
    program_inputs,
    read_file,
    split_arguments,
)

T = TypeVar("T")

InputValues: TypeAlias = Mapping[str, Any]
"""Dotted name of every setting that was set -> its value in TOML, flag (or None) or program."""


def read_settings(cls: type[T], argv: Sequence[str], **options: Any) -> T:
    """Return the settings of a command; `options` are those of `read_with_origins`."""
    return read_with_origins(cls, argv, **options)[0]


def read_with_origins(
    cls: type[T],
    argv: Sequence[str],
    *,
    command: str,
    summary: str = "",
    aliases: Mapping[str, str] | None = None,
    positional: Sequence[str] = (),
    rest: str = "",
    base: T | Callable[[InputValues], T | None] | None = None,
    settle: Callable[[T], T] = lambda config: config,
    check_rules: bool = True,
    is_stored: bool = False,
    values: Mapping[str, Any] | None = None,
    read_url: Callable[[str], bytes] | None = None,
) -> tuple[T, dict[str, str]]:
    """Return the settings of a command, and dotted name -> origin of those that were set.

    Later sources override earlier ones: the defaults of `cls` (or `base`), `--config FILE.toml`,
    the command line, `values`. An origin is e.g. "flag --steps".

    Args:
        cls: a frozen dataclass; its fields may be sections (dataclasses) themselves.
        argv: arguments without the name of the program.
        command: for help and messages, e.g. "jaxdist.train".
        summary: first lines of `--help`.
        aliases: short name -> dotted name, e.g. {"steps": "train.steps"}.
        positional: dotted names of the positional arguments, in order; a list, which must be the
            last, takes all remaining ones.
        rest: name of the list that takes the arguments after `--`; "" = they are rejected.
        base: settings that replace the defaults (e.g. of a stored run), or a function of the
            values that returns such settings or None.
        settle: replaces values by their permanent form before rules are checked. Values that it
            cannot replace must be rejected by a rule.
        check_rules: also check rules and bounds, not only types.
        is_stored: these are the stored settings of a run; see `Removed`.
        values: settings of a Python program; see `program_inputs`.
        read_url: returns the content of a `--config` that is a URL; None = URLs are rejected.

    Raises:
        ConfigError: every problem, below a heading.
        SystemExit: `--help [SECTION]`, after printing it; code 0.
    """
    aliases = aliases or {}
    switches = {field.path for field in fields_of(cls) if field.type is bool}
    arguments = split_arguments(argv, aliases, switches.__contains__)
    if arguments.help is not None:
        try:
            print(help_text(cls, command, summary, aliases, positional, rest, arguments.help))
        except ConfigError as error:
            raise ConfigError(error.problems, heading=command) from None
        raise SystemExit(0)
    inputs, problems = _gather(arguments.files, read_url)
    words, word_problems = _positional_values(cls, arguments.positional, positional)
    inputs += [*words, *arguments.flags]
    if arguments.rest and rest:
        inputs.append(Input((rest,), arguments.rest, "arguments after --"))
    elif arguments.rest:
        text = " ".join(arguments.rest)
        problems.append(f"arguments after -- ({text}) are not used here. Remove them.")
    inputs += program_inputs(values or {}, aliases)
    if callable(base):
        try:
            base = base({".".join(one.path): one.raw for one in inputs})
        except ConfigError as error:
            raise ConfigError(error.problems, heading=command) from None
        except (OSError, ValueError) as error:  # an invalid path: too long, or with NUL
            raise ConfigError(_invalid_path(error), heading=command) from None
    hint = "Arguments of the program follow --." if rest else "See --help."
    hint = hint if values is None else "See docs/settings.md."
    reader = _Reader(cls, base, inputs, aliases, hint, is_stored)
    config = reader.read()
    try:
        config = settle(config)
    except ConfigError as error:  # a rule reports this error with its origin
        problems += [] if check_rules else error.problems
    problems += [*word_problems, *reader.problems]
    problems += _missing(cls, config, command, positional, rest)
    try:
        rules = problems_of(config) if check_rules else []
    except OSError as error:
        rules = [_invalid_path(error)]
    rules = [p for p in rules if not reader.concerns_bad_value(p)]
    problems += [reader.with_origin(p) for p in rules]
    if problems:
        raise ConfigError(problems, heading=command)
    return config, reader.origins


def _invalid_path(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"path {str(error.filename)!r} cannot be used ({error.strerror}). Use another one."
    return f"a path cannot be used ({error}). Use another one."


def _gather(
    files: Sequence[str], read_url: Callable[[str], bytes] | None
) -> tuple[list[Input], list[str]]:
    if len(files) > 1:
        return [], [f"--config occurs {len(files)} times ({', '.join(files)}). Use one file."]
    for file in files:
        table, problems, text = read_file(file, read_url)
        return flatten(table, file, text), problems
    return [], []


def _positional_values(
    cls: type, words: Sequence[str], names: Sequence[str]
) -> tuple[list[Input], list[str]]:
    fields = {field.name: field for field in fields_of(cls)}
    takes_all = bool(names) and is_list(fields[names[-1]].type)
    slots = [*names, *[name for name in names[-1:] for _ in words]] if takes_all else list(names)
    inputs = [
        Input(
            fields[name].path,
            [word] if is_list(fields[name].type) else FlagText(word),
            f"argument {word!r}",
        )
        for word, name in zip(words, slots, strict=False)
    ]
    takes = f"takes {' '.join(names).upper()}" if names else "takes flags only"
    problems = [
        f"argument {word!r} is one too many: the command {takes}. "
        "Settings are --name=value, see --help."
        for word in words[len(slots) :]
    ]
    return inputs, problems


def _missing(
    cls: type, config: Any, command: str, positional: Sequence[str], rest: str
) -> list[str]:
    return [
        f"{field.name.upper() if field.name in positional else field.flag} is missing: "
        f"{field.doc}. Use {usage(command, positional, rest)}."
        for field in fields_of(cls)
        if field.required and getattr(config, field.name) == field.default
    ]


_TYPED = ("flag", "argument")  # prefixes of the origins on the command line


class _Reader:
    def __init__(
        self,
        cls: type,
        base: Any,
        inputs: list[Input],
        aliases: Mapping[str, str],
        hint: str,
        is_stored: bool,
    ):
        self.cls, self.base, self.inputs, self.aliases = cls, base, inputs, aliases
        self.hint = hint  # the end of messages about unknown settings
        self.is_stored = is_stored
        self.problems: list[str] = []
        self.values: dict[Path, Any] = {}
        self.origins: dict[str, str] = {}
        self.bad: set[str] = set()
        self.kinds: dict[Path, str] = {}
        self.items: list[tuple[Path, str, bool]] = []  # list, item, whether it contains the item

    def read(self) -> Any:
        # 1. The kind of a section decides which fields it has. 2. Values are assigned to fields.
        self._read_kinds()
        skipped: set[Path] = set()
        removed = getattr(self.cls, "REMOVED", {})
        for one in self.inputs:
            if setting := removed.get(".".join(one.path)):
                self._check_removed(one, setting)
            else:
                self._assign(one, skipped)
        for path, item, is_in in self.items:
            default = next(field.default for field in fields_of(self.cls) if field.path == path)
            base = default if self.base is None else functools.reduce(getattr, path, self.base)
            others = [other for other in self.values.get(path, base) if other != item]
            self.values[path] = [item, *others] if is_in else others
        return self._build(self.cls, self.base, ())

    def concerns_bad_value(self, problem: str) -> bool:
        for name in self.bad:
            last = name.rsplit(".", 1)[-1]
            if re.search(rf"\b{re.escape(name)}\b|\b{last}=", problem):
                return True
        return False

    def with_origin(self, problem: str) -> str:
        for name in re.findall(r"\b[a-z_]\w*(?:\.\w+)*\b", problem):
            if name in self.origins:
                return f"{problem} [{name}: {self.origins[name]}]"
        return problem

    def _read_kinds(self) -> None:
        for field in dataclasses.fields(self.cls):
            kinds = kinds_of(types_of(self.cls)[field.name])
            if kinds and "" not in kinds:
                base = default_of(field) if self.base is None else getattr(self.base, field.name)
                default = next(iter(kinds)) if base is dataclasses.MISSING else base.kind
                self.kinds[(field.name,)] = self._kind(field.name, kinds, default)

    def _kind(self, name: str, kinds: Mapping[str, type], kind: str) -> str:
        for one in self.inputs:
            if one.path != (name, "kind"):
                continue
            if isinstance(one.raw, str) and one.raw in kinds:
                kind = str(one.raw)
            else:
                hint = _did_you_mean(str(one.raw), kinds) or f" The default is {kind}."
                self.problems.append(
                    f"{name}.kind={one.raw!r} ({one.origin}) is not a choice: "
                    f"{join_choices(kinds)}.{hint}"
                )
                self.bad.add(name)
        return kind

    def _assign(self, one: Input, skipped: set[Path]) -> None:
        cls = self.cls
        for depth, name in enumerate(one.path):
            here = one.path[: depth + 1]
            if name not in types_of(cls):
                self._unknown(one, here, cls, skipped)
                return
            kinds = kinds_of(types_of(cls)[name])
            if kinds:
                cls = kinds[self.kinds.get(here, "")]
                if ".".join(here) in self.bad:
                    return  # the kind is invalid, so the fields are unknown
                continue
            field = next(f for f in fields_of(cls, here[:-1]) if f.path == here)
            self._set(field, one, one.path[depth + 1 :])
            return
        self._is_section(one, cls)

    def _check_removed(self, one: Input, setting: Removed) -> None:
        """Report the value of a removed setting unless `Removed` accepts it; collect items."""
        if setting.value is None:
            return
        is_ignored = self.is_stored and not setting.changes_results
        raw = True if one.raw is None and isinstance(setting.value, bool) else one.raw
        try:
            value = read_value(raw, type(setting.value))
        except BadValueError:
            value = None
        if setting.item_of and value is not None:
            self.items.append((tuple(setting.item_of.split(".")), one.path[-1], value))
        elif value != setting.value and not is_ignored:
            is_fixed = not setting.item_of and setting.value != ""
            fixed = f" Its value is always {setting.value!r} now." if is_fixed else ""
            self.problems.append(
                f"{'.'.join(one.path)}={one.raw!r} ({one.origin}): the setting was removed."
                f"{fixed} {setting.fix}"
            )

    def _set(self, field: Field, one: Input, inside: Path) -> None:
        if field.switch and (isinstance(one.raw, bool) or one.raw in (None, "true", "false")):
            one = dataclasses.replace(one, raw=field.switch[one.raw not in (False, "false")])
        is_bare_switch = one.raw is None and field.type is bool
        if one.raw is None and not is_bare_switch:
            self.bad.add(field.name)
            self.problems.append(
                f"{field.flag} has no value: {describe(field.type)} is needed. "
                f"Use {field.flag}={kind_of_value(field.type)}."
            )
            return
        if inside and not isinstance(field.default, dict):
            self._unknown(one, one.path, self.cls, set())
            return
        try:
            if inside:
                table = dict(self.values.get(field.path, field.default))
                self.values[field.path] = _insert(table, inside, read_value(one.raw, Any))
            else:
                value = True if is_bare_switch else read_value(one.raw, field.type)
                self.values[field.path] = self._after_earlier_flag(field, one, value)
        except BadValueError as error:
            self.bad.add(field.name)
            choices = get_args(field.type) if get_origin(field.type) is Literal else ()
            hint = _did_you_mean(str(one.raw), map(str, choices))
            self.problems.append(
                f"{field.name}={one.raw!r} ({one.origin}) {error}."
                + (hint or f" The default is {default_text(field)}: {field.doc}.")
            )
        self.origins[field.name] = one.origin

    def _after_earlier_flag(self, field: Field, one: Input, value: Any) -> Any:
        """Return `value` after that of an earlier flag of a list; report other repetitions."""
        earlier = self.origins.get(field.name, "")
        if not (earlier.startswith(_TYPED) and one.origin.startswith(_TYPED)):
            return value
        if is_list(field.type):
            return self.values[field.path] + value
        self.problems.append(
            f"{field.name} is set twice ({earlier}, {one.origin}): one value is needed. "
            "Remove one of them."
        )
        return value

    def _unknown(self, one: Input, here: Path, cls: type, skipped: set[Path]) -> None:
        if here in skipped:  # one message for an unknown section
            return
        in_file = not one.origin.startswith(_TYPED)
        in_section = in_file and len(here) < len(one.path)
        if in_section:
            skipped.add(here)
        name = ".".join(here if in_file else one.path)
        names = [field.name for field in fields_of(self.cls)]
        if cls is not self.cls:
            # Prefer fields of this kind: another kind of `[model]` may use the same name.
            near = [field.name for field in fields_of(cls, here[:-1])]
            names = near + [n for n in names if n not in near and not n.startswith(here[0] + ".")]
        sections = [n for n, t in types_of(self.cls).items() if kinds_of(t)]
        candidates = sections if in_section and len(here) == 1 else names
        spell = str if in_file else flag_of
        mean = _did_you_mean(name, [*candidates, *self.aliases], spell)
        kind = self.kinds.get(here[:-1])
        of_kind = f" of kind {kind}" if kind else ""
        origin = one.origin if len(here) == len(one.path) else one.section_origin
        label = f"{name} ({origin})" if in_file else flag_of(name)
        fix = mean or (f" Sections: {', '.join(sections)}." if sections else "")
        self.problems.append(f"{label} is not a setting{of_kind}.{fix} {self.hint}")

    def _is_section(self, one: Input, cls: type) -> None:
        name = ".".join(one.path)
        target = self.aliases.get(name)
        fix = (
            f"Use {target}"
            if target
            else f"Its fields are {', '.join(list(types_of(cls))[:6])}, …: use {name}.FIELD"
        )
        self.problems.append(
            f"{name}={one.raw!r} ({one.origin}) assigns a value to a section. {fix}."
        )

    def _build(self, cls: type, base: Any, prefix: Path) -> Any:
        values = {}
        for name, annotation in types_of(cls).items():
            path, kinds = (*prefix, name), kinds_of(annotation)
            current = getattr(base, name) if base is not None else None
            if kinds:
                chosen = kinds[self.kinds.get(path, "")]
                start = current if isinstance(current, chosen) else None
                values[name] = self._build(chosen, start, path)
            elif path in self.values:
                values[name] = self.values[path]
            elif base is not None:
                values[name] = current
        return cls(**values)


def _insert(table: dict[str, Any], path: Path, value: Any) -> dict[str, Any]:
    if len(path) == 1:
        return {**table, path[0]: value}
    return {**table, path[0]: _insert(dict(table.get(path[0], {})), path[1:], value)}


def _did_you_mean(text: str, names: Iterable[str], spell: Callable[[str], str] = str) -> str:
    """Return " Did you mean ...?" with the closest names; "" if none is close."""
    names = list(dict.fromkeys(names))
    close = difflib.get_close_matches(text, names, n=2, cutoff=0.75)
    if not close:
        last = text.rsplit(".", 1)[-1]
        ends = {name: name.rsplit(".", 1)[-1] for name in names}
        near = difflib.get_close_matches(last, set(ends.values()), n=1, cutoff=0.75)
        close = [name for name, end in ends.items() if end == last]
        close = close or [name for name, end in ends.items() if end in near or last in end]
    return f" Did you mean {join_choices(map(spell, close[:3]))}?" if close else ""
