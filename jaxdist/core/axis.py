"""The record of a mesh axis; `core/parallel/` has a file for each, listed in its `axes.py`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from jax.sharding import PartitionSpec as P

from jaxdist.settings.schema import join_choices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Sizes of a run's model and batch, for the check of a mesh.

    Attributes:
        dims: logical dim -> size (`Model.dims`); without `layers` if no layers are stacked.
        rules: logical dim -> mesh axis, for dims specific to the model (`Model.rules`).
        settings: logical dim -> the setting that determines its size, for messages.
        units: logical dim -> number of adjacent entries, quantized together, that no shard cuts.
        global_batch_size: rows per step; None skips the checks of the batch.
        num_microbatches: microbatches per device.
        rows_per_example: adjacent rows that must stay on one replica and in one microbatch.
        num_virtual_stages: virtual stages per pipeline stage; 0 = chosen by the planner.
        layers_per_stage: number of layers of each virtual stage; () = chosen by the planner.
        context_len: positions of a row if the context axis can split it, else None.
    """

    dims: Mapping[str, int]
    rules: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    units: Mapping[str, int] = dataclasses.field(default_factory=dict)
    zero: int = 0
    global_batch_size: int | None = None
    num_microbatches: int = 1
    rows_per_example: int = 1
    num_virtual_stages: int = 1
    layers_per_stage: tuple[int, ...] = ()
    context_attention: str = "auto"
    context_len: int | None = None
    attention_dropout: float = 0.0

    def named(self, dim: str) -> str:
        """Format a dim's size by its setting, if any: `model.num_layers=8`, `model dim mlp=64`."""
        return f"{self.settings.get(dim, f'model dim {dim}')}={self.dims[dim]}"


Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActivationSizes:
    """Sizes of one step's activations on one device, from which traffic is computed.

    Attributes:
        stream_bytes: residual stream of a microbatch, [rows, seq, d_model] in the compute dtype.
        num_forwards: forward passes of a microbatch through a layer, without recomputation.
        reduces_again: recomputation includes attention's output, which is reduced over `tensor`.
        experts_per_token: experts that process each token, in each of the `sparse_layers`.
        query_bytes: queries of a microbatch in one layer, [rows, seq, heads, head_dim].
        key_value_bytes: keys and values together, each [rows, seq, kv_heads, head_dim].
        segment_bytes: document ids of packed rows, int32 [rows, seq]; 0 if rows are not packed.
        widening: float32 bytes / compute dtype bytes.
        exchange: context-parallel exchange of keys and values ("ring", ...); "" = none.
        exchanged_heads: number of neighbors that split heads, not positions, in attention.
    """

    stream_bytes: float
    num_tokens: int
    num_layers: int
    num_microbatches: int
    num_forwards: int
    recomputes: bool
    reduces_again: bool
    sequence_parallel: bool
    experts_per_token: int = 0
    sparse_layers: int = 0
    query_bytes: float = 0.0
    key_value_bytes: float = 0.0
    segment_bytes: float = 0.0
    widening: float = 1.0
    repeats_attention: bool = False
    exchange: str = ""
    context_size: int = 1
    exchanged_heads: int = 1


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Collectives of one kind and purpose in one step.

    Attributes:
        purpose: the data that are communicated, e.g. "activations".
        num_bytes: of the complete array: before a reduce-scatter, after an all-gather.
        times: executions per step.
        neighbors: adjacent devices per group; 0 = one group of all devices on the axis.
    """

    kind: Kind
    purpose: str
    num_bytes: float
    times: int
    neighbors: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis of the device mesh, with the properties that other modules read.

    Attributes:
        name: name in `jax.sharding.Mesh` and in every `PartitionSpec`.
        short: name in `--mesh`, e.g. "tp" in `--mesh tp=4`.
        weights: how parameters are stored on its devices.
            "replicated" = all of them, unless ZeRO or `joins_fsdp` shards them over the axis;
            "gathered" = a shard of each matrix, gathered just before its use;
            "split" = the part they compute with.
        joins_fsdp: its devices shard, with those of fsdp, the matrices that it does not split.
        splits_rows: its devices process different rows of the batch.
        splits_positions: its devices process different positions of every row.
        dims: logical dims that it splits, unless `Model.rules` override them.
        sums_gradients: when its devices sum the gradients of parameters that it does not split.
        shrinks: an elastic job may reduce its size.
        proposed: meshes that jaxdist proposes may have it even if the request has none.
        complexity: the planner prefers a lower sum over axes unless it is clearly slower.
        divides: why its size must divide its dims, for error messages; "" = it need not.
        problems: (size > 1, workload) -> further reasons why the size is illegal.
        traffic: communication of activations in one step of a decoder.
        hooks: (sequence parallelism is on) -> members of `Context` that the axis implements;
            `experts` is made from the grouped product.
    """

    name: str
    short: str
    help: str
    moves: str
    weights: Literal["replicated", "gathered", "split"]
    joins_fsdp: bool = False
    splits_rows: bool = False
    splits_positions: bool = False
    dims: tuple[str, ...] = ()
    sums_gradients: Literal["always", "sequence_parallel", "never"] = "never"
    sums_loss: bool = False
    shrinks: bool = False
    proposed: bool = True
    complexity: int = 0
    divides: str = ""
    problems: Callable[[int, Workload], list[str]] = lambda size, workload: []
    traffic: Callable[[ActivationSizes], list[Traffic]] = lambda sizes: []
    hooks: Callable[[bool], dict[str, Any]] = lambda sequence_parallel: {}


def axes_of(spec: P) -> tuple[str, ...]:
    """Return the names of the mesh axes in a `PartitionSpec`, in its order."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    return tuple(axis for entry in entries for axis in entry if axis is not None)


def dim_of(spec: P, axis: str) -> int | None:
    """Return the index of the dim that the mesh axis `axis` splits; None if it splits none."""
    for dim, entry in enumerate(spec):
        if axis == entry or (isinstance(entry, tuple) and axis in entry):
            return dim
    return None


def spec_over(spec: P, axes: tuple[str, ...]) -> P:
    """Return the spec with only the mesh axes in `axes`."""
    return spec_of([a for a in axes_of(P(entry)) if a in axes] for entry in spec)


def spec_of(groups: Iterable[Sequence[str]]) -> P:
    """Return the spec of an array from the mesh axes that split each dim."""
    entries = [tuple(axes) if len(axes) > 1 else axes[0] if axes else None for axes in groups]
    while entries and entries[-1] is None:
        entries.pop()
    return P(*entries)


def divisors_of(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def allowed_sizes(size: int) -> str:
    """Format the divisors of a dim, at most 8 up to 512: `1, 2, 4 or 8`."""
    sizes = [str(d) for d in range(1, min(size, 512) + 1) if size % d == 0]
    return f"{', '.join(sizes[:7])} … {sizes[-1]}" if len(sizes) > 8 else join_choices(sizes)
