"""Source lines of the equations of a traced program."""

from __future__ import annotations

import dataclasses
import linecache
from pathlib import Path
from typing import Any

from jaxdist.core.step.omitted_sums import JAX, OWN

_MACHINERY = tuple(str(Path(OWN, name)) for name in ("core", "plan", "run", "tools"))


@dataclasses.dataclass(frozen=True)
class SourceLine:
    """A line of code; `number` counts from 1."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        path = Path(self.file)
        name = path.relative_to(Path(OWN).parent) if path.is_relative_to(OWN) else path
        return f"{name}:{self.number}"

    @property
    def text(self) -> str:
        """Return the line without surrounding blanks."""
        return linecache.getline(self.file, self.number).strip()


def lines_of(equation: Any) -> list[SourceLine]:
    """Return the source lines outside jax and flax that led to an equation, innermost first."""
    traceback = equation.source_info.traceback
    frames = list(traceback.frames) if traceback is not None else []
    return [
        SourceLine(frame.file_name, getattr(frame, "line_num", 0), frame.function_name)
        for frame in frames
        if not frame.file_name.startswith(JAX) and not frame.file_name.startswith("<")
    ]


def line_of(equation: Any) -> SourceLine | None:
    """Return the innermost source line in the model, else in the package; None if unknown."""
    inner = [line for line in lines_of(equation) if not line.file.endswith("core/collectives.py")]
    return model_line(equation) or next(iter(inner), None)


def model_line(equation: Any) -> SourceLine | None:
    """Return the innermost line in a model, built-in or a user's; None if there is none."""
    lines = lines_of(equation)
    inside = [i for i, line in enumerate(lines) if "/core/step/" in line.file]
    # Exclude the callers that trace the step.
    of_step = lines[: inside[-1]] if inside else lines
    return next((line for line in of_step if not line.file.startswith(_MACHINERY)), None)


def is_own(line: SourceLine) -> bool:
    """Return True if a line belongs to the package."""
    return line.file.startswith(OWN)
