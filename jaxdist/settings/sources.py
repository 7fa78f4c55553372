"""Sources of settings: a TOML file, flags and programs, each value with its origin; TOML text."""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

from jaxdist.settings.declare import ConfigError
from jaxdist.settings.schema import FlagText, Path

NAMED_FILES = FilePath(__file__).parents[1] / "config" / "named"
"""Configs of the package: `--config llama3_8b` needs no path."""


@dataclasses.dataclass(frozen=True)
class Input:
    """One value of a setting with its origin.

    Attributes:
        raw: TOML value, or `FlagText`; None for a flag without a value.
        origin: e.g. "flag --train.steps", "argument 'x'", "run.toml line 12", "keyword steps".
        section_origin: line at which the outermost section begins in a file.
    """

    path: Path
    raw: Any
    origin: str
    section_origin: str = ""


@dataclasses.dataclass
class Arguments:
    """A parsed command line: `files` are the values of `--config`, `rest` follows `--`.

    `help` is None without `--help`, else the requested section ("" = everything).
    """

    files: list[str] = dataclasses.field(default_factory=list)
    flags: list[Input] = dataclasses.field(default_factory=list)
    positional: list[str] = dataclasses.field(default_factory=list)
    rest: list[str] = dataclasses.field(default_factory=list)
    help: str | None = None


def split_arguments(
    argv: Sequence[str], aliases: Mapping[str, str], is_switch: Callable[[Path], bool]
) -> Arguments:
    """Parse `--a.b=value`, `--a.b value`, bare `--a.b`, `--config FILE`, `--help [SECTION]`, `--`.

    Dashes inside names become underscores (`--run-dir` is `run_dir`); `aliases` map short flags to
    dotted names. The next word is the value of a flag unless it starts with `--`. After a switch
    (`is_switch`) it is the value only if it is true or false.
    """
    path_of = lambda name: tuple(aliases.get(name, name).split("."))
    end = list(argv).index("--") if "--" in argv else len(argv)
    parsed = Arguments(rest=list(argv[end + 1 :]))
    for flag in split_flags(argv[:end], lambda name: is_switch(path_of(name))):
        word = flag.words[0]
        if flag.name == "help":
            parsed.help = flag.value or ""
        elif flag.name == "config":
            parsed.files.append(flag.value or "")
        elif flag.name:
            raw = None if flag.value is None else FlagText(flag.value)
            parsed.flags.append(Input(path_of(flag.name), raw, f"flag {word.partition('=')[0]}"))
        else:
            parsed.positional.append(word)
    return parsed


def _take_value(word: str, following: list[str], is_switch: bool = False) -> str | None:
    _, equals, text = word.partition("=")
    if equals:
        return text
    if not following:
        return None
    follows = following[0] in ("true", "false") if is_switch else following[0][:2] != "--"
    return following.pop(0) if follows else None


@dataclasses.dataclass(frozen=True)
class FlagWords:
    """A flag and its value on a command line that is not parsed here, with the original words.

    `name` is that of the flag, with underscores; "" for words that are not a flag.
    """

    name: str
    value: str | None
    words: tuple[str, ...]


def split_flags(
    argv: Sequence[str], is_switch: Callable[[str], bool] = lambda name: False
) -> list[FlagWords]:
    """Return the flags and other words of a command line, in order; `-h` is `--help`."""
    flags, following = [], list(argv)
    while following:
        word = following.pop(0)
        if word == "--":
            flags += [FlagWords("", None, (rest,)) for rest in (word, *following)]
            break
        name = ""
        if word.startswith("--") or word == "-h":
            name = "help" if word == "-h" else word[2:].partition("=")[0].replace("-", "_")
        before = len(following)
        value = _take_value(word, following, is_switch(name)) if name else None
        words = (word,) if len(following) == before else (word, value or "")
        flags.append(FlagWords(name, value, words))
    return flags


def value_of(argv: Sequence[str], *names: str) -> str | None:
    """Return the last value of flags of these names; "" without a value, None without a flag."""
    values = [flag.value or "" for flag in split_flags(argv) if flag.name in names]
    return values[-1] if values else None


def without_flags(argv: Sequence[str], *names: str) -> list[str]:
    """Return the command line without the flags of these names and their values."""
    kept = (flag.words for flag in split_flags(argv) if flag.name not in names)
    return [word for words in kept for word in words]


def program_inputs(values: Mapping[str, Any], aliases: Mapping[str, str]) -> list[Input]:
    """Return the settings of a Python program, one `Input` each, from names or nested tables.

    `values` are e.g. {"steps": 10, "optim.peak_lr": 1e-3, "train": {"seq_len": 64}}. `aliases` map
    short names to dotted names.
    """
    inputs: list[Input] = []

    def walk(node: Mapping[str, Any], prefix: Path) -> None:
        for name, value in node.items():
            is_table = isinstance(value, Mapping)
            dotted = aliases.get(name, name) if not prefix and not is_table else name
            path = (*prefix, *str(dotted).split("."))
            if is_table and value:
                walk(value, path)
            else:
                origin = f"keyword {path[0]}"
                inputs.append(Input(path, _as_toml(value), origin, origin))

    walk(values, ())
    return inputs


