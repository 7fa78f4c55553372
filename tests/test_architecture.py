"""The house: imports go down only, siblings never meet, and no room imports a command."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "jaxdist"

LEVELS = {
    "types": 0,
    "runtime": 0,
    "hardware": 0,
    "mesh": 1,
    "collectives": 1,
    "ordering": 1,
    "sharding": 2,
    "parallel": 3,
    "models": 3,
    "data": 3,
    "losses": 3,
    "optim": 3,
    "precision": 3,
    "state": 4,
    "huggingface": 4,
    "step": 5,
    "checkpoint": 5,
    "monitoring": 5,
    "resilience": 5,
    "config": 6,
    "evaluation": 6,
    "assembly": 7,
    "estimate": 7,
    "beginning": 8,
    "judging": 8,
    "replay": 8,
    "train": 9,
    "evaluate": 9,
    "generate": 9,
    "report": 9,
    "plan": 9,
    "launch": 9,
    "convert": 9,
    "doctor": 9,
    "__main__": 10,
    "__init__": 0,
}


def room_of(path: Path) -> str:
    """The room a file belongs to; `data/__main__.py` is a command although `data` is a room."""
    relative = path.relative_to(PACKAGE)
    if relative.name == "__main__.py" and len(relative.parts) == 2 and relative.parts[0] == "data":
        return "train"
    return relative.parts[0].removesuffix(".py")


def imported_rooms(source: str) -> set[str]:
    rooms = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names = [node.module] + [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            pytest.fail("relative import: rooms are imported by their full name")
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "jaxdist" and len(parts) > 1 and parts[1] in LEVELS:
                rooms.add(parts[1])
    return rooms


def violations(room: str, source: str) -> list[str]:
    return [
        f"{room} (level {LEVELS[room]}) imports {other} (level {LEVELS[other]})"
        for other in sorted(imported_rooms(source))
        if other != room and LEVELS[other] >= LEVELS[room] and other != "types"
    ]


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_imports_go_down_only(path: Path):
    assert violations(room_of(path), path.read_text()) == []


def test_planted_back_edges_are_seen():
    assert violations("mesh", "from jaxdist.step import make_train_step")
    assert violations("models", "import jaxdist.parallel.tensor")
    assert violations("step", "def f():\n    from jaxdist.checkpoint import Checkpointer")
    assert violations("train", "from jaxdist import evaluate")


def test_importing_the_package_imports_no_heavy_library():
    import subprocess
    import sys

    code = "import sys, jaxdist; print([m for m in ('jax', 'flax', 'orbax') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
