"""The `jaxdist` program: `jaxdist train ...` is `python -m jaxdist.train ...`."""

from __future__ import annotations

import ast
import difflib
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

COMMANDS = (
    "train",
    "evaluate",
    "generate",
    "data",
    "convert",
    "verify",
    "plan",
    "audit",
    "launch",
    "sweep",
    "report",
    "compare",
    "doctor",
)
"""Command names in the order of `jaxdist --help`."""

SUBCOMMANDS = {"data spike": "spike", "plan batch": "fit_batch"}
"""Subcommands in a module of their own, because they import higher folders than the command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return 0, or 2 for an unknown one. Most commands end the process."""
    words = list(sys.argv[1:] if argv is None else argv)
    commands = find_commands()
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview(commands))
        return 0
    if words[0] in ("-V", "--version", "version"):
        from jaxdist import __version__

        print(f"jaxdist {__version__}")
        return 0
    name = words[0]
    if name not in commands:
        near = difflib.get_close_matches(name, commands, n=1)
        fix = f"Did you mean jaxdist {near[0]}?" if near else f"Use one of {', '.join(commands)}."
        print(f"jaxdist {name}: unknown command. {fix}", file=sys.stderr)
        return 2
    own = SUBCOMMANDS.get(" ".join(words[:2]))
    sys.argv = [f"jaxdist {name}", *words[2 if own else 1 :]]
    runpy.run_module(f"jaxdist.{own or name}", run_name="__main__", alter_sys=True)
    return 0


def find_commands() -> dict[str, str]:
    """Return command -> one line of description, for the installed commands."""
    sources = {name: _source_of(name) for name in COMMANDS}
    return {name: _description(source) for name, source in sources.items() if source}


def overview(commands: dict[str, str]) -> str:
    """Return the text of `jaxdist --help`."""
    width = max((len(name) for name in commands), default=0)
    lines = [f"  {name:<{width}}  {doc}" for name, doc in commands.items()]
    return (
        "usage: jaxdist COMMAND [--FLAG=VALUE ...]        (also: python -m jaxdist.COMMAND)\n\n"
        + "\n".join(lines)
        + "\n\njaxdist COMMAND --help explains every setting of a command."
    )


def _source_of(name: str) -> Path | None:
    """Return the file that `python -m jaxdist.<name>` runs, or None; import only jaxdist."""
    spec = importlib.util.find_spec(f"jaxdist.{name}")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin)
    if file.name == "__init__.py":
        file = file.with_name("__main__.py")
    return file if file.is_file() else None


def _description(file: Path) -> str:
    """Return the first paragraph of a module's docstring without its leading `command`."""
    doc = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    line = doc.partition("\n\n")[0].replace("\n", " ")
    if line.startswith("`"):
        line = line.partition("`: ")[2] or line
    return line[:1].upper() + line[1:]


if __name__ == "__main__":
    sys.exit(main())
