"""Order the collectives of a simulated (CPU) mesh identically on every device.

XLA:CPU starts the collectives of one computation in order, but considers a loop or a branch started
when its first operation starts. A later independent collective may then overtake those inside it,
on some devices only. Two collectives of a device group that meet exchange each other's data (wrong
gradients) or deadlock. GPUs run collectives in program order.

`in_order` rewrites the traced program (a jaxpr). Loops and branches that contain collectives wait
for the collectives before them, and later collectives wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend import core
from jax.interpreters import mlir


def ready_token(marks: Iterable[jax.Array]) -> jax.Array:
    """Return True, bool [], after all marks, non-empty arrays [*dims], are computed."""
    truth = jnp.asarray(True)
    for mark in marks:
        truth &= _element(mark)
    return truth


def wait_for(ready: jax.Array, x: jax.Array) -> jax.Array:
    """Return x [*dims] after `ready` is computed, by a `where` that XLA cannot remove."""
    return jnp.where(ready, x, ~x if x.dtype == bool else x + jnp.ones_like(x))


def after(x: jax.Array, marks: Sequence[jax.Array]) -> jax.Array:
    """Return x [*dims], of the same JAX type, after all marks, non-empty arrays, are computed."""
    return AFTER.bind(x, *marks) if marks else x


def _element(x: jax.Array) -> jax.Array:
    """Return True, bool [], computed from the first element of x, which must not be empty."""
    first = lax.slice(x, [0] * x.ndim, [1] * x.ndim).reshape(()).astype(jnp.float32)
    # XLA does not simplify these three float comparisons; it would simplify integer operations.
    return (first < 0) | (first >= 0) | (first != first)


def primitive(name: str, kind: Callable[..., Any], compute: Callable[..., Any]) -> core.Primitive:
    """Make a JAX primitive that runs `compute`; `kind` maps operand types to the result's type."""
    made = core.Primitive(name)
    made.def_abstract_eval(kind)
    mlir.register_lowering(made, mlir.lower_fun(compute, multiple_results=False))
    return made


AFTER = primitive("after", lambda x, *marks: x, lambda x, *marks: wait_for(ready_token(marks), x))
"""(x, *marks) -> x, computed after the marks."""


COLLECTIVES = frozenset(
    (
        "all_gather",
        "all_gather_invariant",
        "all_gather_reduced",
        "all_to_all",
        "pmax",
        "pmin",
        "ppermute",
        "psum",
        "psum_invariant",
        "reduce_scatter",
        "unreduced_psum",
        "unreduced_reduce_scatter",
    )
)
"""Names of the primitives that communicate between devices."""


PASS = "earlier_pass"
"""Field of a batch: a result of the forward pass before this one, float32 [rows]."""


def in_order(function: Callable[..., Any], *, hidden: bool = False) -> Callable[..., Any]:
    """Return `function` with its collectives in program order, for meshes of CPUs.

    The result is not differentiable. `hidden`: XLA shards an axis automatically, so loops and
    branches may contain collectives that are not in the trace. If an argument has the field `PASS`,
    all collectives, and loops and branches with collectives, wait for its value.
    """

    def ordered(*args: Any) -> Any:
        traced, kinds = jax.make_jaxpr(function, return_shape=True)(*args)
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(args)]
        named = zip(paths, traced.jaxpr.invars, strict=True)
        first = [x for path, x in named if getattr(path[-1], "key", None) == PASS]
        program = core.ClosedJaxpr(_ordered(traced.jaxpr, hidden, first), traced.consts)
        outputs = core.jaxpr_as_fun(program)(*jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(kinds), outputs)

    return ordered


def _ordered(
    program: core.Jaxpr, hidden: bool, first: Sequence[Any] = (), last: Sequence[int] = ()
) -> core.Jaxpr:
    """Return the program with loops, branches and collectives in order, and after `first`.

    The outputs with the indices `last` are computed after all of them.
    """
    equations: list[core.JaxprEqn] = []
    block: Any = None  # marks the end of the last loop or branch
    flat: list[Any] = []  # results of collectives since the last loop or branch
    if first:
        block = core.Var(_MARK)
        equations.append(_equation(_made, [*first], block))
    for equation in program.eqns:
        if _holds_collectives(equation, hidden):
            waits_for = [*flat, *([block] if block else [])]
            equations += _tie(_with_ordered_parts(equation, hidden), _gate(equation), waits_for)
            if made := _usable(equation.outvars):
                flat, block = [], core.Var(_MARK)
                equations.append(_equation(_made, made, block))
        elif equation.primitive.name in COLLECTIVES:
            equations += _tie(equation, range(len(equation.invars)), [block] if block else [])
            flat += _usable(equation.outvars)[:1]
        else:
            equations.append(equation)
    outputs = list(program.outvars)
    if waits_for := [*flat, *([block] if block else [])]:
        for index in last:
            outputs[index] = core.Var(outputs[index].aval)
            equations.append(_equation(AFTER, [program.outvars[index], *waits_for], outputs[index]))
    return program.replace(eqns=equations, outvars=outputs)


