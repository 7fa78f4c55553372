"""Small mistakes (mutants) at random places of the package, for `mutation_sweep.py`.

A mutant changes one expression: an operator, a comparison, a number, a boolean, a condition, a
return value, or the order of two arguments. Messages, types, timeouts and buffer sizes are
excluded, because no test should depend on them.
"""

from __future__ import annotations

import ast
import dataclasses
import random
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent

ROOMS = {
    "step": ["jaxdist/core/step"],
    "parallel": ["jaxdist/core/parallel", "jaxdist/core/collectives.py"],
    "attention": ["jaxdist/core/attention"],
    "sharding": [
        *("jaxdist/core/sharding.py", "jaxdist/core/mesh.py", "jaxdist/core/axis.py"),
        *("jaxdist/core/mesh_choice.py", "jaxdist/core/state.py"),
    ],
    "losses": ["jaxdist/core/losses.py", "jaxdist/core/softcap.py"],
    "precision": ["jaxdist/core/precision.py", "jaxdist/core/matmul"],
    "models": ["jaxdist/models"],
    "optim": ["jaxdist/optim"],
    "data": ["jaxdist/data"],
    "checkpoint": ["jaxdist/checkpoint"],
    "storage": ["jaxdist/runtime/storage"],
    "resilience": ["jaxdist/run/resilience"],
    "generate": [
        *(
            "jaxdist/generate.py",
            "jaxdist/run/text_generation.py",
            "jaxdist/run/text_generation.py",
        ),
        "jaxdist/run/text_generation.py",
    ],
    "evaluation": ["jaxdist/evaluate.py", "jaxdist/run/evaluation_loop.py"],
}

_OPERATORS: dict[type, type] = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult},
    **{ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.MatMult: ast.Mult},
    **{ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd},
}
_COMPARISONS: dict[type, type] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is},
}
_TEXT_CALLS = {"setting", "log", "info", "warning", "debug", "print", "event", "append", "TypeVar"}
"""Calls whose arguments are mostly messages; `problems.append` is one."""

_TEXT_FUNCTIONS = {"__repr__", "__str__", "__hash__"}

_EITHER_ORDER = {"max", "min", "maximum", "minimum", "add", "isclose", "gcd", "lcm", "logical_or"}
"""Calls whose first two arguments may be swapped."""

_TYPED_ORDER = {"isinstance", "issubclass", "getattr", "hasattr", "setattr", "cast", "replace"}
"""Calls that raise immediately if their arguments are swapped: such a mutant proves nothing."""

