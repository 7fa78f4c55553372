"""Parser of compiled HLO text: computations, instructions, shapes, replica groups."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Sequence

import numpy as np


class UnknownHLO(ValueError):
    """The parser does not support this program text."""


ITEM_BITS = {
    "pred": 8,
    **dict.fromkeys(("s2", "u2"), 2),
    **dict.fromkeys(("s4", "u4", "f4e2m1fn"), 4),
    **dict.fromkeys(("s8", "u8", "f8e4m3", "f8e4m3fn", "f8e4m3fnuz", "f8e4m3b11fnuz"), 8),
    **dict.fromkeys(("f8e5m2", "f8e5m2fnuz", "f8e3m4", "f8e8m0fnu"), 8),
    **dict.fromkeys(("s16", "u16", "bf16", "f16"), 16),
    **dict.fromkeys(("s32", "u32", "f32"), 32),
    **dict.fromkeys(("s64", "u64", "f64", "c64"), 64),
    "c128": 128,
}
"""Bits per element of each dtype."""

_OPAQUE = ("token", "opaque")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Dtype and dims of an array."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the complete array."""
        return (ITEM_BITS[self.dtype] * math.prod(self.dims) + 7) // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True)
class HloInstruction:
    """One instruction: text inside its parentheses (`operands`) and after them (`attributes`)."""

    name: str
    type: str
    opcode: str
    operands: str
    attributes: str

    @property
    def shapes(self) -> list[Shape]:
        """Shapes of the result, with tuples flattened."""
        return shapes_of(self.type)

    @property
    def operand_names(self) -> list[str]:
        """Names of the instructions that are its operands."""
        return re.findall(r"%([\w.\-]+)", self.operands)

    @property
    def op_name(self) -> str:
        """Name of the source operation in the traced program; "" if there is none."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1] if match else ""

    def __str__(self) -> str:
        return f"{self.name} = {self.type} {self.opcode}({self.operands}){self.attributes}"[:300]


@dataclasses.dataclass(frozen=True)
class Module:
    """A program: computations with instructions in scheduled order, and the entry's name."""

    computations: dict[str, list[HloInstruction]]
    entry: str

    def called(self, instruction: HloInstruction) -> list[str]:
        """Return the names of the computations that an instruction calls, branches in order."""
        attributes = re.sub(r"metadata=\{[^}]*\}", "", instruction.attributes)
        names = re.findall(
            r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)",
            attributes,
        )
        lists = r"(?:branch_computations|called_computations|calls)=\{([^}]*)\}"
        for group in re.findall(lists, attributes):
            names += [name.strip().lstrip("%") for name in group.split(",")]
        return [name for name in names if name in self.computations]


def parse(text: str) -> Module:
    """Return the program of an HLO text; raise `UnknownHLO` for any other text."""
    computations: dict[str, list[HloInstruction]] = {}
    entry, current = None, None
    for line in text.splitlines():
        header = re.match(r"^(ENTRY )?%?([\w.\-]+)(?: \(.*|) ?\{\s*$", line)
        if header and not line.startswith(("HloModule", " ")):
            current = computations.setdefault(header[2], [])
            entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and line.strip():
            current.append(_instruction(line))
    if entry is None:
        raise UnknownHLO("no entry computation: this is not the text of a compiled program")
    return Module(computations, entry)


def _instruction(line: str) -> HloInstruction:
    head = re.match(r"^\s+(?:ROOT )?%?([\w.\-]+) = ", line)
    if head is None:
        raise UnknownHLO(f"no instruction: {line.strip()[:200]}")
    rest = line[head.end() :]
    if rest.startswith("("):
        end = _closing(rest, 0)
        result, rest = rest[: end + 1], rest[end + 1 :].lstrip()
    else:
        result, _, rest = rest.partition(" ")
    opcode = re.match(r"[\w\-]+(?=\()", rest)
    if opcode is None:
        raise UnknownHLO(f"no operation in: {line.strip()[:200]}")
    end = _closing(rest, opcode.end())
    return HloInstruction(head[1], result, opcode[0], rest[opcode.end() + 1 : end], rest[end + 1 :])


def _closing(text: str, start: int) -> int:
    depth = 0
    for match in re.compile(r"[()]").finditer(text, start):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    raise UnknownHLO(f"unbalanced parentheses: {text[:200]}")


def shapes_of(text: str) -> list[Shape]:
    """Return the shapes in a type, with tuples flattened and tokens omitted."""
    shapes = []
    bare = re.sub(r"\{[^{}]*\}|/\*.*?\*/", "", text)
    for dtype, dims in re.findall(r"([a-z]\w*)\[([^\]]*)\]", bare):
        if dtype in _OPAQUE:
            continue
        if dtype not in ITEM_BITS:
            raise UnknownHLO(f"unknown array type {dtype!r} in {text[:200]}")
        if not re.fullmatch(r"[\d,]*", dims):
            raise UnknownHLO(f"dims are not numbers in {text[:200]}")
        shapes.append(Shape(dtype, tuple(int(d) for d in dims.split(",") if d)))
    return shapes


