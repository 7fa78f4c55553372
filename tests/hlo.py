"""Reads the collectives out of a compiled program's text (HLO): kind, mesh axes, bytes, how often.

What the compiler really emits, after its own rewriting, is what goes over the wire; the traced
program only says what we asked for. Text that this reader does not know raises: a collective that
is overlooked would make every test of traffic a lie. So do the asynchronous forms (`-start`,
`-done`) of the GPU compiler, which no test here compiles for.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator

import numpy as np
from jax.sharding import Mesh

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

ITEM_BYTES = {
    **dict.fromkeys(("pred", "s8", "u8"), 1),
    **dict.fromkeys(("s16", "u16", "bf16", "f16"), 2),
    **dict.fromkeys(("s32", "u32", "f32"), 4),
    **dict.fromkeys(("s64", "u64", "f64"), 8),
}

SCALAR_BYTES = 64
"""Arrays below this are loss sums, counts and norms: a latency, not traffic; left out."""

# Operations that run a computation once; the others that name one pass it an element at a time.
_RUNS_ONCE = ("call", "fusion", "custom-call")
_PER_ELEMENT = (
    *("all-reduce", "reduce-scatter", "reduce", "reduce-window"),
    *("scatter", "select-and-scatter", "sort", "map"),
)
_SUSPECT = re.compile(r"all-|reduce-scatter|collective|ragged|^send|^recv")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction.

    Attributes:
        kind: one of `KINDS`.
        axes: mesh axes its groups span, slow to fast.
        bytes: of the whole arrays, before a reduce-scatter or after an all-gather.
        count: how often a step runs it.
        dtypes: of its arrays.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    count: int
    dtypes: tuple[str, ...]


def collectives(text: str, mesh: Mesh) -> list[Collective]:
    """Every collective of a program above `SCALAR_BYTES`, with its trip count.

    Args:
        text: `compiled.as_text()`.
        mesh: the mesh that the program runs on.

    Raises:
        ValueError: something in the text is unknown.
    """
    found = []
    for kind, line, count in _collective_lines(text):
        shapes = [shape for shape in _shapes(_result(line)) if _bytes(shape) >= SCALAR_BYTES]
        axes, size = _axes(line, mesh)
        if not shapes or size == 1:
            continue
        whole = size if kind == "reduce-scatter" else 1
        found.append(
            Collective(
                kind,
                axes,
                whole * sum(_bytes(shape) for shape in shapes),
                count,
                tuple(sorted({dtype for dtype, _ in shapes})),
            )
        )
    return found


def traffic(text: str, mesh: Mesh) -> dict[tuple[str, str], tuple[int, int]]:
    """(kind, "data+fsdp") -> (instructions run, bytes of whole arrays), per step."""
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for c in collectives(text, mesh):
        key = (c.kind, "+".join(c.axes))
        count, moved = totals.get(key, (0, 0))
        totals[key] = (count + c.count, moved + c.count * c.bytes)
    return totals


def _collective_lines(text: str) -> Iterator[tuple[str, str, int]]:
    computations, entry = _computations(text)

    def walk(name: str, times: int) -> Iterator[tuple[str, str, int]]:
        for line in computations[name]:
            opcode = _opcode(line)
            called = _called(line, computations)
            if opcode in KINDS:
                yield opcode, line, times
            elif _SUSPECT.search(opcode):
                raise ValueError(f"unknown collective {opcode!r}: {line.strip()[:200]}")
            if opcode == "while":
                inside = [c for child in called for c in walk(child, 1)]
                if inside:
                    trips = re.search(r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)', line)
                    if trips is None:
                        raise ValueError(f"a loop of unknown length: {line.strip()[:200]}")
                    yield from ((k, ln, times * n * int(trips[1])) for k, ln, n in inside)
            elif opcode in _RUNS_ONCE:
                for child in called:
                    yield from walk(child, times)
            elif called:
                # A branch may or may not run, a reducer holds no collective: neither is counted.
                if any(True for child in called for _ in walk(child, 1)):
                    raise ValueError(f"collectives inside {opcode!r}: {line.strip()[:200]}")
                if opcode not in (*_PER_ELEMENT, "conditional"):
                    raise ValueError(f"unknown caller {opcode!r}: {line.strip()[:200]}")

    yield from walk(entry, 1)


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """Name -> its instructions' lines, and the name of the entry."""
    computations: dict[str, list[str]] = {}
    entry, current = None, None
    for line in text.splitlines():
        header = re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$", line)
        if header:
            current = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and re.match(r"^\s+(ROOT )?%?[\w.\-]+ = ", line):
            current.append(line)
    if entry is None:
        raise ValueError("no entry computation: this is not the text of a compiled program")
    return computations, entry


