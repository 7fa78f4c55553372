"""The state of a run between two steps, and its initialization: the same bits on any mesh."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from jax.tree_util import tree_map_with_path

from jaxdist.core.parallel.pipeline.axis import PIPELINE
from jaxdist.core.parallel.pipeline.virtual_stages import (
    LayerSplit,
    model_order_sharding,
    stored_shape,
)
from jaxdist.core.sharding import Layout
from jaxdist.core.types import Array, Model, Params
from jaxdist.core.weights import GROUPS, merged, trained
from jaxdist.runtime.backend import xla_flag_names


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """The parameters, optimizer state, counters and key of a run between two steps.

    Attributes:
        step: int32 [], number of completed steps, including those without an update.
        params: parameters, nested dicts; storage and layout follow the records in `Model.axes`.
        copies: other parameter groups by name, e.g. "ema" (`core.weights.GROUPS`).
        opt_state: optax state, laid out by `opt_shardings`; without moments that are in a store.
        loss_scale: {} or the float16 loss scale (`precision.initial_loss_scale`).
        key: PRNG key of the run; each step folds in its index, and the key itself never changes.
    """

    step: Array
    params: Params
    opt_state: Any
    loss_scale: dict[str, Array]
    key: Array
    copies: dict[str, Params] = dataclasses.field(default_factory=dict)

    @property
    def eval_params(self) -> Params:
        """Return the parameters to evaluate: the moving average if the run has one."""
        averages = (tree for name, tree in self.copies.items() if GROUPS[name].is_average)
        return next((merged(tree, self.params) for tree in averages), self.params)

    @property
    def groups(self) -> dict[str, Params]:
        """Return the parameter groups of the run, by their names in checkpoints."""
        copies = {GROUPS[name].item: tree for name, tree in self.copies.items()}
        return {GROUPS["model"].item: self.params, **copies}


def init_state(
    model: Model,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    *,
    seed: int,
    loss_scale: dict[str, Array],
    offload: bool = False,
    copies: Collection[str] = (),
    params: Params | None = None,
) -> TrainState:
    """Return a new state, with layers in the order of the model.

    Parameters and random bits depend only on `seed`. `offload` leaves out optimizer moments.
    `copies` names the groups besides the model's. `params`, laid out by `layout`, replace random
    ones; they are donated. `loss_scale`: two scalars [], or {} (`precision.initial_loss_scale`).
    """
    state = abstract_state(
        model, optimizer, layout, loss_scale=loss_scale, offload=offload, copies=copies
    )
    make = make_state(model, optimizer, loss_scale, offload=offload, copies=copies)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    # LLVM's level 3 takes three times as long for random bits, and the program runs once.
    level = "xla_backend_optimization_level"
    options = {} if level in xla_flag_names() else {level: 2}
    make = jax.jit(
        make, static_argnums=0, donate_argnums=1, out_shardings=shardings, compiler_options=options
    )
    return make(seed) if params is None else make(seed, params)


def abstract_state(
    model: Model,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    *,
    loss_scale: dict[str, Array],
    offload: bool = False,
    copies: Collection[str] = (),
) -> TrainState:
    """Return the state of `make_state` as `ShapeDtypeStruct`s [*dims], layers in model order."""
    make = make_state(model, optimizer, loss_scale, offload=offload, copies=copies)
    shapes = jax.eval_shape(lambda: make(0))
    shardings = state_shardings(
        model, optimizer, layout, loss_scale=loss_scale, offload=offload, copies=copies
    )
    split = _padded_split(layout)

    def leaf(path: Any, x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        if split is not None:
            sharding = model_order_sharding(path, x, sharding, split)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return tree_map_with_path(leaf, shapes, shardings)


def _padded_split(layout: Layout) -> LayerSplit | None:
    """Return the split of layers into virtual stages if some have fewer than others, else None."""
    split = LayerSplit(layout.stage_depths or (1,), layout.size(PIPELINE))
    return split if split.is_padded else None


def make_state(
    model: Model,
    optimizer: optax.GradientTransformation,
    loss_scale: dict[str, Array],
    *,
    offload: bool = False,
    copies: Collection[str] = (),
) -> Any:
    """Make the pure function (seed, params=random) -> TrainState; layers are [layers, ...]."""

    def make(seed: int, params: Params | None = None) -> TrainState:
        init_key, run_key = jax.random.split(jax.random.key(seed))
        params = model.init(init_key) if params is None else params
        opt_state = optimizer.init(trained(params, model.axes))
        if offload:
            opt_state = without_moments(optimizer, opt_state, trained(params, model.axes))
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            opt_state=opt_state,
            loss_scale=jax.tree.map(jnp.asarray, loss_scale),
            key=run_key,
            copies={name: GROUPS[name].start(params, model.axes) for name in copies},
        )

    return make


def state_shardings(
    model: Model,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    *,
    loss_scale: dict[str, Array],
    offload: bool = False,
    copies: Collection[str] = (),
) -> TrainState:
    """Return the shardings of a `TrainState` in a step; scalars [] are replicated."""
    whole: Any = layout.sharding(P())
    params = layout.shardings(layout.param_specs(model.axes))
    return TrainState(
        step=whole,
        params=params,
        copies={name: GROUPS[name].select(params, model.axes) for name in copies},
        opt_state=opt_shardings(model, optimizer, layout, offload=offload),
        loss_scale=jax.tree.map(lambda _: whole, loss_scale),
        key=whole,
    )


def opt_shardings(
    model: Model,
    optimizer: optax.GradientTransformation,
    layout: Layout,
    *,
    offload: bool = False,
) -> Any:
    """Return shardings of the optimizer state.

    Leaves with as many dims as their parameter are sharded like its moments, if divisible; others
    are replicated. With `offload`, moments have None (`moment_params`).
    """
    params = trained(jax.eval_shape(model.init, jax.random.key(0)), model.axes)
    if (split := _padded_split(layout)) is not None:
        resized = lambda path, x: x.update(shape=stored_shape(path, x, split))
        params = tree_map_with_path(resized, params)
    opt_state = jax.eval_shape(optimizer.init, params)
    specs = layout.moment_specs(trained(model.axes, model.axes))

    def leaf(moment: Any, param: Any, spec: P) -> Any:
        fits = param is not None and moment.ndim == param.ndim
        spec = layout.divisible(spec, moment.shape) if fits else P()
        return layout.sharding(spec)

    shardings = optax.tree_utils.tree_map_params(
        optimizer,
        leaf,
        opt_state,
        params,
        specs,
        transform_non_params=lambda _: layout.sharding(P()),
    )
    if not offload:
        return shardings
    indices = moment_params(optimizer, opt_state, params)
    return jax.tree.map(lambda index, s: None if index >= 0 else s, indices, shardings)


def moment_params(optimizer: optax.GradientTransformation, opt_state: Any, params: Params) -> Any:
    """Return a tree like the optimizer state: of each leaf [...], the index of its parameter.

    The index counts the leaves of the trained `params`; it is -1 for counters and placeholders [].
    """
    indices = jax.tree.unflatten(jax.tree.structure(params), range(len(jax.tree.leaves(params))))

    def leaf(moment: Any, param: Any, index: Any) -> int:
        return index if param is not None and (moment.ndim or not param.ndim) else -1

    return optax.tree_utils.tree_map_params(
        optimizer, leaf, opt_state, params, indices, transform_non_params=lambda _: -1
    )


def without_moments(optimizer: optax.GradientTransformation, opt_state: Any, params: Params) -> Any:
    """Return the optimizer state with None in place of the moments [...] of parameters."""
    indices = moment_params(optimizer, opt_state, params)
    return jax.tree.map(lambda index, x: None if index >= 0 else x, indices, opt_state)
