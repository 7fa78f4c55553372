"""Audit of a run's train step: names of inputs and outputs, violations as text, report."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr

from jaxdist.core.axis import dim_of, spec_over
from jaxdist.core.sharding import Layout
from jaxdist.core.types import Model
from jaxdist.plan.audit.flow import Path, inputs_reached, origins, outputs_reached
from jaxdist.plan.audit.interpreter import GATHERS, SUMS, Alarm, Interpreter, names_of
from jaxdist.plan.audit.source import is_own, line_of, model_line
from jaxdist.plan.audit.states import EQUAL, PARTIAL, split
from jaxdist.plan.audit.transfers import Transfer, transfers_of
from jaxdist.runtime.formatting.numbers import in_bytes
from jaxdist.runtime.formatting.tables import columns, wrap

log = logging.getLogger("jaxdist")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Violation:
    """An error that the audit of a step finds.

    Attributes:
        kind: "summed twice", "gathered, then summed", "omitted sum", "parts added", "missing
            gather", "different order" or "dtype".
        value: the parameter whose gradient is affected, or the type of the value.
        line: `file:line` in the model, else in the package; "" if unknown.
    """

    kind: str
    axis: str
    value: str
    line: str
    code: str
    text: str
    fix: str

    def __str__(self) -> str:
        where = f" at {self.line}" if self.line else ""
        code = f" `{self.code}`" if self.code else ""
        return f"{self.kind} over {self.axis}{where}{code}: {self.value} {self.text}. {self.fix}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Audit:
    """Result of the audit of one step over `axes`; `seconds` exclude tracing."""

    axes: dict[str, int]
    violations: list[Violation]
    transfers: list[Transfer]
    num_parameters: int
    seconds: float

    @property
    def is_clean(self) -> bool:
        """Return True if there is no violation."""
        return not self.violations

    def line(self) -> str:
        """Return the verdict in one line."""
        over = ", ".join(self.axes) or "one device"
        count = sum(transfer.num_sites for transfer in self.transfers)
        if not self.is_clean:
            return f"mesh audit: {len(self.violations)} violations over {over}"
        return (
            f"mesh audit: {count} collectives over {over}, gradients of {self.num_parameters} "
            f"parameters followed, no sum missing or taken twice ({self.seconds:.1f} s)"
        )


def text_of(audit: Audit) -> str:
    """Return a table of transfers, then the violations, then the verdict."""
    lines = columns(_rows(audit.transfers), left=4) if audit.transfers else []
    if any(transfer.at_most for transfer in audit.transfers):
        lines += ["", "≤: upper bound; some are in branches that a stage takes only in some ticks."]
    for violation in audit.violations:
        lines += ["", *wrap(str(violation), head="  ✗ ")]
    return "\n".join([*lines, "", audit.line()]).lstrip("\n")


def _rows(transfers: Iterable[Transfer]) -> list[tuple[str, ...]]:
    head = ("purpose", "collective", "over", "dtype", "times a step", "bytes a step")
    rows: list[tuple[str, ...]] = [head]
    for one in transfers:
        most = "≤ " if one.at_most else ""
        rows.append(
            (
                one.purpose,
                one.kind,
                "+".join(one.axes),
                one.dtype,
                f"{most}{one.times}",
                most + in_bytes(one.num_bytes),
            )
        )
    return rows


def audit_program(
    program: Any,
    model: Model,
    layout: Layout,
    *,
    sum_dtypes: Iterable[Any] = (),
    gradient_dtype: Any = jnp.float32,
) -> Audit:
    """Audit the jaxpr of a step, of its gradients (`make_value_and_grad`), or of evaluation.

    Reductions may also use `sum_dtypes`. Gradients must be reduced in `gradient_dtype` or wider.
    """
    start = time.perf_counter()
    sizes = {a: n for a, n in layout.mesh.shape.items() if n > 1 and a in layout.manual_axes}
    manual = find_manual(program)
    if manual is None or not sizes:
        return Audit(axes={}, violations=[], transfers=[], num_parameters=0, seconds=0.0)
    names = _Names(manual, model, layout)
    body = manual.params["jaxpr"]
    body = getattr(body, "jaxpr", body)
    indices = {axis: dim_of(layout.batch_spec(), axis) for axis in sizes}
    tokens = {axis: split(dim) for axis, dim in indices.items() if dim is not None}
    interpreter = Interpreter(sizes, sum_dtypes, tokens)
    inputs = [
        tuple(EQUAL if (dim := dim_of(spec, axis)) is None else split(dim) for axis in sizes)
        for spec in manual.params["in_specs"]
    ]
    outputs = interpreter.run(body, inputs, Path(body), live=True)
    violations = [_explained(alarm, names) for alarm in interpreter.alarms]
    for index, states in enumerate(outputs):
        for axis, state in zip(sizes, states, strict=True):
            if state == PARTIAL:
                violations.append(_unsummed(names.output(index), axis, body, body.outvars[index]))
    violations += _narrow_gradients(Path(body), names, sizes, jnp.dtype(gradient_dtype))
    return Audit(
        axes=sizes,
        violations=violations,
        transfers=transfers_of(body, sizes),
        num_parameters=names.num_leaves,
        seconds=time.perf_counter() - start,
    )


def find_manual(program: Any) -> Any:
    """Return the equation of the step's `shard_map`, or None."""
    for equation in program.eqns:
        if equation.primitive.name == "shard_map":
            return equation
        for inner in core.jaxprs_in_params(equation.params):
            if (nested := find_manual(inner)) is not None:
                return nested
    return None