def _as_toml(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, tuple | list):
        return [_as_toml(item) for item in value]
    if getattr(value, "ndim", None) == 0:  # a scalar of numpy
        return value.item()
    return dict(value) if isinstance(value, Mapping) else value


def read_file(
    file: str, read_url: Callable[[str], bytes] | None = None
) -> tuple[dict[str, Any], list[str], str]:
    """Return the table, the problems and the text of a TOML file, or of one in `NAMED_FILES`.

    `file` is a path, a name or a URL. `read_url` returns the content of a URL; None = reject URLs.
    """
    path = FilePath(file)
    if not path.is_file() and (NAMED_FILES / f"{file}.toml").exists():
        path = NAMED_FILES / f"{file}.toml"
    if not file:
        problem = "--config has no value: the path of a TOML file is needed. Use --config=FILE."
        return {}, [problem], ""
    try:
        if re.match("[a-z][a-z0-9+]*:/", file):
            if read_url is None:
                return {}, [f"--config {file} is a URL. Give the path of a TOML file."], ""
            text = read_url(file).decode()
            return tomllib.loads(text), [], text
        if not path.exists():
            near = _files_like(path)
            return {}, [f"--config {file} does not exist: a TOML file is needed. {near}"], ""
        if not (path.is_file() or path.is_dir()) or path.stat().st_size > _FILE_BYTES:
            return {}, [f"--config {file} is not a TOML file of at most 16 MiB. Give its path."], ""
        text = path.read_bytes().decode("utf-8-sig")
        return tomllib.loads(text), [], text
    except ConfigError as error:  # a URL that cannot be used
        return {}, [f"--config {problem}" for problem in error.problems], ""
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        return {}, [f"--config {file} cannot be read: {reason}. Give a readable TOML file."], ""
    except (ValueError, RecursionError) as error:
        reason = str(error)[:1].lower() + str(error)[1:]
        problem = (
            f"--config {file} is not TOML: {reason}. Use [train] for sections, and steps = 400, "
            'name = "text", flag = true for values.'
        )
        return {}, [problem], ""


def flatten(table: Mapping[str, Any], file: str, text: str) -> list[Input]:
    """Return each value of a TOML table with its path and line; tables in arrays stay values.

    A path may lead into a field that is a table (`[model.args]`); the reader joins those.
    """
    lines = _lines_of(text)
    inputs = []

    def walk(node: Mapping[str, Any], prefix: Path) -> None:
        for name, value in node.items():
            path = (*prefix, name)
            if isinstance(value, dict) and value and len(path) < _MAX_DEPTH:
                walk(value, path)
                continue
            starts = [path[:n] for n in range(len(path), 0, -1) if path[:n] in lines]
            origins = [f"{file} line {lines[start]}" for start in starts] or [file]
            inputs.append(Input(path, value, origins[0], origins[-1]))

    walk(table, ())
    return inputs


_FILE_BYTES = 16 << 20
_MAX_DEPTH = 100  # maximum depth of nested tables; more could exceed Python's recursion limit
_HEADER = re.compile(r"^\s*\[\s*([^\[\]]+?)\s*\]\s*(#.*)?$")
_KEY = re.compile(r"^\s*([A-Za-z0-9_\-\"'.\s]+?)\s*=")


def _lines_of(text: str) -> dict[Path, int]:
    """Return the line (from 1) of headers and keys by path, for messages."""
    lines: dict[Path, int] = {}
    section: Path = ()
    for number, line in enumerate(text.split("\n"), start=1):
        if header := _HEADER.match(line):
            section = _names(header[1])
            lines.setdefault(section, number)
        elif key := _KEY.match(line):
            lines.setdefault((*section, *_names(key[1])), number)
    return lines


def _names(dotted: str) -> Path:
    return tuple(part.strip().strip("\"'") for part in dotted.split("."))


def _files_like(path: FilePath) -> str:
    folder = path.parent
    names = sorted(str(p) for p in folder.glob("*.toml")) if folder.is_dir() else []
    near = f"Use one of {', '.join(names[:8])}." if names else "Check the path."
    named = ", ".join(sorted(path.stem for path in NAMED_FILES.glob("*.toml")))
    return f"{near} Names of the package: {named}."


def write_toml(config: Any) -> str:
    """Return settings as TOML; None is omitted, and must be the default of its field."""
    import tomli_w

    return tomli_w.dumps(to_table(config))


def to_table(config: Any) -> dict[str, Any]:
    """Convert a settings dataclass to nested dicts, without values that are None."""
    table: dict[str, Any] = {}
    sections: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            sections[field.name] = to_table(value)
        elif isinstance(value, tuple):
            table[field.name] = list(value)
        elif value is not None:
            table[field.name] = value
    return {**table, **sections}
