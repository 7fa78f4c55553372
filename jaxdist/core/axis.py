"""The record of a mesh axis, read by mesh, sharding, planner, elastic jobs and help texts.

Each axis is one `Axis` in a file of `core/parallel/`, listed in `core/parallel/axes.py`. Rules for
all axes iterate over that list.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from jax.sharding import PartitionSpec as P

from jaxdist.settings.schema import join_choices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Sizes of a run's model and batch, which a mesh must fit.

    Attributes:
        dims: logical dim -> size (`Model.dims`); `layers` is absent if no layers are stacked.
        rules: logical dim -> mesh axis, for dims of the model's own (`Model.rules`).
        settings: logical dim -> the setting that gives its size, for messages.
        global_batch_size: rows of one step, or None to leave the batch out.
        num_microbatches: microbatches of a device's rows.
        rows_per_example: adjacent rows that no replica and no microbatch may separate.
        num_virtual_stages: groups of consecutive layers on each pipeline stage.
        context_len: positions of a row if the context axis may split them, else None.
    """

    dims: Mapping[str, int]
    rules: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    zero: int = 0
    global_batch_size: int | None = None
    num_microbatches: int = 1
    rows_per_example: int = 1
    num_virtual_stages: int = 1
    context_attention: str = "auto"
    context_len: int | None = None
    attention_dropout: float = 0.0

    def named(self, dim: str) -> str:
        """Format a dim with its size, by the setting that gives it: `model.num_layers=8`."""
        return f"{self.settings.get(dim, f'model dim {dim}')}={self.dims[dim]}"


Kind = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ActivationSizes:
    """Sizes of one step's activations on one device, from which its traffic follows.

    Attributes:
        stream_bytes: residual stream of a microbatch, [rows, seq, d_model] in the compute dtype.
        num_forwards: forward passes of a microbatch through a layer; 2 if a pipeline's backward
            repeats it.
        reduces_again: the recomputed values include attention's output, summed over `tensor`.
        query_bytes: queries of a microbatch in one layer, [rows, seq, heads, head_dim].
        key_value_bytes: keys and values, twice [rows, seq, kv_heads, head_dim].
        segment_bytes: documents of packed rows, int32 [rows, seq]; 0 if rows are not packed.
        widening: bytes of a float32 in bytes of the compute dtype.
        exchange: how devices that share rows exchange keys ("ring", ...); "" if none do.
        exchanged_heads: neighbors of them that exchange heads for positions.
    """

    stream_bytes: float
    num_tokens: int
    num_layers: int
    num_microbatches: int
    num_forwards: int
    recomputes: bool
    reduces_again: bool
    sequence_parallel: bool
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
    """Collectives of one kind and purpose, over one axis, in one step.

    Attributes:
        purpose: the data that move, e.g. "activations".
        num_bytes: of the complete array each time: before a reduce-scatter, after an all-gather.
        times: runs in one step.
        neighbors: devices of each group, on one node; 0 = all of the axis form one group.
    """

    kind: Kind
    purpose: str
    num_bytes: float
    times: int
    neighbors: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis of the device mesh, with its properties for all other modules.

    Attributes:
        name: name in `jax.sharding.Mesh` and in every `PartitionSpec`.
        short: name in `--mesh`, e.g. "tp" in `--mesh tp=4`.
        weights: the parameters that its devices hold.
            "replicated" = all of them, unless ZeRO shards them over the axis;
            "gathered" = a shard, gathered just before its use;
            "split" = the part they compute with.
        splits_rows: each of its devices takes other rows of the batch.
        splits_positions: each of its devices takes other positions of every row.
        dims: logical dims that it splits, in every model.
        sums_gradients: when the local gradients of a parameter that the axis does not split differ
            between its devices, and must be summed.
        shrinks: an elastic job may use fewer devices along it.
        complexity: of two equally fast meshes the planner prefers the lower sum.
        divides: why its size must divide its dims; completes "mesh tp=3 does not divide ...: ".
        problems: (size > 1, workload) -> further reasons that make the size illegal.
        traffic: activations that it moves in one step of a decoder; that of weights and gradients
            follows from `weights` and `sums_gradients`.
        hooks: sequence parallelism is on -> members of `Context` that the axis implements.
    """

    name: str
    short: str
    help: str
    moves: str
    weights: Literal["replicated", "gathered", "split"]
    splits_rows: bool = False
    splits_positions: bool = False
    dims: tuple[str, ...] = ()
    sums_gradients: Literal["always", "sequence_parallel", "never"] = "never"
    sums_loss: bool = False
    shrinks: bool = False
    complexity: int = 0
    divides: str = ""
    problems: Callable[[int, Workload], list[str]] = lambda size, workload: []
    traffic: Callable[[ActivationSizes], list[Traffic]] = lambda sizes: []
    hooks: Callable[[bool], dict[str, Any]] = lambda sequence_parallel: {}


def axes_of(spec: P) -> tuple[str, ...]:
    """Return the names of the mesh axes in a spec, in its order."""
    entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
    return tuple(axis for entry in entries for axis in entry if axis is not None)


def dim_of(spec: P, axis: str) -> int | None:
    """Return the dim that the mesh axis `axis` splits, or None."""
    for dim, entry in enumerate(spec):
        if axis == entry or (isinstance(entry, tuple) and axis in entry):
            return dim
    return None


def spec_over(spec: P, axes: tuple[str, ...]) -> P:
    """Return the spec without any mesh axis but `axes`."""
    kept: list[Any] = []
    for entry in spec:
        names = tuple(a for a in (entry if isinstance(entry, tuple) else (entry,)) if a in axes)
        kept.append(names if len(names) > 1 else names[0] if names else None)
    while kept and kept[-1] is None:
        kept.pop()
    return P(*kept)


def divisors_of(number: int) -> list[int]:
    """Return the divisors of a number, ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def allowed_sizes(size: int) -> str:
    """Format the divisors of a dim: `1, 2, 4 or 8`."""
    sizes = [str(d) for d in range(1, min(size, 512) + 1) if size % d == 0]
    return f"{', '.join(sizes[:7])} … {sizes[-1]}" if len(sizes) > 8 else join_choices(sizes)
