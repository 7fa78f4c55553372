"""Rates of matrix products: tiles and waves, the inner dimension, the power limit; Muon's matrices.

The result of a product [m, k] × [k, n] is cut into tiles, one per multiprocessor at a time. The
last wave of tiles is usually not full. While a tile writes its result, its matrix units are idle. A
GPU lowers its clock to meet its power limit; power falls with the third power of the clock.

References:
    NVIDIA, "Matrix Multiplication Background User's Guide", tile and wave quantization.
    Bekman 2024, "Maximum Achievable Matmul FLOPS", and gpu_benchmark's results with the same
    method (github.com/mag-/gpu_benchmark): the best of many shapes on one card.
    He 2024, "Strangely, Matrix Multiplications on GPUs Run Faster When Given Predictable Data":
    power depends on how many bits of the operands switch.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from jaxdist.core.matrices import sides_of
from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.hardware import Gpu
from jaxdist.optim import hidden_matrices
from jaxdist.plan.estimate.job import WIDE, Job
from jaxdist.plan.estimate.model_costs import Shape, costs_of

_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""Tile sizes of cuBLAS; the smallest ones are for products that do not fill a wave."""

_SMALL_TILE = 0.15
"""Halving a tile multiplies the rate by 2 to the minus this: it reads more memory per FLOP."""

_EXPOSED_WRITES = 0.85
"""Share of the time for writing 16-bit results to memory that is not overlapped."""

_PICOJOULES = {
    "7.5": 5.0, "8.0": 1.6, "8.6": 2.5, "8.9": 1.5, "9.0": 1.04, "10.0": 0.75, "10.3": 0.75,
    "12.0": 1.5,
}  # fmt: skip
"""Energy of a 16-bit operation with full boost clock and voltage, by compute capability.

Fitted to the best measured products (Bekman; gpu_benchmark): A100 268 of 312 TFLOP/s at 400 W,
A6000 131 of 155 at 300 W, RTX 6000 Ada 279 of 364 at 300 W, H100 792 to 821 of 989 at 700 W. H100
PCIe (500 of 757 at 350 W), L4, RTX 3090 and 4090 are then within 12 %. T4 and Blackwell
(10.x: 0.6 times Hopper's watts per FLOP/s; 12.0: as Ada) are unmeasured."""

_RELATIVE_ENERGY = {"float32": 2.0, "float8": 0.85, "float4": 0.5}
"""Energy per operation in other formats, relative to 16 bits. TF32 has half the rate at the same
power. 8 bits assume that an H100 reaches at most 0.66 of its peak. 4 bits are unmeasured."""

_STATIC = 0.12
"""Share of the power limit that does not depend on the clock: leakage, memory, links."""

_UNKNOWN_CLOCK = 0.85
"""Share of the boost clock if the power limit is unknown."""

_CASTS = 0.90
"""Share of the rate of 8- and 4-bit products that remains after scaling and rounding inputs."""

NARROW_PEAKS = {
    "fp8": ("float8", "float8"),
    "mxfp8": ("float8", "float8"),
    "nvfp4": ("float4", "float8"),
}
"""`precision.matmul_dtype` -> dtypes whose peak rates apply to its forward and backward."""


def clock(gpu: Gpu, peak: float, dtype: str, busy: float) -> float:
    """Return the clock that a GPU sustains, relative to its boost clock; it may exceed 1.

    `peak` is FLOP/s at the boost clock; `busy` is the share of cycles in which matrix units work.
    """
    if not gpu.power_w:
        return _UNKNOWN_CLOCK
    energy = _PICOJOULES.get(gpu.compute_capability, _PICOJOULES["9.0"])
    watts = 1e-12 * energy * _RELATIVE_ENERGY.get(dtype, 1.0) * peak * busy
    return min(gpu.max_clock, ((1 - _STATIC) * gpu.power_w / watts) ** (1 / 3))