def groups_of(instruction: HloInstruction, num_devices: int) -> list[list[int]]:
    """Return the replica groups of a collective, from any notation that XLA prints.

    {{0,1},{2,3}}                      explicit; {} is all devices
    [2,2]<=[4]   [2,2]<=[2,2]T(1,0)    iota, reshaped, with transposed dims
    mesh['a'=2,'b'=2] {'a'}            over named axes; part of an axis: {'a':(1)2}; device order
                                       other than 0, 1, ...: device_ids=([2,2]T(1,0))
    """
    text = instruction.attributes
    start = text.find("replica_groups=")
    if start < 0:
        raise UnknownHLO(f"no replica groups: {instruction}")
    text = text[start + len("replica_groups=") :]
    for read in (_listed, _reshaped, _named):
        groups = read(text, num_devices)
        if groups is not None:
            break
    else:
        raise UnknownHLO(f"unknown replica groups: {text[:200]}")
    if sorted(i for group in groups for i in group) != list(range(num_devices)):
        raise UnknownHLO(f"groups must hold each of {num_devices} devices once: {text[:200]}")
    return groups


def pairs_of(instruction: HloInstruction) -> list[tuple[int, int]]:
    """Return the (source, target) pairs of a permute."""
    match = re.search(r"source_target_pairs=\{((?:\{\d+,\d+\},?)+)\}", instruction.attributes)
    if match is None:
        raise UnknownHLO(f"no source_target_pairs: {instruction}")
    return [(int(s), int(t)) for s, t in re.findall(r"\{(\d+),(\d+)\}", match[1])]


def _listed(text: str, num_devices: int) -> list[list[int]] | None:
    match = re.match(r"\{((?:\{[\d,\s]*\},?\s*)*)\}", text)
    if match is None:
        return None
    groups = re.findall(r"\{([\d,\s]*)\}", match[1])
    if not groups:
        return [list(range(num_devices))]
    return [[int(i) for i in group.split(",")] for group in groups]


def _reshaped(text: str, num_devices: int) -> list[list[int]] | None:
    match = re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if match is None:
        return None
    shape = _numbers(match[1])
    if len(shape) != 2:
        raise UnknownHLO(f"replica groups that are no list of lists: {text[:200]}")
    return _arranged(match[2], match[3]).reshape(shape).tolist()


def _named(text: str, num_devices: int) -> list[list[int]] | None:
    match = re.match(
        r"mesh\[([^\]]*)\]"
        r"(?:, ?device_ids=\(\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?\))? ?\{([^}]*)\}",
        text,
    )
    if match is None:
        return None
    mesh, ids, source, order, spanned = match.groups()
    sizes = {name: int(size) for name, size in re.findall(r"'([^']*)'=(\d+)", mesh)}
    parts = re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", spanned)
    if not sizes or re.sub(r"'[^']*'(?::\(\d+\)\d+)?|[, ]", "", spanned):
        raise UnknownHLO(f"unknown replica groups: {text[:200]}")
    total = math.prod(sizes.values())
    devices = _arranged(source or ids, order).ravel() if ids else np.arange(total)
    dims, chosen = _cut(sizes, parts)
    rest = [i for i in range(len(dims)) if i not in chosen]
    grid = devices.reshape(dims).transpose(rest + chosen)
    return grid.reshape(-1, math.prod(dims[i] for i in chosen)).tolist()


def _cut(
    sizes: dict[str, int], parts: Sequence[tuple[str, str, str]]
) -> tuple[list[int], list[int]]:
    """Return the sizes of mesh dims, cut where `parts` end, and indices of the dims in parts."""
    dims: list[int] = []
    chosen: list[int] = []
    for name, size in sizes.items():
        spans = [
            (int(before or 1), int(before or 1) * int(length or size))
            for other, before, length in parts
            if other == name
        ]
        cuts = sorted({1, size} | {cut for span in spans for cut in span})
        if any(size % cut for cut in cuts) or any(b % a for a, b in itertools.pairwise(cuts)):
            raise UnknownHLO(f"parts of axis {name!r} that do not divide it: {parts}")
        bounds = list(itertools.pairwise(cuts)) or [(1, 1)]
        for low, high in bounds:
            if any(first <= low and high <= last for first, last in spans):
                chosen.append(len(dims))
            dims.append(high // low)
    if unknown := {name for name, _, _ in parts} - set(sizes):
        raise UnknownHLO(f"replica groups over unknown axes {sorted(unknown)}")
    return dims, chosen


def _arranged(source: str, order: str | None) -> np.ndarray:
    """Return 0, 1, ... as int64 [*source], dims transposed by `order`; both list numbers."""
    shape = _numbers(source)
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids.transpose(_numbers(order)) if order else ids


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n]
