"""Collectives of a compiled GPU or CPU program: mesh axes, count, overlap."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from jaxdist.core.parallel.expert import ROUNDS
from jaxdist.core.parallel.pipeline.executor import AT_MOST_ONCE
from jaxdist.plan.compiled.hlo import HloInstruction, Module, UnknownHLO, groups_of, pairs_of, parse
from jaxdist.plan.estimate.traffic import wire_bytes

KINDS = (
    *("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
)

SCALAR_BYTES = 64
"""Smaller arrays are loss sums, counts and norms: latency, but negligible traffic."""

# Operations that run their computation once, in contrast to once per element.
_RUNS_ONCE = ("call", "fusion", "fusion-start", "custom-call", "async-start")
_PER_ELEMENT = (
    *("all-reduce", "reduce-scatter", "reduce", "reduce-window", "all-reduce-start"),
    *("scatter", "select-and-scatter", "sort", "map", "reduce-scatter-start"),
)
_ENDS = {f"{kind}-{end}" for kind in (*KINDS, "async") for end in ("done", "update")}
_COMPUTES = ("fusion", "custom-call", "dot", "convolution", "while", "conditional", "call", "sort")
_LIBRARIES = re.compile(r'custom_call_target="__(cudnn|cublas)')
_SUSPECT = re.compile(r"all-|reduce-scatter|collective|ragged|^send|^recv|^partition-barrier")
_TRIPS = re.compile(r'known_trip_count"?\s*[:=]\s*\{\s*"?n"?\s*[:=]\s*"?(\d+)')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective instruction.

    Attributes:
        axes: mesh axes that its groups span, slow to fast.
        bytes: of the complete arrays of one group: before a reduce-scatter, after an all-gather.
        wire_bytes: bytes that one device sends per execution, with a ring algorithm.
        count: executions per step; inside a branch, as if that branch were always taken; 0 for
            further exchanges of experts.
        in_branch: inside a conditional, or a loop of `run_if`, so `count` is an upper bound.
        nodes: number of groups of fast links that its widest group of devices spans.
        overlapped: asynchronous: other instructions can run between start and end.
        between: number of compute instructions scheduled between start and end.
        products: those that are matrix products: cuDNN, cuBLAS, Triton, or a loop of these.
    """

    kind: str
    axes: tuple[str, ...]
    dtypes: tuple[str, ...]
    bytes: int
    wire_bytes: int
    count: int
    in_branch: bool
    group_size: int
    nodes: int
    overlapped: bool
    between: int
    products: int
    op_name: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Site:
    """A collective in the program: its start, its end, its number of executions."""

    kind: str
    started: HloInstruction
    inner: HloInstruction
    result: HloInstruction
    meanwhile: tuple[HloInstruction, ...] = ()
    overlapped: bool = False
    times: int = 1
    in_branch: bool = False