@functools.lru_cache(maxsize=65536)
def busy_share(shape: Shape, num_sms: int, half_inner: float) -> float:
    """Return the share of cycles in which matrix units work, for the best tile size.

    With an inner dimension of `half_inner`, overhead and products of a tile take equally long.
    """
    m, n, k = shape
    best = max(
        (rows * columns / (256 * 128)) ** _SMALL_TILE
        * m * n
        / (math.ceil(-(-m // rows) * -(-n // columns) / num_sms) * num_sms * rows * columns)
        for rows, columns in _TILES
    )  # fmt: skip
    return best * k / (k + half_inner)


def half_inner(gpu: Gpu) -> float:
    """Return the inner dimension at which writing a 16-bit result takes as long as computing it."""
    peaks = gpu.peak_flops
    peak = peaks.get("bfloat16") or peaks.get("float16") or peaks["float32"]
    return _EXPOSED_WRITES * peak / gpu.memory_bandwidth


def rate(job: Job, peak: float, dtype: str) -> float:
    """Return the mean FLOP/s of a microbatch's matrix products in `dtype`, forward and backward."""
    gpu, reach = job.cluster.gpu, job.engine.software.products
    spent = flops = 0.0
    half = half_inner(gpu)
    for (m, n, k), times in costs_of(job).product_shapes():
        for shape in ((m, n, k), (m, k, n), (k, n, m)):  # forward, and two products of backward
            busy = reach * busy_share(shape, gpu.num_sms, half)
            work = 2.0 * math.prod(shape) * times
            spent += work / (peak * busy * clock(gpu, peak, dtype, busy))
            flops += work
    return flops / spent * (_CASTS if dtype in ("float8", "float4") else 1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MatrixShare:
    """Matrices of a stack that a device orthogonalizes, with padding; `axes` shard them."""

    matrices: int
    rows: int
    columns: int
    axes: tuple[str, ...]
    is_padded: bool

    @property
    def size(self) -> int:
        """Number of elements of all matrices of the share."""
        return self.matrices * self.rows * self.columns


def orthogonalized(job: Job) -> list[MatrixShare]:
    """Return a device's share of each stack that Muon updates; [] with another optimizer."""
    if job.config.optim.optimizer != "muon":
        return []
    moving = job.trained
    axes = {w.name: w.dims for w in moving}
    hidden, sides = hidden_matrices(axes), sides_of(axes)
    shares = []
    for weight in moving:
        if not hidden[weight.name]:
            continue
        size = lambda dims, weight=weight: math.prod(weight.shape[i] for i in dims)
        parts = sides[weight.name]
        group = tuple(a for a in job.axes(weight, "moment") if a != PIPELINE.name)
        stacked = size(parts.stacked) // (job.spec[PIPELINE] if weight.is_stacked else 1)
        devices = math.prod(job.spec[axis] for axis in group)
        rows, columns = size(parts.rows), size(parts.columns)
        shares.append(
            MatrixShare(
                matrices=-(-stacked // devices),
                rows=rows,
                columns=columns,
                axes=group,
                is_padded=stacked % devices > 0,
            )
        )
    return shares


def matrix_bytes(job: Job) -> float:
    """Return the peak bytes on a device of the matrices gathered for Muon; 0 without it.

    The largest stack counts three times (sent, received and transposed, result). Other stacks add
    their padded copies, which XLA makes in advance. From XLA's buffer assignments.
    """
    shares = sorted(orthogonalized(job), key=lambda share: share.size)
    if not shares:
        return 0.0
    largest = shares.pop()
    return float(WIDE * (3 * largest.size + sum(one.size for one in shares if one.is_padded)))


def orthogonalization_flops(job: Job) -> float:
    """Return a device's float32 FLOPs of Muon's Newton-Schulz steps; 0 without Muon."""
    total = 0.0
    for share in orthogonalized(job):
        low, high = sorted((share.rows, share.columns))
        total += share.matrices * 5 * (4 * low * low * high + 2 * low**3)
    return total
