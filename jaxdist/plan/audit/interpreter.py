"""Interpret a traced step abstractly, to find wrong sums and collectives over each mesh axis."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from jaxdist.core.collective_order import COLLECTIVES
from jaxdist.core.collectives import TOKEN_VALUES
from jaxdist.plan.audit import shapes
from jaxdist.plan.audit.flow import HOLDERS, Path, inputs_reached, is_mean
from jaxdist.plan.audit.shapes import MissingGather
from jaxdist.plan.audit.states import (
    CONSTANT,
    ELEMENTWISE,
    EQUAL,
    FIXED,
    INDEX,
    PARTIAL,
    ROW,
    VARYING,
    ZERO,
    OmittedSum,
    Rule,
    dims_of,
    is_split,
    join,
    join_all,
    like,
    moved,
    name_of,
    operations,
    split,
)

RULES: dict[str, Rule] = {**ELEMENTWISE, **shapes.RULES}

SUMS = operations("psum psum_invariant unreduced_psum reduce_scatter unreduced_reduce_scatter")
GATHERS = operations("all_gather all_gather_invariant all_gather_reduced")

UNTYPED = operations("custom_vmap_call mpmd_map")
"""Operations of Pallas kernels, for whose results jax has no types of varying values."""

States = tuple[int, ...]
"""The states of one value, one per mesh axis."""


@dataclasses.dataclass(frozen=True)
class Alarm:
    """An error over one axis, of a `kind` of `step.Violation`.

    `path` locates the equation's program; `text` describes how it uses the incorrect `operand`.
    """

    kind: str
    axis: str
    equation: Any
    operand: Any
    text: str
    path: Path


class Interpreter:
    """Propagates states through one program and collects `alarms`."""

    def __init__(
        self,
        sizes: dict[str, int],
        sum_dtypes: Iterable[Any] = (),
        token_states: dict[str, int] | None = None,
    ) -> None:
        """Audit the mesh axes in `sizes`; reductions may use `sum_dtypes`, and 4 bytes or more.

        `token_states` are the states of `collectives.per_token` on axes that split a batch.
        """
        self.axes, self.sizes = tuple(sizes), sizes
        self.sum_dtypes = {jnp.dtype(dtype) for dtype in sum_dtypes}
        self.alarms: list[Alarm] = []
        self._token_states = token_states or {}
        self._first_round = False
        self._seen: set[tuple[int, str]] = set()
        self._memo: dict[Any, tuple[Any, list[States]]] = {}

    def run(self, program: Any, inputs: Sequence[States], path: Path, live: bool) -> list[States]:
        """Return the states of the outputs of a program; record alarms only if `live`."""
        key = (id(program), tuple(inputs), live, self._first_round)
        if key in self._memo:
            return self._memo[key][1]
        constant = (CONSTANT,) * len(self.axes)
        states: dict[Any, States] = dict(zip(program.invars, inputs, strict=True))
        states |= dict.fromkeys(program.constvars, constant)

        def state_of(variable: Any) -> States:
            if isinstance(variable, core.Literal):
                zero = np.ndim(variable.val) == 0 and not isinstance(variable.val, bool)
                return (ZERO,) * len(self.axes) if zero and variable.val == 0 else constant
            return states[variable]

        for equation in program.eqns:
            in_states = [state_of(v) for v in equation.invars]
            outputs = self._equation(equation, in_states, path, live)
            for variable, state in zip(equation.outvars, outputs, strict=True):
                is_typed = equation.primitive.name not in UNTYPED
                states[variable] = self._typed(variable.aval, state) if is_typed else state
        out = [state_of(v) for v in program.outvars]
        self._memo[key] = program, out  # keeps the program alive, so that its id stays unique
        return out

    def _typed(self, aval: Any, states: States) -> States:
        """Return states refined by jax's types: unvarying values are EQUAL, empty arrays ZERO."""
        if 0 in getattr(aval, "shape", ()):
            return (ZERO,) * len(self.axes)
        varies = getattr(getattr(aval, "mat", None), "varying", None)
        if varies is None:
            return states
        return tuple(
            state if axis in varies or state in FIXED else EQUAL
            for axis, state in zip(self.axes, states, strict=True)
        )

    def _equation(
        self, equation: Any, in_states: list[States], path: Path, live: bool
    ) -> Sequence[States]:
        name = equation.primitive.name
        if name == "scan":
            return self._scan(equation, in_states, path, live)
        if name == "while":
            return self._while(equation, in_states, path, live)
        if name == "cond":
            return self._cond(equation, in_states, path, live)
        if name in COLLECTIVES:
            return self._collective(equation, in_states, path, live)
        if name not in RULES:
            inner = next(iter(core.jaxprs_in_params(equation.params)), None)
            if inner is not None and len(inner.invars) == len(in_states):
                return self.run(inner, in_states, path.into(equation, inner), live)
        columns = [
            self._over_axis(i, equation, in_states, path, live) for i in range(len(self.axes))
        ]
        return list(zip(*columns, strict=True)) if columns else [()] * len(equation.outvars)

    def _over_axis(
        self, index: int, equation: Any, in_states: list[States], path: Path, live: bool
    ) -> list[int]:
        axis, states = self.axes[index], [state[index] for state in in_states]
        name, number = equation.primitive.name, len(equation.outvars)
        if name == "axis_index":
            return [INDEX if axis in names_of(equation) else CONSTANT]
        if name == "name" and equation.params["name"] == TOKEN_VALUES:
            state = self._token_states.get(axis, states[0])
            return [state if states[0] == VARYING or is_split(states[0]) else states[0]]
        rule = RULES.get(name, _unknown)
        try:
            result = rule(equation, states)
        except OmittedSum as error:
            if live:
                operand = equation.invars[error.operand]
                self._alarm("omitted sum", axis, equation, operand, str(error), path)
            # Report the omitted sum once: continue as if it had been taken.
            result = rule(equation, [EQUAL if state == PARTIAL else state for state in states])
        except MissingGather as error:
            factors = [
                v
                for v in equation.invars
                if not isinstance(v, core.Literal) and jnp.issubdtype(v.aval.dtype, jnp.floating)
            ]
            weights = [v for v in factors if inputs_reached(path, [v], HOLDERS)]
            weight = weights[0] if len(weights) == 1 else None
            if live and weight is not None:
                self._alarm("missing gather", axis, equation, weight, str(error), path)
            result = VARYING
        if isinstance(result, list):
            return result
        if name == "optimization_barrier":
            return states
        return [result] * number

    def _collective(
        self, equation: Any, in_states: list[States], path: Path, live: bool
    ) -> list[States]:
        name, over = equation.primitive.name, names_of(equation)
        results = []
        for variable, states in zip(equation.invars, in_states, strict=True):
            if live and name in SUMS:
                self._check_dtype(equation, variable, over, path)
            row = []
            for axis, state in zip(self.axes, states, strict=True):
                if axis not in over:
                    row.append(self._beside(equation, state))
                    continue
                if live and name in SUMS:
                    self._check_sum(equation, variable, axis, state, path)
                row.append(self._after(equation, state, axis))
            results.append(tuple(row))
        return results[: len(equation.outvars)]

    def _beside(self, equation: Any, state: int) -> int:
        """Return a collective's result state over an axis over which it does not communicate."""
        params = equation.params
        if equation.primitive.name in GATHERS and not params.get("tiled", False):
            ndim = len(equation.outvars[0].aval.shape)
            new = params["all_gather_dimension"]
            return moved(state, [dim for dim in range(ndim) if dim != new])
        if equation.primitive.name in ("pmax", "pmin") and state == PARTIAL:
            return VARYING
        return state

    def _after(self, equation: Any, state: int, axis: str) -> int:
        """Return a collective's result state over an axis over which it communicates."""
        name, params = equation.primitive.name, equation.params
        if state in (ZERO, CONSTANT) and name != "ppermute":
            return state
        if name in ("reduce_scatter", "unreduced_reduce_scatter"):
            return split(params["scatter_dimension"]) if params.get("tiled") else VARYING
        if name in SUMS or name in GATHERS or name in ("pmax", "pmin"):
            return EQUAL
        if name == "all_to_all":
            there = dims_of(state) == [params["concat_axis"]] and params.get("tiled", True)
            return split(params["split_axis"]) if there else VARYING
        is_complete = len(params["perm"]) == self.sizes[axis]
        if state == ZERO or (is_complete and (state in FIXED or is_split(state))):
            return state
        return state if is_split(state) else VARYING

    def _check_sum(self, equation: Any, variable: Any, axis: str, state: int, path: Path) -> None:
        if state == EQUAL and not is_mean(path.program, equation):
            self._alarm("summed twice", axis, equation, variable, "is equal on its devices", path)
        elif is_split(state) and not state & ROW:
            text = f"is {name_of(state)}: parts of different elements are added"
            self._alarm("parts added", axis, equation, variable, text, path)

    def _check_dtype(self, equation: Any, variable: Any, over: Sequence[str], path: Path) -> None:
        dtype = variable.aval.dtype
        narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
        axes = [axis for axis in over if axis in self.sizes]
        if narrow and axes and dtype not in self.sum_dtypes:
            text = f"is summed in {dtype}"
            self._alarm("dtype", axes[0], equation, variable, text, path)

    def _alarm(
        self, kind: str, axis: str, equation: Any, operand: Any, text: str, path: Path
    ) -> None:
        # Later iterations of a loop may change an EQUAL carry, e.g. a total that starts at 0.
        if self._first_round and kind not in ("omitted sum", "missing gather"):
            return
        if (id(equation), axis) not in self._seen:
            self._seen.add((id(equation), axis))
            self.alarms.append(Alarm(kind, axis, equation, operand, text, path))

    def _scan(self, equation: Any, in_states: list[States], path: Path, live: bool) -> list[States]:
        body = equation.params["jaxpr"].jaxpr
        constants, carried = _scan_counts(equation)
        fixed, carry = in_states[:constants], in_states[constants : constants + carried]
        rows = [tuple(map(_row, s)) for s in in_states[constants + carried :]]
        inside = path.into(equation, body)
        if live:  # the first iteration has the most precise states
            before, self._first_round = self._first_round, True
            self.run(body, [*fixed, *carry, *rows], inside, live)
            self._first_round = before
        carry = self._fixed_point(
            carry, lambda now: self.run(body, [*fixed, *now, *rows], inside, False)[:carried]
        )
        out = self.run(body, [*fixed, *carry, *rows], inside, live)
        stacked = [
            tuple(moved(s, range(1, 33)) for s in state)  # scan stacks along a new first dim
            for state in out[carried:]
        ]
        return [*carry, *stacked]

    def _while(
        self, equation: Any, in_states: list[States], path: Path, live: bool
    ) -> list[States]:
        params = equation.params
        test, body = params["cond_jaxpr"].jaxpr, params["body_jaxpr"].jaxpr
        of_test, of_body = params["cond_nconsts"], params["body_nconsts"]
        for_test, for_body = in_states[:of_test], in_states[of_test : of_test + of_body]
        carry = self._fixed_point(
            in_states[of_test + of_body :],
            lambda now: self.run(body, [*for_body, *now], path.into(equation, body), False),
        )
        [goes_on] = self.run(test, [*for_test, *carry], path.into(equation, test), live)
        self._check_branches(equation, goes_on, [body, test], path, live)
        self.run(body, [*for_body, *carry], path.into(equation, body), live)
        return [self._chosen(goes_on, [state]) for state in carry]

    def _fixed_point(self, carry: list[States], step: Any) -> list[States]:
        carry = list(carry)
        while True:
            new = step(carry)
            joined = [
                tuple(join(a, b) for a, b in zip(old, one, strict=True))
                for old, one in zip(carry, new, strict=True)
            ]
            if joined == carry:
                return carry
            carry = joined

    def _cond(self, equation: Any, in_states: list[States], path: Path, live: bool) -> list[States]:
        which, operands = in_states[0], in_states[1:]
        branches = [branch.jaxpr for branch in equation.params["branches"]]
        self._check_branches(equation, which, branches, path, live)
        # If devices take different branches, results are unknown over that axis.
        operands = [
            tuple(
                s if w in FIXED or s == ZERO else VARYING for w, s in zip(which, state, strict=True)
            )
            for state in operands
        ]
        out = [self.run(b, operands, path.into(equation, b), live) for b in branches]
        return [self._chosen(which, states) for states in zip(*out, strict=True)]

    def _chosen(self, which: States, cases: Sequence[States]) -> States:
        totals = map(join_all, zip(*cases, strict=True))
        return tuple(
            total if choice in FIXED or total == ZERO else VARYING
            for choice, total in zip(which, totals, strict=True)
        )

    def _check_branches(
        self, equation: Any, which: States, branches: Sequence[Any], path: Path, live: bool
    ) -> None:
        if not live:
            return
        for axis, choice in zip(self.axes, which, strict=True):
            if choice in FIXED:
                continue
            orders = {tuple(_order(branch, axis)) for branch in branches}
            repeated = equation.primitive.name == "while" and orders != {()}
            if len(orders) > 1 or repeated:
                text = "may differ between devices, and decides which collectives run"
                operand = equation.invars[0]
                self._alarm("different order", axis, equation, operand, text, path)


