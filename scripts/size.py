"""Print how large the code is: lines, folders that import each other, settings of a run.

    python scripts/size.py

`tests/test_architecture.py` limits these numbers; the limits only decrease.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
_SETTING = re.compile(r"^\| `([a-z][\w.]*)`", re.MULTILINE)
_BLANK = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)


def count_lines(folder: Path) -> int:
    """Return the number of lines of all Python files below a folder."""
    return sum(len(path.read_text().splitlines()) for path in folder.rglob("*.py"))


def count_code(source: str) -> int:
    """Return the number of code lines, without docstrings, comments and blank lines."""
    texts = {
        (node.lineno, node.col_offset)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_text = token.type == tokenize.STRING and token.start in texts
        if token.type not in _BLANK and not is_text and token.string:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def imported_names(source: str) -> set[str]:
    """Return the modules of this package that a file mentions in imports and strings."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and "import_module" in ast.unparse(node.func):
            names.update(a.value for a in node.args if isinstance(a, ast.Constant))
    return {name for name in names if name.startswith("jaxdist.")}


def folder_pairs() -> list[tuple[str, str]]:
    """Return the top-level folders and files that import each other, counting every import."""
    package = ROOT / "jaxdist"
    edges = set()
    for path in package.rglob("*.py"):
        here = path.relative_to(package).parts[0].removesuffix(".py")
        for name in imported_names(path.read_text()):
            edges.add((here, name.split(".")[1]))
    return sorted((a, b) for a, b in edges if a < b and (b, a) in edges)


def sizes() -> dict[str, int]:
    """Return each size by name."""
    package, reference = ROOT / "jaxdist", ROOT / "docs" / "settings.md"
    return {
        "package lines": count_lines(package),
        "package code lines": sum(count_code(p.read_text()) for p in package.rglob("*.py")),
        "test lines": count_lines(ROOT / "tests"),
        "two-way folder pairs": len(folder_pairs()),
        "settings of a run": len(set(_SETTING.findall(reference.read_text()))),
    }


if __name__ == "__main__":
    for name, number in sizes().items():
        print(f"{number:7,} {name}")
    print(*(f"{a} <-> {b}" for a, b in folder_pairs()), sep="\n")
