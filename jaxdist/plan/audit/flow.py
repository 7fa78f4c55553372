"""Data flow in a traced program: sources and uses of a value, through nested programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
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
"""Operations whose output carries the input's value, possibly scaled or sliced."""

HOLDERS = operations(
    "after all_gather all_gather_invariant checkpoint cond convert_element_type copy "
    "custom_jvp_call custom_vjp_call dynamic_slice jit name optimization_barrier pcast pjit pvary "
    "remat2 reshape scan slice squeeze transpose while"
)
"""Operations whose output still counts as the weight that they read."""


@dataclasses.dataclass(frozen=True)
class Path:
    """A nested `program`; `around` has (program, its equation with the next one), outer first."""

    program: Any
    around: tuple[tuple[Any, Any], ...] = ()

    def into(self, equation: Any, inner: Any) -> Path:
        """Return the path of `inner`, a program that an equation of this program contains."""
        return Path(inner, (*self.around, (self.program, equation)))


def outputs_reached(path: Path, variables: Iterable[Any]) -> set[int]:
    """Return the indices of the outermost program's results that carry the variables' values."""
    reached = _forward(path.program, variables_of(variables))
    for program, equation in reversed(path.around):
        outvars = equation.outvars
        reached = _forward(program, {outvars[i] for i in reached if i < len(outvars)})
    return reached


def inputs_reached(
    path: Path, variables: Iterable[Any], through: frozenset[str] = CARRIERS
) -> set[int]:
    """Return the indices of the outermost program's arguments that the variables come from."""
    reached = _backward(path.program, variables_of(variables), through)
    for program, equation in reversed(path.around):
        # Skip operands that are not passed on: the index of a cond, the test constants of a while.
        first = {"cond": 1, "while": equation.params.get("cond_nconsts", 0)}
        invars = equation.invars[first.get(equation.primitive.name, 0) :]
        reached = _backward(
            program, variables_of(invars[i] for i in reached if i < len(invars)), through
        )
    return reached


def is_mean(program: Any, equation: Any) -> bool:
    """Return True if a sum, the result of `equation`, is only ever divided by a constant."""
    outs = set(equation.outvars)
    users = [e for e in program.eqns if any(_is(v, outs) for v in e.invars)]
    divided = [
        e for e in users if e.primitive.name == "div" and isinstance(e.invars[1], core.Literal)
    ]
    return bool(users) and len(divided) == len(users)


def origins(program: Any, variable: Any) -> Iterator[Any]:
    """Yield the equations that compute a value, last first, including nested ones."""
    tracked = variables_of([variable])
    for equation in reversed(program.eqns):
        indices = [i for i, v in enumerate(equation.outvars) if _is(v, tracked)]
        if not indices:
            continue
        yield equation
        for inner in core.jaxprs_in_params(equation.params):
            for index in indices:
                if index < len(inner.outvars) and not isinstance(
                    inner.outvars[index], core.Literal
                ):
                    yield from origins(inner, inner.outvars[index])
        # The second operand of `after` only enforces an order (`core/collective_order.py`).
        made_of = equation.invars[:1] if equation.primitive.name == "after" else equation.invars
        tracked |= variables_of(made_of)


def _forward(program: Any, tracked: set[Any]) -> set[int]:
    reached = _follow(program.eqns, tracked, lambda e: (e.invars, e.outvars))
    return {index for index, v in enumerate(program.outvars) if _is(v, reached)}


def _backward(program: Any, tracked: set[Any], through: frozenset[str]) -> set[int]:
    ends = lambda e: (e.outvars, e.invars)
    reached = _follow(reversed(program.eqns), tracked, ends, through)
    return {index for index, v in enumerate(program.invars) if v in reached}


def _follow(
    equations: Iterable[Any],
    tracked: set[Any],
    ends: Callable[[Any], tuple[Any, Any]],
    through: frozenset[str] = CARRIERS,
) -> set[Any]:
    reached = set(tracked)
    for equation in equations:
        near, far = ends(equation)
        if equation.primitive.name in through and any(_is(v, reached) for v in near):
            reached |= variables_of(far)
    return reached


def variables_of(atoms: Iterable[Any]) -> set[Any]:
    """Return the variables among the atoms; literals have no source and are not hashable."""
    return {atom for atom in atoms if not isinstance(atom, core.Literal)}


def _is(variable: Any, tracked: set[Any]) -> bool:
    return not isinstance(variable, core.Literal) and variable in tracked