def _with_ordered_parts(equation: core.JaxprEqn, hidden: bool) -> core.JaxprEqn:
    """Return the equation with collectives in order in its parts.

    If XLA unrolls a loop, collectives that need only scanned inputs would be free. So its body
    reads carries before its collectives, and writes them after.
    """
    tied: list[int] = []
    if equation.primitive.name == "scan" and _is_unrolled(**equation.params):
        carries = _carries(equation)
        tied = [index - carries.start for index in _cheap(equation, carries)]

    def ordered(part: core.Jaxpr) -> core.Jaxpr:
        first = [part.invars[carries.start + index] for index in tied]
        return _ordered(part, hidden, first, tied)

    def one(part: Any) -> Any:
        if isinstance(part, core.ClosedJaxpr):
            return core.ClosedJaxpr(ordered(part.jaxpr), part.consts)
        return ordered(part) if isinstance(part, core.Jaxpr) else part

    params = {
        name: type(value)(map(one, value)) if type(value) in (tuple, list) else one(value)
        for name, value in equation.params.items()
    }
    return equation.replace(params=params)


def _is_unrolled(*, length: int, unroll: int, **_: Any) -> bool:
    return length // unroll <= 1


def _holds_collectives(equation: core.JaxprEqn, hidden: bool) -> bool:
    if hidden and equation.primitive.name in ("scan", "while", "cond"):
        return True
    return any(
        inner.primitive.name in COLLECTIVES or _holds_collectives(inner, hidden)
        for part in core.jaxprs_in_params(equation.params)
        for inner in part.eqns
    )


def _gate(equation: core.JaxprEqn) -> Iterable[int]:
    """Return the indices of operands that delay all of a loop or branch if they wait."""
    if equation.primitive.name == "cond":
        return range(1)  # the index of the branch
    carries = _carries(equation)
    return _cheap(equation, carries) if carries else range(len(equation.invars))


def _carries(equation: core.JaxprEqn) -> range:
    """Return the indices of a loop's carries among its operands; none for anything else."""
    name, number = equation.primitive.name, len(equation.invars)
    if name == "while":
        return range(equation.params["cond_nconsts"] + equation.params["body_nconsts"], number)
    if name == "scan":
        (body,) = core.jaxprs_in_params(equation.params)
        ndim = lambda variables: np.array([len(v.aval.shape) for v in variables])
        # Outside a scan, scanned inputs and stacked outputs have one more dim than inside.
        num_xs = int((ndim(equation.invars) != ndim(body.invars)).sum())
        num_carry = int((ndim(equation.outvars) == ndim(body.outvars)).sum())
        return range(number - num_xs - num_carry, number - num_xs)
    return range(0)


def _cheap(equation: core.JaxprEqn, carries: Iterable[int]) -> list[int]:
    """Return which of these carries a loop waits for: all small ones, and the smallest other."""
    operands: list[Any] = equation.invars
    size = lambda index: operands[index].aval.size
    ordered = sorted((i for i in carries if _is_usable(operands[i])), key=size)
    return ordered[: 1 + sum(size(i) <= _SMALL_CARRY for i in ordered)]


def _tie(
    equation: core.JaxprEqn, operands: Iterable[int], waits_for: list[Any]
) -> list[core.JaxprEqn]:
    """Return the equation, preceded by equations that make its `operands` wait for `waits_for`."""
    if not waits_for:
        return [equation]
    ties, invars = [], list(equation.invars)
    for index in operands:
        operand = invars[index]
        if _is_usable(operand):
            invars[index] = core.Var(operand.aval)
            ties.append(_equation(AFTER, [operand, *waits_for], invars[index]))
    return [*ties, equation.replace(invars=invars)]


def _equation(primitive: core.Primitive, operands: list[Any], result: Any) -> core.JaxprEqn:
    return core.new_jaxpr_eqn(operands, [result], primitive, {}, core.no_effects)


def _usable(variables: Iterable[Any]) -> list[Any]:
    return [v for v in variables if not isinstance(v, core.DropVar) and _is_usable(v)]


def _is_usable(variable: Any) -> bool:
    """Return True if the device can read an element: no keys, empty arrays, or host memory."""
    kind = variable.aval
    on_host = getattr(kind, "memory_space", None) == jax.memory.Space.Host
    return kind.size > 0 and isinstance(kind.dtype, np.dtype) and not on_host


_SMALL_CARRY = 2**16
"""Elements. More than one carry waits: XLA may remove one that nothing reads, or is constant."""

_MARK = jax.core.ShapedArray((), np.dtype(bool))
_made = primitive("made", lambda *made: _MARK, lambda *made: ready_token(made))
