"""Metadata of parameters, and weights that consist of several arrays.

`Model.axes` has a record at each leaf: plain `Dims` (a trained float32 array) or a `Parameter`. A
`CompositeWeight` is stored in several arrays, each with its own record.

    storage       gathered as, without `keeps_dtype`      update
    float32       compute dtype                           any
    bfloat16      compute dtype                           none
    int8, uint8   int8, uint8                             none
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from jaxdist.core.types import Array, Dims, Params, Storage, Update


class ParameterGroup(NamedTuple):
    """A named tree of parameters in the state of a run.

    All but the model's are copies, which start from the model's parameters, also if a checkpoint
    lacks them.

    Attributes:
        item: its name in a checkpoint.
        setting: the setting that adds it to a run.
        storage: dtype of its leaves; "" = that of the model.
        is_average: it has only trained leaves. Each step moves them towards the model's, and
            evaluation uses them. Other copies never change.
    """

    item: str
    setting: str = ""
    storage: Storage | Literal[""] = ""
    is_average: bool = False

    def select(self, tree: Any, axes: Any) -> Any:
        """Return a tree like `axes`, with None for the leaves that the group lacks."""
        return trained(tree, axes) if self.is_average else tree

    def start(self, params: Params, axes: Any) -> Params:
        """Return a new group: a copy of its leaves [...] of `params`; both can be donated."""
        copy = lambda x: jnp.array(x, dtype=self._dtype(x.dtype), copy=True)
        return jax.tree.map(copy, self.select(params, axes))

    def element_bytes(self, dims: Dims) -> int:
        """Return the bytes per element of the copy of a parameter; 0 if the group lacks it."""
        if self.is_average and dims.update == "none":
            return 0
        return self._dtype(jnp.dtype(dims.storage)).itemsize

    def _dtype(self, stored: Any) -> Any:
        is_real = jnp.issubdtype(stored, jnp.floating)
        return jnp.dtype(self.storage) if self.storage and is_real else stored


GROUPS = {
    "model": ParameterGroup("params"),
    "ema": ParameterGroup("ema_params", "optim.ema_decay", is_average=True),
}
"""The groups of parameters. A run has the model, and those that `OptimConfig.copies` names."""


class Parameter(Dims):
    """Metadata of one parameter: logical dims, storage format, and how training updates it.

    Attributes:
        storage: dtype of the array. Trained parameters are float32.
        update: "gradient" = by the optimizer; "statistic" = a running average of batch statistics
            (`step/statistics.py`); "increment" = `Model.increments` are added; "none" = frozen.
        keeps_dtype: the model receives the storage dtype instead of the compute dtype.
        num_weights: the model's weights in an element: 2 = two codes of 4 bits, 0 = a scale.
    """

    def __new__(
        cls,
        names: Iterable[str | None],
        *,
        storage: Storage = "float32",
        update: Update = "gradient",
        keeps_dtype: bool = False,
        num_weights: int = 1,
    ) -> Parameter:
        """Make the record; raise `ValueError` for a trained parameter that is not float32."""
        if storage != "float32" and update != "none":
            raise ValueError(
                f"a parameter with storage={storage!r} and update={update!r}: trained parameters "
                "are float32. Use update='none', or storage='float32'."
            )
        self = super().__new__(cls, names)
        self.storage, self.update = storage, update
        is_integer = storage in ("int8", "uint8")
        self.keeps_dtype = keeps_dtype or is_integer or update in ("statistic", "increment")
        self.num_weights = num_weights
        return self


def freeze(dims: Dims) -> Parameter:
    """Return the record of a parameter, marked as frozen."""
    return Parameter(dims, **{**vars(dims), "update": "none"})


def gathered_dtypes(axes: Any, compute_dtype: Any) -> Any:
    """Return the dtype in which a model receives each parameter, a tree like `axes`."""
    stored = lambda dims: jnp.dtype(dims.storage if dims.keeps_dtype else compute_dtype)
    return jax.tree.map(stored, axes)


def trained(tree: Any, axes: Any) -> Any:
    """Return a tree like `axes` with None for frozen leaves, which may not be differentiable."""
    return jax.tree.map(lambda dims, x: None if dims.update == "none" else x, axes, tree)


def frozen(tree: Any, axes: Any) -> Any:
    """Return a tree like `axes` with only the frozen leaves, and None for all others."""
    return jax.tree.map(lambda dims, x: x if dims.update == "none" else None, axes, tree)


def merged(tree: Any, rest: Any) -> Any:
    """Replace each None in a tree by the leaf of `rest` at the same position."""
    is_none = lambda x: x is None
    return jax.tree.map(lambda x, other: other if x is None else x, tree, rest, is_leaf=is_none)


GATHERS = ("gather_weight", "gather_rounded")
"""Functions with a custom VJP that gather or cast parameters before use."""


def is_gather(primitive: Any, params: dict[str, Any]) -> bool:
    """Return True if an equation of a traced program calls one of `GATHERS`."""
    if primitive.name != "custom_vjp_call":
        return False
    return params["call_jaxpr"].jaxpr.debug_info.func_name in GATHERS


SumOver: TypeAlias = Callable[[Any, Literal["batch", "seq", "seq_shard", "tensor"]], Any]
"""The type of `Context.sum`."""

ADAPTED = "adapted"
"""Name of the sum of several products, which the remat policy "dots" saves."""


class CompositeWeight:
    """A weight stored in several arrays, e.g. for `Context.dot`; subclasses are pytrees."""

    def multiply(
        self, dot: Callable[..., Array], dims: str, x: Array, *, out_dtype: Any, sum_over: SumOver
    ) -> Array:
        """Return the product [*dims after the arrow] by `dot`; `sum_over` is `Context.sum`."""
        raise TypeError(f"{type(self).__name__} is not a factor of products in Context.dot")

    def __getitem__(self, index: Any) -> CompositeWeight:
        """Return itself: Flax reads the value of a parameter as `param[...]`."""
        return self

    def without_adapters(self) -> Any:
        """Return the weight that its adapters change; itself if it has none."""
        return self


def base_of(tree: Any) -> Any:
    """Return a tree without adapters: the names and structure of the model without them."""
    is_composite = lambda node: isinstance(node, CompositeWeight)
    base = lambda w: w.without_adapters() if is_composite(w) else w
    return jax.tree.map(base, tree, is_leaf=is_composite)


def with_weights(
    dot: Callable[..., Array], sum_over: SumOver, barrier: bool = False
) -> Callable[..., Array]:
    """Return a product like `dot` that also multiplies `CompositeWeight`s, with their `multiply`.

    `dot` multiplies arrays [*dims]. `barrier` adds a `gradient_barrier` to each product.
    """

    def multiply(dims: str, x: Array, w: Any, *, out_dtype: Any = None) -> Array:
        if isinstance(w, CompositeWeight):
            return w.multiply(multiply, dims, x, out_dtype=out_dtype, sum_over=sum_over)
        x, w = gradient_barrier((x, w)) if barrier else (x, w)
        return dot(dims, x, w, out_dtype=out_dtype)

    return multiply


@jax.custom_vjp
def gradient_barrier(tree: Any) -> Any:
    """Return a tree of arrays unchanged, but delay its gradients until all of them are computed.

    Otherwise XLA:GPU postpones weight gradients to overlap them with the last collective-permutes
    of ring attention's backward pass. Until then their inputs stay alive: two MLP-wide arrays.
    """
    return tree


def _barrier_backward(_: None, cotangent: Any) -> tuple[Any]:
    # Integer (int8) weights have no gradient.
    real = jax.tree.map(lambda x: None if x.dtype == jax.dtypes.float0 else x, cotangent)
    return (merged(jax.lax.optimization_barrier(real), cotangent),)


gradient_barrier.defvjp(lambda tree: (tree, None), _barrier_backward)
