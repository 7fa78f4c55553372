"""Estimate the time of a compiled GPU program by class of work: a roofline over its schedule.

Instructions run in scheduled order on one compute stream. Collectives run on a second stream in the
order in which they start; the time that compute waits for them is exposed. A matmul takes the
longer of its FLOP time and its memory time. The fused attention kernel takes the time of its
unmasked FLOPs, and every other kernel its memory time.

A loop with a data-dependent trip count counts once. Packed attention is such a loop: each row
counts as one document. The model ignores kernel tuning, multiprocessors that collectives take from
compute, and throttling of hot GPUs. Two programs for one GPU compare well, within 30 % of their
difference. Absolute times are 5 to 15 % too short.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence

from jaxdist.core.parallel.expert import ROUNDS
from jaxdist.hardware import Cluster
from jaxdist.plan.compiled.collectives import (
    KINDS,
    SCALAR_BYTES,
    end_of,
    groups_and_axes,
    trips_of,
)
from jaxdist.plan.compiled.hlo import HloInstruction, Module, Shape, parse, shapes_of
from jaxdist.plan.estimate.traffic import wire_bytes

# Shares of peak that kernels reach, equal for all GPUs; they serve to compare programs.
_PRODUCTS, _ATTENTION, _ATTENTION_BACKWARD, _MEMORY = 0.72, 0.55, 0.45, 0.85
_LINKS, _NETWORK = 0.80, 0.85
_LAUNCH_S = 2.5e-6
_LATENCY_S = 12e-6

BLOCK_SCALED = "__cudnn$blockScaledDot"
"""Custom call of `jax.nn.scaled_matmul` if cuDNN computes it."""

_FREE = (
    *("parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all", "iota"),
    *("opt-barrier", "partition-id", "replica-id", "add-dependency"),
)
_ALLOCATION = "AllocateBuffer"
"""Custom call that returns uninitialized memory."""

_SLICES = ("dynamic-slice", "slice", "gather")
_SAME_ARRAY = ("bitcast", "reshape", "convert", "copy", "transpose")


@dataclasses.dataclass(frozen=True)
class Times:
    """Modelled seconds of one step on one device.

    Attributes:
        seconds: time of the complete step, from the first instruction to the last.
        classes: "products", "fp8 products" (in 8 bits), "fp4 products" (in 4), "attention",
            "element-wise" and "copies" -> seconds of their kernels;
            "exposed data+fsdp" -> seconds that compute waits for collectives over these axes.
        flops: executed FLOPs of products and attention.
        calls: number of kernels per class.
    """

    seconds: float
    classes: dict[str, float]
    flops: float
    calls: dict[str, int]


def model_times(
    program: str,
    mesh: Mapping[str, int],
    cluster: Cluster,
    branch_shares: Mapping[str, float] | None = None,
) -> Times:
    """Model the time of a program.

    Args:
        program: HLO text of one device's scheduled program, as `CompiledStep.program`.
        mesh: axis name -> size, slow to fast; device i of the program is the i-th of the mesh.
        cluster: the GPUs it was compiled for.
        branch_shares: scope of a pipeline's branch -> share of its ticks in which some stage takes
            it, as `CompiledStep.branch_shares`. Without it, the longest branch counts as taken.

    Raises:
        UnknownHLO: the text contains unsupported HLO.
    """
    module = parse(program)
    total = _Roofline(module, mesh, cluster, branch_shares or {}).run(module.entry)
    calls = {name: round(count) for name, count in total.calls.items()}
    return Times(total.clock, dict(total.classes), total.flops, calls)


@dataclasses.dataclass
class _Total:
    """Time of running a computation once."""

    clock: float = 0.0
    links_free: float = 0.0
    flops: float = 0.0
    classes: defaultdict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))
    calls: defaultdict[str, float] = dataclasses.field(default_factory=lambda: defaultdict(float))

    def kernel(self, kind: str, seconds: float, flops: float = 0.0) -> None:
        self.clock += seconds
        self.flops += flops
        self.classes[kind] += seconds
        self.calls[kind] += 1

    def wait(self, end: float, axes: tuple[str, ...]) -> None:
        if end > self.clock:
            self.classes[f"exposed {'+'.join(axes)}"] += end - self.clock
            self.clock = end

    def repeat(self, other: _Total, times: float) -> None:
        self.clock += times * other.clock
        self.flops += times * other.flops
        for name, value in other.classes.items():
            self.classes[name] += times * value
        for name, count in other.calls.items():
            self.calls[name] += times * count


class _Roofline:
    """Models the time of one program."""

    def __init__(
        self,
        module: Module,
        mesh: Mapping[str, int],
        cluster: Cluster,
        branch_shares: Mapping[str, float],
    ):
        self.module, self.mesh, self.cluster = module, mesh, cluster
        # All stages wait for the one that runs a backward: these ticks count as one each.
        self.shares = {**branch_shares, "backward": 1.0}
        self.defined = {
            name: {i.name: i for i in instructions}
            for name, instructions in module.computations.items()
        }
        self.bandwidth = _MEMORY * cluster.gpu.memory_bandwidth

    def run(self, name: str) -> _Total:
        """Return the totals of one run of a computation."""
        total = _Total()
        awaited: dict[str, tuple[float, tuple[str, ...]]] = {}
        for index, instruction in enumerate(self.module.computations[name]):
            opcode = instruction.opcode
            called = self.module.called(instruction)
            if opcode == "while":
                # The condition is first or last; it costs one comparison.
                body = max(called, key=lambda child: self.run(child).clock)
                total.repeat(self.run(body), self._trips(instruction, body))
            elif opcode == "conditional":
                longest = max(called, key=lambda child: self.run(child).clock)
                share = self._share(longest)
                total.repeat(self.run(longest), share)
                for other in set(called) - {longest}:
                    total.repeat(self.run(other), (1 - share) / (len(called) - 1))
            elif opcode == "call":
                for child in called:
                    total.repeat(self.run(child), 1)
            elif (collective := self._collective(name, index)) is not None:
                seconds, axes, asynchronous = collective
                end = max(total.clock, total.links_free) + seconds
                total.links_free = end
                if asynchronous:
                    awaited[instruction.name] = (end, axes)
                else:
                    total.wait(end, axes)
            elif opcode.endswith("-update"):
                for operand in instruction.operand_names[:1]:
                    if operand in awaited:
                        awaited[instruction.name] = awaited.pop(operand)
            elif opcode.endswith("-done"):
                for operand in instruction.operand_names[:1]:
                    if operand in awaited:
                        total.wait(*awaited.pop(operand))
            elif opcode == "async-start":
                for child in called:
                    total.repeat(self.run(child), 1)
            elif opcode not in _FREE and not _allocates(instruction):
                total.kernel(*self._kernel(name, instruction))
        return total

    def _trips(self, loop: HloInstruction, body: str) -> float:
        """Return how often a loop runs; if that depends on the data, once as often as its scope."""
        # Further rounds of experts run only if loads are unequal.
        known = "known_trip_count" in loop.attributes or f"/{ROUNDS}/" in loop.op_name
        return trips_of(loop) if known else self._share(body)

    def _share(self, branch: str) -> float:
        """Return how often a branch runs: the share of the outermost scope inside it."""
        names = [
            re.findall(r"pipeline_(\w+)/", instruction.attributes)
            for instruction in self.module.computations[branch]
        ]
        scopes = min((scopes for scopes in names if scopes), key=len, default=[""])
        return self.shares.get(scopes[-1], 1.0)

    # -- kernels -----------------------------------------------------------------------------------

    def _kernel(self, name: str, instruction: HloInstruction) -> tuple[str, float, float]:
        """Return (class, seconds, FLOPs) of one kernel."""
        target = re.search(r'custom_call_target="([^"]+)"', instruction.attributes)
        if target is not None and "fmha" in target[1]:
            return self._attention(name, instruction, backward="Backward" in target[1])
        flops = 0.0
        if target is not None and "cublas" in target[1]:
            flops = self._cublas_flops(name, instruction)
            moved = float(sum(shape.num_bytes for shape in self._inputs(name, instruction)))
            moved += max(shape.num_bytes for shape in instruction.shapes)  # without its workspace
        elif target is not None and target[1].startswith("mosaic_gpu"):
            flops = self._grouped_flops(name, instruction)
            moved = float(sum(shape.num_bytes for shape in self._inputs(name, instruction)))
            moved += instruction.shapes[0].num_bytes
        elif target is not None and target[1] == BLOCK_SCALED:
            flops = self._block_scaled_flops(name, instruction)
            moved = self._plain_bytes(name, instruction)
        elif instruction.opcode == "fusion":
            inner = self.module.called(instruction)[0]
            flops, moved = self._fused_flops(inner), self._fusion_bytes(inner)
        else:
            moved = self._plain_bytes(name, instruction)
        seconds = moved / self.bandwidth
        if flops:
            fused = instruction.opcode == "fusion"
            inputs = self._factors(inner) if fused else self._inputs(name, instruction)
            kind = _kind_of_products(inputs)
            return kind, max(flops / (_PRODUCTS * self._peak(inputs)), seconds) + _LAUNCH_S, flops
        kind = "copies" if instruction.opcode.startswith("copy") else "element-wise"
        return kind, seconds + _LAUNCH_S, 0.0

    def _attention(
        self, name: str, instruction: HloInstruction, *, backward: bool
    ) -> tuple[str, float, float]:
        """Return (class, seconds, FLOPs) of a cuDNN kernel; query is [batch, seq, heads, width]."""
        query, key = (shape.dims for shape in self._inputs(name, instruction)[:2])
        # Heads may precede positions: positions are the largest inner dim of the key.
        keys = max(key[1:-1])
        visible = 0.5 if "CAUSAL" in instruction.attributes else 1.0
        flops = 4.0 * math.prod(query) * keys * visible * (2.5 if backward else 1.0)
        share = _ATTENTION_BACKWARD if backward else _ATTENTION
        return "attention", flops / (share * self._peak(self._inputs(name, instruction))), flops

    def _peak(self, inputs: list[Shape]) -> float:
        """Return the FLOP/s of products of these arrays."""
        peaks = self.cluster.gpu.peak_flops
        dtypes = {shape.dtype for shape in inputs}
        kind = _kind_of_products(inputs)
        if kind != "products":
            return peaks["float8" if kind == "fp8 products" else "float4"]
        if "f32" in dtypes and not dtypes & {"bf16", "f16"}:
            return peaks["float32"]
        return peaks.get("bfloat16", peaks["float32"])

    def _cublas_flops(self, name: str, instruction: HloInstruction) -> float:
        left, right = self._inputs(name, instruction)[:2]
        dims = re.search(r'"dot_dimension_numbers":\{(.*?)\},"', instruction.attributes)
        assert dims is not None, instruction

        def numbers(key: str) -> list[int]:
            match = re.search(rf'"{key}":\[([^\]]*)\]', dims[1])
            return [int(n.strip('"')) for n in match[1].split(",") if n] if match else []

        shared = math.prod(left.dims[i] for i in numbers("lhs_contracting_dimensions"))
        batch = math.prod(left.dims[i] for i in numbers("lhs_batch_dimensions"))
        return 2.0 * math.prod(left.dims) * math.prod(right.dims) / (shared * batch)

    def _grouped_flops(self, name: str, instruction: HloInstruction) -> float:
        """Return the FLOPs of jax's grouped kernels: of all rows, and of a part tile per group."""
        sizes, *_, left, right = (shape.dims for shape in self._inputs(name, instruction))
        # [rows, in] by [groups, in, out] or [groups, out, in], else [rows, in] by [rows, out].
        is_forward = len(right) == 3
        columns = math.prod(right[1:]) // left[1] if is_forward else right[1]
        rows = left[0] + (128 if is_forward else 64) * (sizes[0] - 1)
        return 2.0 * rows * left[1] * columns

    def _block_scaled_flops(self, name: str, instruction: HloInstruction) -> float:
        """Return FLOPs of [batch, rows, inner] · [batch, columns, inner], padded to tiles."""
        left, right = self._inputs(name, instruction)[:2]
        return 2.0 * math.prod(left.dims) * right.dims[1]

    def _fused_flops(self, computation: str) -> float:
        """Return the FLOPs of the products of a fusion, including nested fusions."""
        return sum(
            self._dot_flops(computation, instruction)
            if instruction.opcode == "dot"
            else sum(map(self._fused_flops, self.module.called(instruction)))
            for instruction in self.module.computations[computation]
        )

    def _factors(self, computation: str) -> list[Shape]:
        """Return the operands of the matmuls of a fusion, including nested fusions."""
        shapes: list[Shape] = []
        for instruction in self.module.computations[computation]:
            if instruction.opcode == "dot":
                shapes += self._inputs(computation, instruction)
            else:
                for inner in self.module.called(instruction):
                    shapes += self._factors(inner)
        return shapes

    def _dot_flops(self, computation: str, dot: HloInstruction) -> float:
        left = self._inputs(computation, dot)[0]
        match = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.attributes)
        shared = [int(n) for n in match[1].split(",") if n] if match else []
        return 2.0 * math.prod(dot.shapes[0].dims) * math.prod(left.dims[i] for i in shared)

    # -- bytes -------------------------------------------------------------------------------------

    def _inputs(self, name: str, instruction: HloInstruction) -> list[Shape]:
        operands = (self.defined[name].get(operand) for operand in instruction.operand_names)
        return [shape for operand in operands if operand is not None for shape in operand.shapes]

    def _plain_bytes(self, name: str, instruction: HloInstruction) -> float:
        written = _bytes(instruction)
        if instruction.opcode in _SLICES or instruction.opcode.startswith("copy"):
            return 2 * written
        inputs = self._inputs(name, instruction)
        if instruction.opcode == "dynamic-update-slice":
            return 2 * inputs[1].num_bytes
        return written + sum(shape.num_bytes for shape in inputs)

    def _fusion_bytes(self, computation: str) -> float:
        """Return bytes that a fused computation reads and writes; slices count only their part."""
        body = self.module.computations[computation]
        users: dict[str, list[HloInstruction]] = {}
        for instruction in body:
            for operand in instruction.operand_names:
                users.setdefault(operand, []).append(instruction)
        read = sum(_read(i, users) for i in body if i.opcode == "parameter")
        return read + self._written(computation, body[-1])

    def _written(self, computation: str, result: HloInstruction) -> float:
        defined = self.defined[computation]
        if result.opcode == "tuple":
            return sum(self._written(computation, defined[o]) for o in result.operand_names)
        if result.opcode == "dynamic-update-slice":
            return _bytes(defined[result.operand_names[1]])
        if result.opcode in _SAME_ARRAY and result.operand_names:
            source = defined[result.operand_names[0]]
            if source.opcode in (*_SAME_ARRAY, "dynamic-update-slice") and _bytes(source):
                return self._written(computation, source) * _bytes(result) / _bytes(source)
        return _bytes(result)

    # -- collectives -------------------------------------------------------------------------------

    def _collective(self, name: str, index: int) -> tuple[float, tuple[str, ...], bool] | None:
        """Return (seconds on the links, axes, is asynchronous) if this starts a collective."""
        instructions = self.module.computations[name]
        instruction = inner = instructions[index]
        kind = instruction.opcode.removesuffix("-start")
        if instruction.opcode == "async-start":
            for child in self.module.called(instruction):
                for one in self.module.computations[child]:
                    if one.opcode in KINDS:
                        inner, kind = one, one.opcode
        if kind not in KINDS:
            return None
        groups, axes = groups_and_axes(inner, kind, self.mesh)
        result = inner
        if inner is instruction and instruction.opcode != kind:
            result = instructions[end_of(instructions, index)]
        size = 2 if kind == "collective-permute" else len(groups[0])
        if size == 1:
            return 0.0, axes, False
        arrays = [shape.num_bytes for shape in result.shapes if shape.num_bytes >= SCALAR_BYTES]
        total = sum(arrays) * (size if kind == "reduce-scatter" else 1)
        split = instruction.opcode != kind and '"is_sync":true' not in instruction.attributes
        return self._link_seconds(kind, total, groups, size), axes, split

    def _link_seconds(
        self, kind: str, total: int, groups: Sequence[Sequence[int]], size: int
    ) -> float:
        """Model a hierarchical algorithm: between nodes, each GPU's own NIC sends its shard."""
        gpu, fabric = self.cluster.gpu, self.cluster.gpus_per_fabric
        nodes = max(len({i // fabric for i in group}) for group in groups)
        links, network = _LINKS * gpu.link_bandwidth, _NETWORK * gpu.network_bandwidth
        if kind == "collective-permute":
            return total / (links if nodes == 1 else network) + _LATENCY_S
        if nodes == 1:
            return wire_bytes(kind, total, size) / links + _LATENCY_S
        rounds, inside = (2 if kind == "all-reduce" else 1), max(1, size // nodes)
        between = rounds * total * (nodes - 1) / nodes / inside / network
        within = rounds * total * (inside - 1) / inside / links
        return max(between, within) + 2 * _LATENCY_S


def _kind_of_products(inputs: list[Shape]) -> str:
    """Return the class of products of these arrays, which include 8-bit scales of 4-bit numbers."""
    dtypes = {shape.dtype[:2] for shape in inputs}
    return "fp4 products" if "f4" in dtypes else "fp8 products" if "f8" in dtypes else "products"


def _allocates(instruction: HloInstruction) -> bool:
    """Return True if an instruction only allocates memory that a loop will fill."""
    return f'custom_call_target="{_ALLOCATION}"' in instruction.attributes


def _bytes(instruction: HloInstruction) -> int:
    return sum(shape.num_bytes for shape in shapes_of(instruction.type))


def _read(
    value: HloInstruction, users: Mapping[str, list[HloInstruction]], depth: int = 0
) -> float:
    """Return the bytes of a value that its users read; all bytes of a fusion's result."""
    full, read = float(_bytes(value)), 0.0
    if value.name not in users:
        return full
    for user in users[value.name]:
        first = user.operand_names[0] == value.name
        if user.opcode in _SLICES and first:
            read += _read(user, users, depth + 1)  # only the inner slice is read
        elif user.opcode == "dynamic-update-slice" and first:
            continue
        elif user.opcode in _SAME_ARRAY and depth < 6 and _bytes(user):
            read += _read(user, users, depth + 1) * full / _bytes(user)
        else:
            return full
    return min(read, full)
