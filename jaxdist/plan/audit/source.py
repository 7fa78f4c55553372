"""Where in the code an equation of a traced program comes from."""

from __future__ import annotations

import dataclasses
import linecache
from pathlib import Path
from typing import Any

import jax

import jaxdist

_JAX = (str(Path(jax.__file__).parent), str(Path(jax.__file__).parent.parent / "flax"))
_OWN = str(Path(jaxdist.__file__).parent)
_MACHINERY = tuple(str(Path(_OWN, name)) for name in ("core", "plan", "run", "tools"))


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of code.

    Attributes:
        file: its path.
        number: counted from 1.
        function: the function it stands in.
    """

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        path = Path(self.file)
        name = path.relative_to(Path(_OWN).parent) if path.is_relative_to(_OWN) else path
        return f"{name}:{self.number}"

    @property
    def text(self) -> str:
        """The line itself, without the blanks around it."""
        return linecache.getline(self.file, self.number).strip()


def lines_of(equation: Any) -> list[Line]:
    """Lines outside of jax and flax that led to an equation, innermost first."""
    traceback = equation.source_info.traceback
    frames = list(traceback.frames) if traceback is not None else []
    return [
        Line(frame.file_name, getattr(frame, "line_num", 0), frame.function_name)
        for frame in frames
        if not frame.file_name.startswith(_JAX) and not frame.file_name.startswith("<")
    ]


def model_line(equation: Any) -> Line | None:
    """The innermost line of the model, else of the package; None where nothing is known."""
    lines = lines_of(equation)
    of_model = [line for line in lines if not line.file.startswith(_MACHINERY)]
    # The command that traces the step stands outside of everything: it is no model.
    if of_model and lines.index(of_model[0]) < _depth_of_step(lines):
        return of_model[0]
    inner = [line for line in lines if not line.file.endswith("core/collectives.py")]
    return (inner or lines or [None])[0]


def _depth_of_step(lines: list[Line]) -> int:
    """How many lines lie inside of the step."""
    inside = [i for i, line in enumerate(lines) if "/core/step/" in line.file]
    return inside[-1] if inside else len(lines)
