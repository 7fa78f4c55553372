"""Collectives of a traced step: count, bytes and purpose."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from jax.extend import core

from jaxdist.core.collective_order import COLLECTIVES
from jaxdist.plan.audit.interpreter import GATHERS, names_of
from jaxdist.plan.audit.source import line_of, lines_of

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
    """Collectives of one kind with the same purpose.

    Attributes:
        purpose: the package's reason for them, or the line of the model that calls them.
        kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all" or "collective-permute".
        num_sites: number of equations in the program.
        times: number of executions in one step on one device.
        at_most: `times` is an upper bound, because a device may skip the branch of some.
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
    """Yield all nested equations with their number of executions, and whether in a branch."""
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
    """Return the equations that the results depend on; the compiler removes the others."""
    needed, used = [], set(filter(_is_variable, program.outvars))
    for equation in reversed(program.eqns):
        # Axis names are effects too. All other effects are callbacks, which must run.
        acts = any(type(effect).__name__ != "NamedAxisEffect" for effect in equation.effects)
        if acts or not used.isdisjoint(equation.outvars):
            needed.append(equation)
            used |= set(filter(_is_variable, equation.invars))
    return needed[::-1]


def _is_variable(operand: Any) -> bool:
    return not isinstance(operand, core.Literal)