def _split(line: str) -> tuple[str, str]:
    """An instruction's result type, and what follows it."""
    rest = line.split(" = ", 1)[1]
    if not rest.startswith("("):
        result, rest = rest.split(" ", 1)
        return result, rest
    depth = 0
    for i, char in enumerate(rest):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return rest[: i + 1], rest[i + 1 :].strip()
    raise ValueError(f"unbalanced type: {line.strip()[:200]}")


def _result(line: str) -> str:
    return _split(line)[0]


def _opcode(line: str) -> str:
    match = re.match(r"([\w\-]+)\(", _split(line)[1])
    if match is None:
        raise ValueError(f"no operation in: {line.strip()[:200]}")
    return match[1]


def _called(line: str, computations: dict[str, list[str]]) -> list[str]:
    """Computations that an instruction names."""
    attributes = re.sub(r"metadata=\{.*", "", line.split(" = ", 1)[1])
    names = re.findall(
        r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)",
        attributes,
    )
    for group in re.findall(r"(?:branch_computations|called_computations)=\{([^}]*)\}", attributes):
        names += [name.strip().lstrip("%") for name in group.split(",")]
    return [name for name in names if name in computations]


def _shapes(result: str) -> list[tuple[str, tuple[int, ...]]]:
    return [
        (dtype, tuple(int(d) for d in dims.split(",") if d))
        for dtype, dims in re.findall(r"([a-z]+[0-9]*[a-z0-9]*)\[([0-9,]*)\]", result)
    ]


def _bytes(shape: tuple[str, tuple[int, ...]]) -> int:
    dtype, dims = shape
    if dtype not in ITEM_BYTES:
        raise ValueError(f"unknown dtype {dtype!r}")
    return ITEM_BYTES[dtype] * math.prod(dims)


def _axes(line: str, mesh: Mesh) -> tuple[tuple[str, ...], int]:
    """The mesh axes that an instruction's groups span, and the size of a group."""
    names = list(mesh.axis_names)
    sizes = [mesh.shape[name] for name in names]
    if "source_target_pairs" in line:
        return _permuted_axes(line, names, sizes), 2
    groups = {frozenset(group) for group in _groups(line, math.prod(sizes))}
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    in_use = [i for i, size in enumerate(sizes) if size > 1]
    for count in range(len(in_use) + 1):
        for spanned in itertools.combinations(in_use, count):
            last = np.moveaxis(ids, spanned, range(-count, 0)) if count else ids
            size = math.prod(sizes[i] for i in spanned)
            if {frozenset(row) for row in last.reshape(-1, size).tolist()} == groups:
                return tuple(names[i] for i in spanned), size
    raise ValueError(f"groups that are no mesh axes: {line.strip()[:300]}")


def _permuted_axes(line: str, names: list[str], sizes: list[int]) -> tuple[str, ...]:
    pairs = re.findall(
        r"\{(\d+),(\d+)\}", line.split("source_target_pairs=", 1)[1].split("}}")[0] + "}"
    )
    used = set()
    for source, target in pairs:
        here, there = (np.unravel_index(int(i), sizes) for i in (source, target))
        used |= {names[i] for i in range(len(names)) if here[i] != there[i]}
    return tuple(name for name in names if name in used)


def _groups(line: str, num_devices: int) -> list[list[int]]:
    """Replica groups from any of the three notations that XLA prints."""
    listed = re.search(r"replica_groups=\{(\{.*?\})?\}", line)
    if listed:
        if not listed[1]:
            return [list(range(num_devices))]
        return [[int(i) for i in g.split(",")] for g in re.findall(r"\{([\d,]+)\}", listed[1])]
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if iota:
        shape, source, order = (tuple(map(int, g.split(","))) if g else () for g in iota.groups())
        ids = np.arange(math.prod(source)).reshape(source)
        return ids.transpose(order or range(len(source))).reshape(shape).tolist()
    named = re.search(r"replica_groups=mesh\[([^\]]*)\]\s*\{([^}]*)\}", line)
    if named:
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        spanned = re.findall(r"'(\w+)'", named[2])
        if ":" not in named[2] and math.prod(sizes.values()) == num_devices:
            ids = np.arange(num_devices).reshape(tuple(sizes.values()))
            places = [list(sizes).index(name) for name in spanned]
            last = np.moveaxis(ids, places, range(-len(places), 0))
            return last.reshape(-1, math.prod(sizes[name] for name in spanned)).tolist()
    raise ValueError(f"unknown replica groups: {line.strip()[:300]}")
