"""The expert axis: replicas that split the experts of each layer and exchange tokens.

For everything except experts it is another split of the rows, whose devices shard the matrices
together with those of fsdp. A token is sent to the devices of its experts, and their outputs are
sent back. An exchange has a fixed size, `FACTOR` times that of a balanced router. If a device has
more tokens for another one, all devices of the axis repeat the exchange until none is left.

Source: Lepikhin et al. 2020, "GShard", section 3.2. Deviation: no token is dropped here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.core import collectives, experts
from jaxdist.core.axis import ActivationSizes, Axis, Traffic, Workload
from jaxdist.core.parallel.tensor import TENSOR
from jaxdist.core.types import Array, Routing

FACTOR = 1.25
"""Rows of one exchange between two devices / rows of a balanced router."""


ROUNDS = "further_rounds_of_experts"
"""Name of the loop over the rounds after the first in a compiled program."""


class _Exchange(NamedTuple):
    """The order in which a device sends its assignments.

    Attributes:
        order: assignments sorted by expert, int32 [assignments].
        device: destination, or number of devices = dropped, int32 [tokens, experts_per_token].
        offset: index among the assignments with this destination, or -1 = dropped, same shape.
        counts: number of own assignments to each device, int32 [devices].
        starts: index in `order` of the first one, int32 [devices].
        received: number of assignments from each device for each local expert, [devices, experts].
    """

    order: Array
    device: Array
    offset: Array
    counts: Array
    starts: Array
    received: Array


class _Inputs(NamedTuple):
    """Inputs: x [tokens, d_model], shares [tokens, choices]; `weights` as in `run_sorted`."""

    x: Array
    shares: Array
    weights: tuple[Array, ...]


def make_experts(grouped_dot: experts.GroupedDot) -> Callable[..., tuple[Array, Array]]:
    """Make `Context.experts` for devices that have `experts / ep` experts each.

    Arguments and results [batch, seq, d_model] and int32 [], the rounds after the first, are those
    of `experts.make_experts`. A round moves 2 · `FACTOR` · experts_per_token times the bytes of x.
    """

    def exchanged(
        x: Array,
        routing: Routing,
        up: Array,
        down: Array,
        activate: experts.Activate,
        *biases: Array,
    ) -> tuple[Array, Array]:
        """Return each token's sum over its experts of share · output, [batch, seq, d_model]."""
        tokens, chosen, shares = experts.flatten(x, routing)
        inputs = _Inputs(tokens, shares, (up, down, *biases))
        arrays = jax.tree.leaves(inputs)
        axes = tuple(sorted({axis for array in arrays for axis in collectives.varying_axes(array)}))
        inputs = collectives.vary(inputs, axes)
        plan = _plan(collectives.vary(chosen, axes), up.shape[0])
        sent = capacity(chosen.size, lax.axis_size(EXPERT.name))
        # Tensor devices have the same tokens; with them the number does not vary over their axis.
        agreed = tuple(axis for axis in axes if axis in (EXPERT.name, TENSOR.name))
        rounds = jnp.max(plan.counts + sent - 1) // sent
        rounds = collectives.all_reduce(rounds, agreed, "max")
        run = partial(_round, grouped_dot, activate, sent)
        # The rounds after the first are almost never needed and save no values for backward.
        total = run(plan, 0, inputs) + _further_rounds(run, plan, rounds, inputs)
        return total.astype(x.dtype).reshape(x.shape), jnp.maximum(rounds - 1, 0)

    return exchanged


def capacity(assignments: int, size: int) -> int:
    """Return the number of rows that a device sends to each of `size` devices in a round."""
    return max(1, math.ceil(FACTOR * assignments / size))


def _plan(chosen: Array, num_local: int) -> _Exchange:
    """Return the exchange for the `chosen` experts, int32 [tokens, experts_per_token]."""
    size = lax.axis_size(EXPERT.name)
    flat = chosen.reshape(-1)
    order = experts.order_by_expert(flat)
    by_expert = experts.count(chosen, size * num_local).reshape(size, num_local)
    counts = jnp.sum(by_expert, 1)
    starts = jnp.cumsum(counts) - counts
    device = flat // num_local  # `size` if the assignment is dropped
    offset = jnp.where(device < size, experts.inverse(order) - starts[device], -1)
    return _Exchange(
        order=order,
        device=device.reshape(chosen.shape),
        offset=offset.reshape(chosen.shape),
        counts=counts,
        starts=starts,
        received=collectives.all_to_all(by_expert, EXPERT.name, 0, 0),
    )