class _Names:
    """Names of the inputs and outputs of the `shard_map` part of a step."""

    def __init__(self, manual: Any, model: Model, layout: Layout) -> None:
        leaves = jax.tree_util.tree_leaves_with_path(model.axes)
        self.params = [keystr(path, simple=True, separator="/") for path, _ in leaves]
        self.num_leaves = len(leaves)
        self.gradients = [
            name
            for name, (_, dims) in zip(self.params, leaves, strict=True)
            if dims.update != "none"
        ]
        # A train step returns sums, gradients and their norm; evaluation returns only sums.
        num_out = len(manual.params["out_specs"])
        self.first_gradient = max(num_out - 1 - len(self.gradients), 0) or num_out
        # Constants of the program come before the parameters.
        in_specs = list(manual.params["in_specs"])
        specs = jax.tree.leaves(layout.param_specs(model.axes), is_leaf=lambda x: isinstance(x, P))
        specs = [spec_over(spec, layout.manual_axes) for spec in specs]
        indices = range(len(in_specs) - len(specs) + 1)
        ndims = [variable.aval.ndim for variable in manual.params["jaxpr"].invars]
        expected = [(spec, len(dims)) for spec, (_, dims) in zip(specs, leaves, strict=True)]
        inputs = list(zip(in_specs, ndims, strict=True))
        fits = (index for index in indices if inputs[index : index + len(specs)] == expected)
        self.first_param = next(fits, len(in_specs))

    def output(self, index: int) -> str:
        if 0 <= index - self.first_gradient < len(self.gradients):
            return f"the gradient of {self.gradients[index - self.first_gradient]}"
        if index == self.first_gradient + len(self.gradients):
            return "the gradient norm"
        return "a sum that the model returns (loss, weight, ...)"

    def gradient(self, indices: Iterable[int]) -> str | None:
        gradients = {p for p in indices if 0 <= p - self.first_gradient < len(self.gradients)}
        return self.output(gradients.pop()) if len(gradients) == 1 else None

    def parameter(self, indices: Iterable[int]) -> str | None:
        parameters = [p - self.first_param for p in indices]
        parameters = [p for p in parameters if 0 <= p < self.num_leaves]
        return f"parameter {self.params[parameters[0]]}" if len(parameters) == 1 else None


_FIXES = {
    "summed twice": "Remove one of the two sums, or sum only what each device computed alone.",
    "gathered, then summed": "A gathered value is complete: sum before the gather, or remove "
    "the sum.",
    "omitted sum": "Sum it over the axis first (Context.leave, collectives.all_reduce).",
    "parts added": "Sum over the split dim on each device first, or gather the parts.",
    "missing gather": "Gather it over the axis before the product (collectives.all_gather, "
    "Context.gather, Context.enter).",
    "different order": "Move the collective out of the branch or loop, so that all devices of the "
    "axis meet in it.",
    "dtype": "Cast to float32 before the sum and back after it, or set precision.reduce_dtype.",
}


def _explained(alarm: Alarm, names: _Names) -> Violation:
    """Return the violation for an alarm, with its parameter, line and fix."""
    path, made = alarm.path, list(origins(alarm.path.program, alarm.operand))
    kind = alarm.kind
    moves = (e for e in made if e.primitive.name in SUMS | GATHERS and alarm.axis in names_of(e))
    if kind == "summed twice" and (last := next(moves, None)) is not None:
        kind = "gathered, then summed" if last.primitive.name in GATHERS else kind
    line = line_of(alarm.equation)
    if line is not None and is_own(line):  # prefer a line in the user's own model
        model_lines = (model_line(equation) for equation in made)
        line = next((other for other in model_lines if other and not is_own(other)), line)
    gradient = names.gradient(outputs_reached(path, alarm.equation.outvars))
    value = gradient or names.parameter(inputs_reached(path, [alarm.operand]))
    return Violation(
        kind=kind,
        axis=alarm.axis,
        value=value or f"a value {alarm.operand.aval.str_short()}",
        line=str(line) if line else "",
        code=line.text if line else "",
        text=alarm.text,
        fix=_FIXES[kind],
    )


def _unsummed(name: str, axis: str, body: Any, variable: Any) -> Violation:
    """Return the violation of a partial sum that leaves the step as if it were complete."""
    made = next((e for e in reversed(body.eqns) if variable in e.outvars), None)
    line = line_of(made) if made is not None else None
    return Violation(
        kind="omitted sum",
        axis=axis,
        value=name,
        line=str(line) if line else "",
        code=line.text if line else "",
        text="leaves the step as a partial sum of each device",
        fix=_FIXES["omitted sum"],
    )


def _narrow_gradients(
    path: Path, names: _Names, sizes: dict[str, int], expected: Any
) -> list[Violation]:
    """Return violations of gradients reduced in a narrower dtype than configured."""
    violations = []
    # Only reductions: operands of other equations, such as tokens, may have no dtype.
    for equation in (e for e in path.program.eqns if e.primitive.name in SUMS):
        dtypes = [v.aval.dtype for v in equation.invars]
        narrow = [d for d in dtypes if jnp.issubdtype(d, jnp.floating) and d.itemsize < 4]
        axes = [axis for axis in names_of(equation) if axis in sizes]
        if not narrow or narrow[0] == expected or not axes:
            continue
        gradient = names.gradient(outputs_reached(path, equation.outvars))
        if gradient is None:
            continue
        line = line_of(equation)
        violations.append(
            Violation(
                kind="dtype",
                axis=axes[0],
                value=gradient,
                line=str(line) if line else "",
                code=line.text if line else "",
                text=f"is summed in {narrow[0]}, precision.reduce_dtype is {expected}",
                fix=_FIXES["dtype"],
            )
        )
    return violations
