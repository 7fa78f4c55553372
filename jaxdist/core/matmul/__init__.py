"""Products of activations and weights: in low precision (`precision.matmul_dtype`), and on CPUs."""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Bool

from jaxdist.core.matmul import block_scaled, fp8
from jaxdist.core.types import Array

__all__ = ["FORMATS", "Format", "make_dot", "problems"]


class Format(NamedTuple):
    """A low-precision format: library on GPUs, lowest compute capability that supports it."""

    rounding: str
    library: str
    lowest_capability: tuple[int, int]
    cards: str


FORMATS = {
    "fp8": Format("E4M3 forward, E5M2 gradients", "cuBLASLt", (8, 9), "Ada, Hopper and later"),
    "mxfp8": Format("E4M3, a scale for 32 numbers", "cuDNN", (10, 0), "Blackwell and later"),
    "nvfp4": Format(
        "E2M1 forward, a scale for 16 numbers; gradients as in mxfp8",
        "cuDNN",
        (10, 0),
        "Blackwell and later",
    ),
}
"""`precision.matmul_dtype` -> format; "auto" is not included."""


def problems(
    matmul_dtype: str, num_layers: int, platform: str, compute_capability: str
) -> list[str]:
    """Return the reasons why a model's layers cannot use a format on these devices."""
    if matmul_dtype not in FORMATS:
        return []
    lowest, problems = FORMATS[matmul_dtype].lowest_capability, []
    if num_layers < 3:
        problems.append(
            f"precision.matmul_dtype={matmul_dtype} with {num_layers} stacked layers: the first "
            "and the last multiply in the compute dtype, and none is left. Use 3 layers or more, "
            "or --precision.matmul-dtype auto."
        )
    if platform == "gpu" and compute_capability:
        capability = tuple(int(part) for part in compute_capability.split("."))
        if capability < lowest:
            problems.append(_too_old(matmul_dtype, compute_capability, capability))
    return problems


def _too_old(matmul_dtype: str, compute_capability: str, capability: tuple[int, ...]) -> str:
    needed = FORMATS[matmul_dtype]
    lowest = ".".join(map(str, needed.lowest_capability))
    fits = [name for name, other in FORMATS.items() if other.lowest_capability <= capability]
    return (
        f"precision.matmul_dtype={matmul_dtype} on a GPU of compute capability "
        f"{compute_capability}: matrix units for it came with {lowest} ({needed.cards}). Use "
        f"--precision.matmul-dtype {' or '.join(['auto', *fits])} there."
    )


def make_dot(
    matmul_dtype: str,
    axes: tuple[str, ...],
    platform: str,
    *,
    is_wide: Bool[Array, ""] | None = None,
) -> Callable[..., Array]:
    """Make a `Context.dot` in a format: product [*dims named after the arrow].

    The scale of an array is equal over `axes`. On "gpu" the rounded elements are multiplied, on
    other platforms the values that they represent. If `is_wide` is True, nothing is rounded.
    """
    if matmul_dtype == "fp8":
        return fp8.make_dot(axes, platform, is_wide=is_wide)
    return block_scaled.make_dot(matmul_dtype, axes, platform, is_wide=is_wide)