def names_of(equation: Any) -> tuple[str, ...]:
    """Return the mesh axes in the parameters of a collective or `axis_index`."""
    named = equation.params.get("axes", equation.params.get("axis_name", ()))
    return (named,) if isinstance(named, str) else tuple(a for a in named if isinstance(a, str))


def _unknown(_: Any, states: Sequence[int]) -> int:
    """Return the state after an operation without a rule: VARYING if any operand may vary."""
    if all(state in FIXED for state in states):
        return EQUAL if EQUAL in states else CONSTANT
    return VARYING


def _scan_counts(equation: Any) -> tuple[int, int]:
    """Return a scan's number of constants and of carries, in any release of jax."""
    body = equation.params["jaxpr"].jaxpr
    pairs = zip(equation.invars, body.invars, strict=True)
    scanned = sum(x.aval.ndim != inside.aval.ndim for x, inside in pairs)
    results = zip(equation.outvars, body.outvars, strict=True)
    carried = sum(x.aval.ndim == inside.aval.ndim for x, inside in results)
    return len(equation.invars) - scanned - carried, carried


def _row(state: int) -> int:
    """Return the state of a slice [...] along the first dim of an array that a loop scans over."""
    if not is_split(state):
        return state
    return like(split(*[dim - 1 for dim in dims_of(state) if dim]), state)


def _order(program: Any, axis: str) -> list[tuple[str, int]]:
    """Return (collective, number of elements) over an axis in program order, nested ones too."""
    order = []
    for equation in program.eqns:
        if equation.primitive.name in COLLECTIVES and axis in names_of(equation):
            size = math.prod(equation.invars[0].aval.shape)
            order.append((equation.primitive.name, size))
        for inner in core.jaxprs_in_params(equation.params):
            order += _order(inner, axis)
    return order
