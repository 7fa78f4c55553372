"""Audit of a run's train step: violations with source lines, and its collectives, as text."""

from __future__ import annotations

import dataclasses
import linecache
import logging
import math
import pathlib
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr

from jaxdist.core.axis import dim_of, spec_over
from jaxdist.core.collective_order import COLLECTIVES
from jaxdist.core.sharding import Layout
from jaxdist.core.step.omitted_sums import JAX, OWN
from jaxdist.core.types import Model
from jaxdist.plan.audit.flow import Path, inputs_reached, origins, outputs_reached, variables_of
from jaxdist.plan.audit.interpreter import GATHERS, SUMS, Alarm, Interpreter, names_of
from jaxdist.plan.audit.states import EQUAL, PARTIAL, split
from jaxdist.runtime.formatting.numbers import in_bytes
from jaxdist.runtime.formatting.tables import columns, wrap

log = logging.getLogger("jaxdist")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Violation:
    """An error that the audit of a step finds.

    Attributes:
        kind: "summed twice", "gathered, then summed", "omitted sum", "parts added", "missing
            gather", "different order" or "dtype".
        value: a parameter, its gradient, a result of the step, or a type.
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
        """Return one line: the mesh axes, and the number of violations, or else of collectives."""
        over = ", ".join(self.axes) or "one device"
        count = sum(transfer.num_sites for transfer in self.transfers)
        if not self.is_clean:
            return f"mesh audit: {len(self.violations)} violations over {over}"
        return (
            f"mesh audit: {count} collectives over {over}, {self.num_parameters} parameter "
            f"arrays followed, no sum missing or taken twice ({self.seconds:.1f} s)"
        )


def text_of(audit: Audit) -> str:
    """Return a table of transfers, then the violations, then the result."""
    lines = columns(_rows(audit.transfers), left=4) if audit.transfers else []
    if any(transfer.at_most for transfer in audit.transfers):
        lines += ["", "≤: with branches that a device may skip, and one round of `while` loops."]
    for violation in audit.violations:
        lines += ["", *wrap(str(violation), head="  ✗ ")]
    return "\n".join([*lines, "", audit.line()]).lstrip("\n")


def _rows(transfers: Iterable[Transfer]) -> list[tuple[str, ...]]:
    head = ("purpose", "collective", "over", "dtype", "times a step", "bytes a step")
    rows: list[tuple[str, ...]] = [head]
    for one in transfers:
        most = "≤ " if one.at_most else ""
        moved = f"{most}{one.times}", most + in_bytes(one.num_bytes)
        rows.append((one.purpose, one.kind, "+".join(one.axes), one.dtype, *moved))
    return rows


def audit_program(
    program: Any,
    model: Model,
    layout: Layout,
    *,
    sum_dtypes: Iterable[Any] = (),
    gradient_dtype: Any = jnp.float32,
) -> Audit:
    """Return the audit of a jaxpr: of a step, of gradients (`make_value_and_grad`), or evaluation.

    Besides 4 bytes or more, reductions may use `sum_dtypes`, and those of gradients only
    `gradient_dtype`. Empty without a `shard_map` over several devices.
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
    path, made = alarm.path, list(origins(alarm.path.program, alarm.operand))
    kind = alarm.kind
    moves = (e for e in made if e.primitive.name in SUMS | GATHERS and alarm.axis in names_of(e))
    if kind == "summed twice" and (last := next(moves, None)) is not None:
        kind = "gathered, then summed" if last.primitive.name in GATHERS else kind
    line = line_of(alarm.equation)
    if line is not None and line.file.startswith(OWN):  # prefer a line in the user's own model
        model_lines = filter(None, map(model_line, made))
        line = next((other for other in model_lines if not other.file.startswith(OWN)), line)
    gradient = names.gradient(outputs_reached(path, alarm.equation.outvars))
    value = gradient or names.parameter(inputs_reached(path, [alarm.operand]))
    value = value or f"a value {alarm.operand.aval.str_short()}"
    return _violation(kind, alarm.axis, value, line, alarm.text)


def _violation(kind: str, axis: str, value: str, line: SourceLine | None, text: str) -> Violation:
    where, code = (str(line), line.text) if line else ("", "")
    return Violation(
        kind=kind, axis=axis, value=value, line=where, code=code, text=text, fix=_FIXES[kind]
    )


def _unsummed(name: str, axis: str, body: Any, variable: Any) -> Violation:
    """Return the violation of a partial sum that leaves the step as if it were complete."""
    made = next((e for e in reversed(body.eqns) if variable in e.outvars), None)
    line = line_of(made) if made is not None else None
    text = "leaves the step as a partial sum of each device"
    return _violation("omitted sum", axis, name, line, text)


def _narrow_gradients(
    path: Path, names: _Names, sizes: dict[str, int], expected: Any
) -> list[Violation]:
    """Return a violation for each gradient reduced in a narrow dtype other than `expected`."""
    violations = []
    # Only reductions: operands of other equations, such as tokens, may have no dtype.
    for equation in (e for e in path.program.eqns if e.primitive.name in SUMS):
        dtypes = [v.aval.dtype for v in equation.invars]
        narrow = [d for d in dtypes if jnp.issubdtype(d, jnp.floating) and d.itemsize < 4]
        axes = [axis for axis in names_of(equation) if axis in sizes]
        if not narrow or narrow[0] == expected or not axes:
            continue
        gradient = names.gradient(outputs_reached(path, equation.outvars))
        if gradient is not None:
            text = f"is summed in {narrow[0]}, precision.reduce_dtype is {expected}"
            violations.append(_violation("dtype", axes[0], gradient, line_of(equation), text))
    return violations