def read_collectives(
    text: str, mesh: Mapping[str, int], *, gpus_per_node: int = 0
) -> list[Collective]:
    """Return the collectives of `compiled.as_text()` that move arrays of `SCALAR_BYTES` or more.

    `mesh` maps axis names, slow to fast, to sizes; devices are numbered in mesh order. Fast links
    connect groups of `gpus_per_node` devices; 0 = all. Raises `UnknownHLO`.
    """
    module, collectives = parse(text), []
    is_product = _product_finder(module)
    per_node = gpus_per_node or math.prod(mesh.values())
    for site in _walk(module):
        shapes = [shape for shape in site.result.shapes if shape.num_bytes >= SCALAR_BYTES]
        groups, axes = groups_and_axes(site.inner, site.kind, mesh)
        size = 2 if site.kind == "collective-permute" else len(groups[0])
        if not shapes or size == 1:
            continue
        factor = size if site.kind == "reduce-scatter" else 1
        total = factor * sum(shape.num_bytes for shape in shapes)
        collectives.append(
            Collective(
                kind=site.kind,
                axes=axes,
                dtypes=tuple(sorted({shape.dtype for shape in shapes})),
                bytes=total,
                wire_bytes=int(wire_bytes(site.kind, total, size)),
                count=site.times,
                in_branch=site.in_branch,
                group_size=size,
                nodes=max(len({i // per_node for i in group}) for group in groups),
                overlapped=site.overlapped,
                between=len(site.meanwhile),
                products=sum(map(is_product, site.meanwhile)),
                op_name=site.inner.op_name or site.started.op_name,
            )
        )
    return collectives


def custom_calls(text: str) -> list[tuple[str, HloInstruction]]:
    """Return (target, instruction) of every custom call, including uncalled computations."""
    calls = []
    for instructions in parse(text).computations.values():
        for instruction in instructions:
            target = re.search(r'custom_call_target="([^"]+)"', instruction.attributes)
            if instruction.opcode.startswith("custom-call") and target:
                calls.append((target[1], instruction))
    return calls


def _walk(module: Module) -> list[_Site]:
    @functools.cache
    def inside(name: str) -> list[_Site]:
        return list(_computation(module, name, inside))

    return inside(module.entry)


def _computation(
    module: Module, name: str, inside: Callable[[str], list[_Site]]
) -> Iterator[_Site]:
    instructions = module.computations[name]
    for index, instruction in enumerate(instructions):
        opcode, called = instruction.opcode, module.called(instruction)
        kind = opcode.removesuffix("-start")
        if kind in KINDS:
            yield _site(kind, instructions, index, instruction, opcode != kind)
        elif opcode == "async-start":
            yield from _wrapped(module, instructions, index, called)
        elif opcode in _ENDS:
            continue
        elif _SUSPECT.search(opcode):
            raise UnknownHLO(f"unknown collective {opcode!r}: {instruction}")
        elif opcode == "while":
            optional = f"/{AT_MOST_ONCE}/" in instruction.op_name
            for site in [s for child in called for s in inside(child)]:
                # Only loops with collectives need a known length.
                times, in_branch = site.times * trips_of(instruction), site.in_branch or optional
                yield dataclasses.replace(site, times=times, in_branch=in_branch)
        elif opcode == "conditional":
            for child in called:
                yield from (dataclasses.replace(s, in_branch=True) for s in inside(child))
        elif opcode in _RUNS_ONCE:
            for child in called:
                yield from inside(child)
        elif called and (
            opcode not in _PER_ELEMENT or any(True for child in called for _ in inside(child))
        ):
            raise UnknownHLO(f"unknown caller {opcode!r}: {instruction}")


def trips_of(instruction: HloInstruction) -> int:
    """Return a loop's iterations: 0 of further expert exchanges, 1 if it replaces a branch."""
    if f"/{ROUNDS}/" in instruction.op_name:
        return 0
    if match := _TRIPS.search(instruction.attributes):
        return int(match[1])
    if f"/{AT_MOST_ONCE}/" in instruction.op_name:
        return 1
    raise UnknownHLO(f"a loop of unknown length: {instruction}")


def _wrapped(
    module: Module, instructions: list[HloInstruction], index: int, called: list[str]
) -> Iterator[_Site]:
    """Yield the collective in the computation of an `async-start`, if it contains one."""
    for child in called:
        for inner in module.computations[child]:
            if inner.opcode in KINDS:
                yield _site(inner.opcode, instructions, index, inner, True)
            elif _SUSPECT.search(inner.opcode):
                raise UnknownHLO(f"unknown collective {inner.opcode!r}: {inner}")


def _site(
    kind: str, instructions: list[HloInstruction], index: int, inner: HloInstruction, split: bool
) -> _Site:
    started = instructions[index]
    if not split:
        return _Site(kind=kind, started=started, inner=inner, result=started)
    end = end_of(instructions, index)
    return _Site(
        kind=kind,
        started=started,
        inner=inner,
        # The type of a start instruction includes its operands; the type of its end does not.
        result=inner if inner is not started else instructions[end],
        meanwhile=tuple(i for i in instructions[index + 1 : end] if i.opcode in _COMPUTES),
        overlapped='"is_sync":true' not in started.attributes,
    )


def _product_finder(module: Module) -> Callable[[HloInstruction], bool]:
    """Return a predicate: the instruction multiplies matrices, also in computations it calls."""

    @functools.cache
    def multiplies(name: str) -> bool:
        return any(map(is_product, module.computations[name]))

    def is_product(instruction: HloInstruction) -> bool:
        if instruction.opcode in ("dot", "convolution"):
            return True
        if instruction.opcode == "custom-call" and _LIBRARIES.search(instruction.attributes):
            return True
        return any(map(multiplies, module.called(instruction)))

    return is_product


def end_of(instructions: list[HloInstruction], index: int) -> int:
    """Return the index of the instruction that ends the async operation started at `index`."""
    started = instructions[index]
    prefix = started.opcode.removesuffix("-start")
    name = started.name
    for end in range(index + 1, len(instructions)):
        other = instructions[end]
        if name in other.operand_names:
            if other.opcode == f"{prefix}-update":
                name = other.name
            elif other.opcode == f"{prefix}-done":
                return end
    raise UnknownHLO(f"started and never awaited: {started}")


def groups_and_axes(
    instruction: HloInstruction, kind: str, mesh: Mapping[str, int]
) -> tuple[Sequence[Sequence[int]], tuple[str, ...]]:
    """Return the device groups (of a permute: its pairs) and the mesh axes that they span."""
    if kind == "collective-permute":
        pairs = pairs_of(instruction)
        return pairs, _permuted_axes(pairs, mesh)
    groups = groups_of(instruction, math.prod(mesh.values()))
    return groups, _axes(groups, mesh, instruction)


def _axes(
    groups: Sequence[Sequence[int]], mesh: Mapping[str, int], instruction: HloInstruction
) -> tuple[str, ...]:
    """Return the mesh axes that device groups span; if they are parts of one axis, that axis."""
    names, sizes = list(mesh), list(mesh.values())
    expected = {frozenset(group) for group in groups}
    size = len(groups[0])
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    in_use = [i for i, length in enumerate(sizes) if length > 1]
    for count in range(len(in_use) + 1):
        for spanned in itertools.combinations(in_use, count):
            if math.prod(sizes[i] for i in spanned) != size:
                continue
            last = np.moveaxis(ids, spanned, range(-count, 0)) if count else ids
            if {frozenset(row) for row in last.reshape(-1, size).tolist()} == expected:
                return tuple(names[i] for i in spanned)
    pairs = [(group[0], other) for group in groups for other in group[1:]]
    if len(within := _permuted_axes(pairs, mesh)) == 1:
        return within
    raise UnknownHLO(f"groups do not match mesh axes: {instruction}")


def _permuted_axes(pairs: Sequence[Sequence[int]], mesh: Mapping[str, int]) -> tuple[str, ...]:
    sizes = list(mesh.values())
    moved: set[int] = set()
    for source, target in pairs:
        here, there = (np.unravel_index(i, sizes) for i in (source, target))
        moved |= {i for i in range(len(sizes)) if here[i] != there[i]}
    return tuple(name for i, name in enumerate(mesh) if i in moved)