def _round(
    grouped_dot: experts.GroupedDot,
    activate: experts.Activate,
    capacity: int,
    plan: _Exchange,
    number: Any,
    inputs: _Inputs,
) -> Array:
    """Return the part of the output from one round's assignments, float32 [tokens, d_model]."""
    x, shares, weights = inputs
    first = number * capacity
    offset = plan.offset - first
    is_sent = (offset >= 0) & (offset < capacity)
    rows = jnp.where(is_sent, plan.device * capacity + offset, -1)
    index = first + jnp.arange(capacity, dtype=jnp.int32)
    last = plan.order.shape[0] - 1
    assignment = plan.order[jnp.minimum(plan.starts[:, None] + index, last)]
    source = jnp.where(index < plan.counts[:, None], assignment, -1).reshape(-1)
    received = _swap(experts.take(x, source, rows))
    # Each device sends its rows in the order of the experts; rows after its last have none.
    ends = jnp.cumsum(plan.received, 1)
    expert = jnp.sum(ends[:, None, :] <= index[:, None], -1, dtype=jnp.int32).reshape(-1)
    order = experts.order_by_expert(expert)
    slots = experts.inverse(order)[:, None]
    sizes = experts.count(expert, weights[0].shape[0])
    rows_in = experts.take(received, order, slots)
    outputs = experts.run_sorted(grouped_dot, rows_in, sizes, activate, *weights)
    returned = _swap(experts.take(outputs, slots[:, 0], order[:, None]))
    return experts.combine(returned, shares, source, rows)


def _swap(x: Array) -> Array:
    """Send part i of x [devices · capacity, d_model] to device i; return the received parts."""
    return collectives.all_to_all(x, EXPERT.name, 0, 0)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _further_rounds(
    run: Callable[..., Array], plan: _Exchange, rounds: Array, inputs: _Inputs
) -> Array:
    """Return the sum of the rounds 1 ... rounds - 1, float32 [tokens, d_model]."""
    return _sum_rounds(lambda number: run(plan, number, inputs), rounds, _zeros(inputs.x))


def _further_backward(run: Callable[..., Array], saved: Any, grad: Array) -> Any:
    """Run each round again; return the gradients of `inputs` from grad [tokens, d_model]."""
    plan, rounds, inputs = saved

    def gradients(number: Array) -> _Inputs:
        _, backward = jax.vjp(partial(run, plan, number), inputs)
        return jax.tree.map(lambda g: g.astype(jnp.float32), backward(grad)[0])

    total = _sum_rounds(gradients, rounds, jax.tree.map(_zeros, inputs))
    return None, None, jax.tree.map(lambda g, x: g.astype(x.dtype), total, inputs)


_further_rounds.defvjp(lambda run, *rest: (_further_rounds(run, *rest), rest), _further_backward)


def _zeros(x: Array) -> Array:
    """Return float32 zeros like x [*dims], which vary over the same axes."""
    return collectives.vary(jnp.zeros(x.shape, jnp.float32), tuple(collectives.varying_axes(x)))


def _sum_rounds(body: Callable[[Array], Any], rounds: Array, zeros: Any) -> Any:
    """Return the sum of body(1), ..., body(rounds - 1), a tree of arrays [*dims] like `zeros`."""
    add = lambda state: (state[0] + 1, jax.tree.map(jnp.add, state[1], body(state[0])))
    first = collectives.vary(jnp.int32(1), tuple(collectives.varying_axes(rounds)))
    with jax.named_scope(ROUNDS):
        return lax.while_loop(lambda state: state[0] < rounds, add, (first, zeros))[1]


def _problems(size: int, workload: Workload) -> list[str]:
    if "experts" in workload.dims:
        return []
    return [
        f"mesh ep={size} with a model without experts: it splits experts only. Use "
        f"fsdp={size} instead, or set model.num_experts."
    ]


def _traffic(sizes: ActivationSizes) -> list[Traffic]:
    passes = sizes.num_forwards + 1 + sizes.recomputes
    num_bytes = FACTOR * sizes.experts_per_token * sizes.stream_bytes
    times = 2 * passes * sizes.sparse_layers * sizes.num_microbatches
    return [Traffic("all-to-all", "tokens for experts", num_bytes, times)]


EXPERT = Axis(
    name="expert",
    short="ep",
    help="replicas that share the experts of each layer",
    moves="tokens, to their experts and back",
    weights="split",
    joins_fsdp=True,
    splits_rows=True,
    dims=("experts",),
    sums_gradients="always",
    sums_loss=True,
    shrinks=True,
    proposed=False,
    complexity=2,
    divides="each device has the same number of experts",
    problems=_problems,
    traffic=_traffic,
    hooks=lambda sequence_parallel: {"experts": make_experts},
)