_UNOBSERVED = re.compile(
    r"(?i)stacklevel|maxsize|indent|buffering|daemon|flush|prevent_cse|inline|unroll|timeout|chunk"
    r"|cache|poll|_s$|_bytes$|_gb$|_mb$"
)
"""Names of values that only affect speed, timeouts or appearance."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mutant:
    """One changed expression: `old` at offset `start` of a file becomes `new`."""

    room: str
    file: str
    line: int
    kind: str
    start: int
    old: str
    new: str

    def __str__(self) -> str:
        short = lambda text: " ".join(text.split())[:60]
        return f"{self.file}:{self.line} {self.kind}: `{short(self.old)}` -> `{short(self.new)}`"

    def plant(self, root: Path) -> str:
        """Change the file below `root`; return its text before the change."""
        path = root / self.file
        text = path.read_text()
        content = text.encode()
        end = self.start + len(self.old.encode())
        assert content[self.start : end].decode() == self.old
        path.write_bytes(content[: self.start] + self.new.encode() + content[end:])
        return text


class _Changes(ast.NodeVisitor):
    """Collects (node, kind, changed source) of a module, except types and messages."""

    def __init__(self) -> None:
        self.faults: list[tuple[ast.expr | ast.stmt, str, str]] = []

    def _add(self, node: ast.expr, kind: str, new: ast.expr | str) -> None:
        text = new if isinstance(new, str) else ast.unparse(ast.fix_missing_locations(new))
        self.faults.append((node, kind, f"({text})"))

    def visit_BinOp(self, node: ast.BinOp) -> None:
        words = any(isinstance(side, ast.JoinedStr) for side in (node.left, node.right))
        if not words and type(node.op) in _OPERATORS:
            other = _OPERATORS[type(node.op)]()
            self._add(node, "arithmetic", ast.BinOp(node.left, other, node.right))
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.op, ast.Add | ast.Sub) and not _is_list(node.value):
            other = ast.AugAssign(node.target, _OPERATORS[type(node.op)](), node.value)
            self.faults.append((node, "arithmetic", ast.unparse(ast.fix_missing_locations(other))))
        self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        if type(node.ops[0]) in _COMPARISONS and not _is_main(node):
            ops = [_COMPARISONS[type(node.ops[0])](), *node.ops[1:]]
            self._add(node, "comparison", ast.Compare(node.left, ops, node.comparators))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self._add(node, "boolean", ast.BoolOp(other, node.values))
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub):
            self._add(node, "boolean" if isinstance(node.op, ast.Not) else "sign", node.operand)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(node, "constant", repr(not node.value))
        elif isinstance(node.value, int | float):
            self._add(node, "constant", repr(node.value + 1))

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if not _is_main(node.test):
            self._add(node.test, "condition", f"not ({ast.unparse(node.test)})")
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._add(node.test, "condition", f"not ({ast.unparse(node.test)})")
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is not None and not isinstance(node.value, ast.Constant):
            self._add(node.value, "return", "None")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name in _TEXT_CALLS:
            return
        first, second = [*node.args[:2], None, None][:2]
        if (
            first is not None
            and second is not None
            and type(first) is type(second)  # other types mostly raise immediately
            and not isinstance(first, ast.Starred | ast.JoinedStr)
            and name not in _EITHER_ORDER | _TYPED_ORDER
            and ast.unparse(first) != ast.unparse(second)
        ):
            swapped = ast.Call(node.func, [second, first, *node.args[2:]], node.keywords)
            self._add(node, "argument order", swapped)
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg is None or not _UNOBSERVED.search(node.arg):
            self.visit(node.value)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for part in node.body:
            self.visit(part)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in _TEXT_FUNCTIONS:
            return
        for part in (*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body):
            self.visit(part)

    def visit_Assign(self, node: ast.Assign) -> None:
        if not any(_UNOBSERVED.search(ast.unparse(target)) for target in node.targets):
            self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and not _UNOBSERVED.search(ast.unparse(node.target)):
            self.visit(node.value)

    def visit_Raise(self, node: ast.Raise) -> None:
        """Skip error messages."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Skip assertions."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Skip messages."""

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.visit(node.value)
        if not isinstance(node.slice, ast.Constant):
            self.visit(node.slice)


def _is_list(value: ast.expr) -> bool:
    """Return True if the operands are lists or strings, which cannot be subtracted."""
    return isinstance(value, ast.List | ast.Tuple | ast.ListComp | ast.JoinedStr)


def _is_main(test: ast.expr) -> bool:
    """Return True for `__name__ == "__main__"`: no test imports a module like this."""
    return isinstance(test, ast.Compare) and ast.unparse(test.left) == "__name__"


def files_of(room: str) -> list[Path]:
    """Return the modules of a room."""
    paths = [ROOT / name for name in ROOMS[room]]
    return [f for p in paths for f in (sorted(p.rglob("*.py")) if p.is_dir() else [p])]


def mutants_of(room: str, file: Path) -> Iterator[Mutant]:
    """Yield every mutant of a module."""
    text = file.read_text()
    lines = [0]
    for line in text.encode().splitlines(keepends=True):
        lines.append(lines[-1] + len(line))
    changes = _Changes()
    changes.visit(ast.parse(text))
    name = str(file.relative_to(ROOT))
    for node, kind, new in changes.faults:
        start = lines[node.lineno - 1] + node.col_offset
        end = lines[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        old = text.encode()[start:end].decode()
        yield Mutant(
            room=room, file=name, line=node.lineno, kind=kind, start=start, old=old, new=new
        )


def sample(rooms: list[str], count: int, seed: int) -> list[Mutant]:
    """Return about `count` mutants, equally many per room; deterministic for code and seed."""
    drawn = []
    for room in rooms:
        mutants = [mutant for file in files_of(room) for mutant in mutants_of(room, file)]
        share = min(len(mutants), -(-count // len(rooms)))
        drawn += random.Random(f"{seed} {room}").sample(mutants, share)
    return drawn
