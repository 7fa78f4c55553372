"""Where a value of a traced program comes from and where it goes, through nested programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from jax.extend import core

from jaxdist.plan.audit.states import operations

CARRIERS = operations(
    "add add_any after all_gather all_gather_invariant broadcast_in_dim checkpoint concatenate "
    "cond convert_element_type copy custom_jvp_call custom_vjp_call div dynamic_slice "
    "dynamic_update_slice jit mul name neg optimization_barrier pcast pjit psum psum_invariant "
    "pvary reduce_scatter remat2 reshape scan select_n slice split squeeze stack sub transpose "
    "while"
)
"""Operations after which a value is still, scaled or cut, the one it was."""


@dataclasses.dataclass(frozen=True)
class Path:
    """A program, and the equations that hold it, outermost first.

    Attributes:
        program: the jaxpr.
        around: (program, its equation that holds the next one).
    """

    program: Any
    around: tuple[tuple[Any, Any], ...] = ()

    def into(self, equation: Any, inner: Any) -> Path:
        """The path of a program that an equation of this one holds."""
        return Path(inner, (*self.around, (self.program, equation)))


def outputs_reached(path: Path, variables: Iterable[Any]) -> set[int]:
    """Places among the outermost program's results that carry the variables' values."""
    reached = _forward(path.program, set(variables))
    for program, equation in reversed(path.around):
        if equation.primitive.name == "while":
            reached = set(reached)
        outvars = equation.outvars
        reached = _forward(program, {outvars[i] for i in reached if i < len(outvars)})
    return reached


def inputs_reached(path: Path, variables: Iterable[Any]) -> set[int]:
    """Places among the outermost program's arguments that the variables are made from."""
    reached = _backward(path.program, set(variables))
    for program, equation in reversed(path.around):
        shift = len(equation.invars) - len(path.program.invars) if path.around else 0
        first = shift if equation.primitive.name == "cond" else 0
        invars = equation.invars
        wanted = {invars[i + first] for i in reached if i + first < len(invars)}
        reached = _backward(program, {v for v in wanted if not isinstance(v, core.Literal)})
        path = Path(program, ())
    return reached


def is_mean(program: Any, equation: Any) -> bool:
    """Whether the sum is only divided by a constant afterwards, which makes it a mean."""
    outs = set(equation.outvars)
    users = [e for e in program.eqns if any(_is(v, outs) for v in e.invars)]
    divided = [e for e in users if e.primitive.name == "div" and _is_literal(e.invars[1])]
    return bool(users) and len(divided) == len(users)


def made_by(program: Any, variable: Any, names: frozenset[str]) -> Any:
    """The equation of one of these names that a value was carried from, or None."""
    wanted = {variable}
    for equation in reversed(program.eqns):
        if not any(_is(v, wanted) for v in equation.outvars):
            continue
        if equation.primitive.name in names:
            return equation
        if equation.primitive.name in CARRIERS | {"reduce_sum"}:
            wanted |= {v for v in equation.invars if not isinstance(v, core.Literal)}
    return None


def _forward(program: Any, wanted: set[Any]) -> set[int]:
    return _outputs(program, _follow(program.eqns, wanted, lambda e: (e.invars, e.outvars)))


def _backward(program: Any, wanted: set[Any]) -> set[int]:
    found = _follow(reversed(program.eqns), wanted, lambda e: (e.outvars, e.invars))
    return {place for place, v in enumerate(program.invars) if v in found}


def _follow(
    equations: Iterable[Any], wanted: set[Any], ends: Callable[[Any], tuple[Any, Any]]
) -> set[Any]:
    found = set(wanted)
    for equation in equations:
        near, far = ends(equation)
        if equation.primitive.name in CARRIERS and any(_is(v, found) for v in near):
            found |= {v for v in far if not isinstance(v, core.Literal)}
    return found


def _outputs(program: Any, found: set[Any]) -> set[int]:
    return {place for place, v in enumerate(program.outvars) if _is(v, found)}


def _is(variable: Any, wanted: set[Any]) -> bool:
    return not isinstance(variable, core.Literal) and variable in wanted


def _is_literal(variable: Any) -> bool:
    return isinstance(variable, core.Literal)
