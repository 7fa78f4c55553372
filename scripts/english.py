"""Count names and docstrings that are not in the field's standard English.

    python scripts/english.py [FOLDER ...]

Prints each dialect name and each docstring that starts with a word such as "what" or "whether",
then both counts. `tests/test_architecture.py` limits the counts of package, scripts and tests.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIALECT = frozenset(
    [
        "found",
        "place",
        "places",
        "given",
        "asked",
        "known",
        "wanted",
        "whole",
        "said",
        "told",
        "shown",
        "theirs",
    ]
)
FIRST_WORDS = frozenset(["what", "where", "whether", "how", "those", "that", "which"])
_WITH_DOCSTRING = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)


def bound_names(tree: ast.AST) -> Iterator[str]:
    """Yield each name that a module binds: functions, classes, parameters, variables, fields."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.arg():
                yield node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.attr


def dialect_names(path: Path) -> Iterator[str]:
    """Yield `file: name` for each binding of a dialect name in a file."""
    for name in (path.stem, *bound_names(ast.parse(path.read_text()))):
        if DIALECT & set(name.lower().strip("_").split("_")):
            yield f"{path}: {name}"


def dialect_docstrings(path: Path) -> Iterator[str]:
    """Yield `file:line: first line` for each docstring that starts with a word of `FIRST_WORDS`."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        text = ast.get_docstring(node) if isinstance(node, _WITH_DOCSTRING) else None
        if text and text.split()[0].lower().strip(",.:;") in FIRST_WORDS:
            yield f"{path}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}"


def count(folder: Path) -> dict[str, int]:
    """Return the numbers of dialect names and docstrings in all Python files below a folder."""
    paths = sorted(folder.rglob("*.py"))
    return {
        "dialect names": sum(1 for path in paths for _ in dialect_names(path)),
        "dialect docstrings": sum(1 for path in paths for _ in dialect_docstrings(path)),
    }


if __name__ == "__main__":
    for folder in map(Path, sys.argv[1:] or [str(ROOT / "jaxdist")]):
        for path in sorted(folder.rglob("*.py")):
            for line in (*dialect_names(path), *dialect_docstrings(path)):
                print(line)
        for name, number in count(folder).items():
            print(f"{number:7,} {name} in {folder}")