_KINDS = {
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
    "reduce_scatter": "reduce-scatter",
    "unreduced_reduce_scatter": "reduce-scatter",
}

_PURPOSES = (
    ("core/parallel/reduction.py", "squared_norm", "gradient norm"),
    ("core/parallel/reduction.py", "", "gradient reduction"),
    ("core/parallel/fsdp.py", "", "parameter gather"),
    ("core/parallel/tensor.py", "add_layers", "sums of blocks"),
    ("core/attention/", "", "attention over split rows"),
    ("core/losses.py", "", "loss over the vocabulary"),
    ("core/step/gradients.py", "_sum_over_devices", "loss, weight, metrics"),
    ("core/parallel/pipeline/executor.py", "", "pipeline exchange"),
    ("core/parallel/pipeline/virtual_stages.py", "", "virtual stages' parameters"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Transfer:
    """Collectives of one kind, purpose, dtype and group of mesh axes.

    Attributes:
        purpose: the package's reason for them, or the line of the model that calls them.
        kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or "collective-permute".
        num_sites: number of equations in the program.
        times: number of executions in one step on one device.
        at_most: some are in branches, counted as taken, or in `while` loops, counted as one round.
        num_bytes: per step, of complete arrays: before a reduce-scatter, after an all-gather.
    """

    purpose: str
    kind: str
    axes: tuple[str, ...]
    dtype: str
    num_sites: int
    times: int
    at_most: bool
    num_bytes: int


def transfers_of(body: Any, sizes: dict[str, int]) -> list[Transfer]:
    """Return the collectives of a program over the axes in `sizes`, largest first."""
    transfers: dict[Any, Transfer] = {}
    for equation, times, in_branch in _walk(body, 1, False):
        axes = tuple(axis for axis in sizes if axis in names_of(equation))
        name = equation.primitive.name
        if name not in COLLECTIVES or not axes:
            continue
        arrays = equation.outvars if name in GATHERS else equation.invars
        for variable in arrays:
            aval = variable.aval
            one = Transfer(
                purpose=purpose_of(equation),
                kind=_KINDS.get(name, "all-gather" if name in GATHERS else "all-reduce"),
                axes=axes,
                dtype=str(aval.dtype),
                num_sites=1,
                times=times,
                at_most=in_branch,
                num_bytes=times * math.prod(aval.shape) * aval.dtype.itemsize,
            )
            key = (one.purpose, one.kind, one.axes, one.dtype)
            transfers[key] = _added(transfers[key], one) if key in transfers else one
    return sorted(transfers.values(), key=lambda one: -one.num_bytes)


def purpose_of(equation: Any) -> str:
    """Return the purpose of a collective: the package's reason, or the line of the model."""
    lines = [line for line in lines_of(equation) if not line.file.endswith("core/collectives.py")]
    if not lines:
        return "unknown"
    first = lines[0]
    if first.file.endswith("core/parallel/tensor.py") and first.function.endswith("<lambda>"):
        return (
            f"activations, {first.text.split(chr(34))[1]}" if '"' in first.text else "activations"
        )
    kind = _KINDS.get(equation.primitive.name, "")
    if first.file.endswith("core/parallel/fsdp.py") and kind == "reduce-scatter":
        return "gradient reduction, sharded"
    for file, function, purpose in _PURPOSES:
        # An entry without a function applies to the complete file or folder.
        if f"jaxdist/{file}" in first.file and function in first.function:
            return purpose
    line = line_of(equation) or first
    return f"{line} {line.function}"


def _added(left: Transfer, right: Transfer) -> Transfer:
    return dataclasses.replace(
        left,
        num_sites=left.num_sites + 1,
        times=left.times + right.times,
        at_most=left.at_most or right.at_most,
        num_bytes=left.num_bytes + right.num_bytes,
    )


def _walk(program: Any, times: int, in_branch: bool) -> Iterator[tuple[Any, int, bool]]:
    """Yield the needed nested equations, their number of executions, and whether in a branch."""
    for equation in _needed(program):
        yield equation, times, in_branch
        name = equation.primitive.name
        inner_times = times * equation.params["length"] if name == "scan" else times
        uncertain = in_branch or name in ("cond", "while")
        inner = list(core.jaxprs_in_params(equation.params))
        if name not in ("scan", "cond", "while"):
            inner = inner[:1]  # the forward and backward of a custom rule are not executed here
        for part in inner:
            yield from _walk(part, inner_times, uncertain)


def _needed(program: Any) -> list[Any]:
    """Return the equations that results or callbacks need; the compiler removes the others."""
    needed, used = [], variables_of(program.outvars)
    for equation in reversed(program.eqns):
        # Axis names are effects too. All other effects are callbacks, which must run.
        acts = any(type(effect).__name__ != "NamedAxisEffect" for effect in equation.effects)
        if acts or not used.isdisjoint(equation.outvars):
            needed.append(equation)
            used |= variables_of(equation.invars)
    return needed[::-1]


_MACHINERY = tuple(str(pathlib.Path(OWN, name)) for name in ("core", "plan", "run", "tools"))


@dataclasses.dataclass(frozen=True)
class SourceLine:
    """A line of code; `number` counts from 1."""

    file: str
    number: int
    function: str

    def __str__(self) -> str:
        path = pathlib.Path(self.file)
        name = path.relative_to(pathlib.Path(OWN).parent) if path.is_relative_to(OWN) else path
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
