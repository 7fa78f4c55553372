"""Split a layer's backward: compute the input gradient now and the weight gradients later.

Zero-bubble schedules run them as two actions, because another stage waits only for the input
gradient. `jax.vjp` returns one function for both, so its traced program is cut in two:

    forward          x ──► y, saved
    input gradient   saved, dy ──► dx, kept   the equations that dx needs
    weight gradient  kept ──► weight gradients   mostly one matrix product per weight

`kept` are inputs of products and gradients of their outputs. They are buffered until the weight
action, so they determine the memory of the schedule. Three rules reduce them without computing any
matrix product twice:

1. Values that depend only on weights and constants are recomputed.
2. Gradients of biases and norm scales are sums over rows. They are stored after summing.
3. With `recompute_enlarged`, a larger copy of a value (all-gathered over the tensor axis, cast to a
   wider dtype, broadcast) is recomputed from that value.

Source: Qi et al. 2024, "Zero Bubble Pipeline Parallelism", section 2. Deviation: the traced program
is cut, so this works for any layer.
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

`loss` is the layer's part of the loss, float32 [], or None. Its cotangent is 1 in both parts of the
backward."""


class SplitLayer(NamedTuple):
    """Functions of a layer with split backward; lists of arrays pass values between them.

    x, y, dx and dy are [microbatch, seq_shard, d_model]. Weight gradients have the shapes of the
    weights. The split determines which arrays are in `saved` and `kept`.

    Attributes:
        forward: (weights, x, constants) -> (y, sums, saved).
        backward: (weights, constants, saved, dy) -> (dx, weight gradients): the unsplit backward.
        input_gradient: (weights, constants, saved, dy) -> (dx, kept).
        weight_gradient: (weights, constants, kept) -> weight gradients.
    """

    forward: Callable[[Params, Array, Any], tuple[Array, Sums, list[Array]]]
    backward: Callable[[Params, Any, list[Array], Array], tuple[Array, Params]]
    input_gradient: Callable[[Params, Any, list[Array], Array], tuple[Array, list[Array]]]
    weight_gradient: Callable[[Params, Any, list[Array]], Params]


def split_layer(
    layer: Layer, weights: Params, x: Array, constants: Any, *, recompute_enlarged: bool = False
) -> SplitLayer:
    """Split the backward of a layer for arguments of these shapes and dtypes.

    x is [microbatch, seq_shard, d_model]. `constants` are not differentiated. `recompute_enlarged`
    enables rule 3 of the module docstring.
    """
    traces: list[tuple[Any, Any, Any]] = []

    def differentiate(weights: Params, constants: Any, x: Array) -> tuple[Any, ...]:
        """Return (y [microbatch, seq_shard, d_model], its sums, residuals of `jax.vjp`)."""

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
    own, again = _stored(program.eqns, leaf_vars, made, fixed, recompute_enlarged)
    run = _function(traced, program.invars, [y_var, *sum_vars, *own])
    rebuild = _function(traced, [*program.invars[:num_fixed], *own], leaf_vars, equations=again)

    def forward(weights: Params, x: Array, constants: Any) -> tuple[Array, Sums, list[Array]]:
        y, *rest = run(*jax.tree.leaves((weights, constants)), x)
        return y, jax.tree.unflatten(sum_tree, rest[:num_sums]), rest[num_sums:]

    def backward(
        weights: Params, constants: Any, saved: list[Array], dy: Array
    ) -> tuple[Array, Params]:
        """Return (dx, weight gradients) from dy [microbatch, seq_shard, d_model]."""
        leaves = rebuild(*jax.tree.leaves((weights, constants)), *saved)
        pull = jax.tree.unflatten(pull_tree, leaves)
        dloss = None if seed_axes is None else collectives.vary(jnp.float32(1.0), seed_axes)
        weight_grads, dx = pull((dy, dloss))
        return dx, weight_grads

    # Concrete values, because shapes lose their mesh if XLA shards an axis automatically.
    y, _, saved = jax.tree.map(
        collectives.zeros_like, jax.eval_shape(forward, weights, x, constants)
    )
    return SplitLayer(
        forward, backward, *_cut(backward, weights, constants, saved, y, recompute_enlarged)
    )


def _cut(
    backward: Callable[..., tuple[Array, Params]],
    weights: Params,
    constants: Any,
    saved: list[Any],
    dy: Any,
    recompute_enlarged: bool,
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the input and weight gradient functions; dy is [microbatch, seq_shard, d_model]."""
    traced = jax.make_jaxpr(backward)(weights, constants, saved, dy)
    program, num_fixed = traced.jaxpr, len(jax.tree.leaves((weights, constants)))
    dx_var, *weight_vars = program.outvars
    fixed = _follows_from(program, program.invars[:num_fixed])
    # 1. The first part computes only values that the input gradient needs.
    first = _outputs(_needed(program.eqns, [dx_var]))
    # 2. It also computes weight gradients that need no product: biases and norm scales.
    leading_to = lambda var: _needed(program.eqns, [var], first.__contains__)
    sums = [var for var in weight_vars if not _multiplies(leading_to(var))]
    made = {*program.invars[num_fixed:], *first, *_outputs(_needed(program.eqns, sums))}
    # 3. Of the values computed so far, keep those that the second part reads.
    kept_vars, second = _stored(program.eqns, weight_vars, made, fixed, recompute_enlarged)
    first_half = _function(traced, program.invars, [dx_var, *kept_vars])
    second_half = _function(
        traced, [*program.invars[:num_fixed], *kept_vars], weight_vars, equations=second
    )
    shape = jax.tree.structure(weights)

    def input_gradient(
        weights: Params, constants: Any, saved: list[Array], dy: Array
    ) -> tuple[Array, list[Array]]:
        dx, *kept = first_half(*jax.tree.leaves((weights, constants)), *saved, dy)
        return dx, kept

    def weight_gradient(weights: Params, constants: Any, kept: list[Array]) -> Params:
        grads = second_half(*jax.tree.leaves((weights, constants)), *kept)
        return jax.tree.unflatten(shape, grads)

    return input_gradient, weight_gradient


def _stored(
    equations: Sequence[Any],
    required: Sequence[Any],
    made: set[Any],
    fixed: set[Any],
    recompute_enlarged: bool,
) -> tuple[list[Any], list[Any]]:
    """Return (variables to keep, equations that compute the required variables from them).

    Kept variables are available after the first part (`made`) and depend on more than weights and
    constants (`fixed`). They are not larger copies of other variables, which rule 3 recomputes.
    """
    enlarged = _outputs(eqn for eqn in equations if recompute_enlarged and _enlarges(eqn, fixed))
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


def _multiplies(equations: Iterable[Any]) -> bool:
    return any(
        equation.primitive.name in ("dot_general", "conv_general_dilated")
        or any(_multiplies(part.eqns) for part in core.jaxprs_in_params(equation.params))
        for equation in equations
    )


def _outputs(equations: Iterable[Any]) -> set[Any]:
    return {var for equation in equations for var in equation.outvars}


def _needed(
    equations: Sequence[Any], required: Iterable[Any], stop: Callable[[Any], bool] = lambda _: False
) -> list[Any]:
    """Return the equations that compute the required variables, starting after `stop` variables."""
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
