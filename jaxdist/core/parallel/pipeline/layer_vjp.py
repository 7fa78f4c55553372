"""Forward and backward of a layer as two functions that exchange a list of arrays.

A pipeline stage runs the backward of a microbatch long after its forward, in another loop. `saved`
is kept in between. It is small, although no matrix product of activations is computed twice:

1. Values that depend only on weights and constants are computed again.
2. A larger copy of a value (all-gathered, cast to a wider dtype, broadcast) is computed again.

With `jax.checkpoint` around the layer, `saved` is what its policy saves, and the layer's input.
Saved values are flat: otherwise XLA:GPU may choose another layout for the loop of the backward than
for that of the forward, and hold the buffers in both (GPT-2: 7.1 instead of 5.8 GiB).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxdist.core import collectives
from jaxdist.core.types import Array, Params, Sums

Layer = Callable[[Params, Array, Any], tuple[Array, Array | None, Sums]]
"""(weights, x, constants) -> (y, loss, sums); y and loss are differentiable in weights and x.

`loss` is the layer's part of the loss, float32 [], or None."""


class LayerVjp(NamedTuple):
    """Forward and backward of a layer.

    x, y, dx and dy are [microbatch, seq_shard, d_model].

    Attributes:
        forward: (weights, x, constants) -> (y, sums, saved); saved values are [size] each.
        backward: (weights, constants, saved, dy) -> (dx, weight gradients).
    """

    forward: Callable[[Params, Array, Any], tuple[Array, Sums, list[Array]]]
    backward: Callable[[Params, Any, list[Array], Array], tuple[Array, Params]]


def layer_vjp(layer: Layer, weights: Params, x: Array, constants: Any) -> LayerVjp:
    """Return both functions for arguments like these; x is [microbatch, seq_shard, d_model]."""
    traces: list[tuple[Any, Any, Any]] = []

    def differentiate(weights: Params, constants: Any, x: Array) -> tuple[Any, ...]:
        """Return (y [microbatch, seq_shard, d_model], its `Sums`, residuals of `jax.vjp`)."""

        def outputs(weights: Params, x: Array) -> tuple[tuple[Array, Array | None], Sums]:
            y, loss, sums = layer(weights, x, constants)
            return (y, loss), sums

        (y, loss), pull, sums = jax.vjp(outputs, weights, x, has_aux=True)
        leaves, pull_tree = jax.tree.flatten(pull)
        sum_leaves, sum_tree = jax.tree.flatten(sums)
        seed_axes = None if loss is None else tuple(collectives.varying_axes(loss))
        traces.append((pull_tree, sum_tree, seed_axes))
        return y, sum_leaves, leaves

    # 1. Trace the layer together with its `jax.vjp` residuals, the leaves of `pull`.
    traced = jax.make_jaxpr(differentiate)(weights, constants, x)
    pull_tree, sum_tree, seed_axes = traces[0]
    num_sums = sum_tree.num_leaves
    program, num_fixed = traced.jaxpr, len(jax.tree.leaves((weights, constants)))
    y_var, sum_vars, leaf_vars = (
        program.outvars[0],
        program.outvars[1 : 1 + num_sums],
        program.outvars[1 + num_sums :],
    )
    fixed = _follows_from(program, program.invars[:num_fixed])
    made = {*program.invars, *_outputs(program.eqns)}
    # 2. Save the residuals that depend on more than weights and constants.
    own, again = _stored(program.eqns, leaf_vars, made, fixed)
    run = _function(traced, program.invars, [y_var, *sum_vars, *own])
    rebuild = _function(traced, [*program.invars[:num_fixed], *own], leaf_vars, equations=again)

    def forward(weights: Params, x: Array, constants: Any) -> tuple[Array, Sums, list[Array]]:
        y, *rest = run(*jax.tree.leaves((weights, constants)), x)
        saved = [value.reshape(-1) for value in rest[num_sums:]]
        return y, jax.tree.unflatten(sum_tree, rest[:num_sums]), saved

    def backward(
        weights: Params, constants: Any, saved: list[Array], dy: Array
    ) -> tuple[Array, Params]:
        """Return (dx, weight gradients) from dy [microbatch, seq_shard, d_model]."""
        shaped = [value.reshape(var.aval.shape) for value, var in zip(saved, own, strict=True)]
        leaves = rebuild(*jax.tree.leaves((weights, constants)), *shaped)
        pull = jax.tree.unflatten(pull_tree, leaves)
        dloss = None if seed_axes is None else collectives.vary(jnp.float32(1.0), seed_axes)
        weight_grads, dx = pull((dy, dloss))
        return dx, weight_grads

    return LayerVjp(forward, backward)


def _stored(
    equations: Sequence[Any],
    required: Sequence[Any],
    made: set[Any],
    fixed: set[Any],
) -> tuple[list[Any], list[Any]]:
    """Return (variables to keep, equations that compute the required variables from them).

    Kept variables are values of the forward (`made`) that depend on more than weights and constants
    (`fixed`). Variables that are enlarged copies of others are not kept but computed again.
    """
    enlarged = _outputs(equation for equation in equations if _enlarges(equation, fixed))
    between = lambda var: var in made and var not in fixed and var not in enlarged
    second = _needed(equations, required, stop=between)
    read = [*(var for equation in second for var in equation.invars), *required]
    return list(dict.fromkeys(v for v in read if isinstance(v, core.Var) and between(v))), second


def _enlarges(equation: Any, fixed: set[Any]) -> bool:
    """Return True if an equation only copies its input into more bytes."""
    if equation.primitive.name not in ("all_gather", "broadcast_in_dim", "convert_element_type"):
        return False
    size = lambda variables: sum(v.aval.size * v.aval.dtype.itemsize for v in variables)
    read = [var for var in equation.invars if not _is_determined(var, fixed)]
    return size(read) < size(equation.outvars)


def _outputs(equations: Iterable[Any]) -> set[Any]:
    return {var for equation in equations for var in equation.outvars}


def _needed(
    equations: Sequence[Any], required: Iterable[Any], stop: Callable[[Any], bool] = lambda _: False
) -> list[Any]:
    """Return the equations that compute the required variables from those that `stop` accepts."""
    open_vars = {var for var in required if isinstance(var, core.Var) and not stop(var)}
    equations_needed = []
    for equation in reversed(equations):
        if open_vars.isdisjoint(equation.outvars):
            continue
        equations_needed.append(equation)
        open_vars |= {var for var in equation.invars if isinstance(var, core.Var) and not stop(var)}
    return equations_needed[::-1]


def _follows_from(program: Any, determined: Iterable[Any]) -> set[Any]:
    """Return the variables that depend only on the `determined` ones and on constants."""
    variables = {*determined, *program.constvars}
    for equation in program.eqns:
        if all(_is_determined(var, variables) for var in equation.invars):
            variables |= set(equation.outvars)
    return variables


def _is_determined(var: Any, determined: set[Any]) -> bool:
    return not isinstance(var, core.Var) or var in determined


def _function(
    traced: Any, inputs: Sequence[Any], outputs: Sequence[Any], equations: Any = None
) -> Callable[..., list[Array]]:
    """Return the part of a traced program from inputs to outputs, on arrays [*dims]."""
    program = traced.jaxpr
    equations = _needed(program.eqns if equations is None else equations, outputs)
    part = program.replace(invars=list(inputs), outvars=list(outputs), eqns=equations)
    return core.jaxpr_as_fun(core.ClosedJaxpr(part, traced.consts))
