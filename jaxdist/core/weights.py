"""Metadata of parameters, and weights that are more than one array.

`Model.axes` holds a record at each leaf: plain `Dims`, a float32 array that gradients train, or a
`Parameter`, which says otherwise. A weight that is stored in several arrays is a
`CompositeWeight`: a node of the tree of parameters, with a record for each of its arrays in
`Model.axes`.

    storage     on disk, in memory, on the wire   gathered as               update
    float32     4 bytes                           compute dtype             any
    bfloat16    2 bytes                           compute dtype             none
    int8        1 byte                            int8                      none
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from jaxdist.core.types import Array, Dims

Storage: TypeAlias = Literal["float32", "bfloat16", "int8"]
Update: TypeAlias = Literal["gradient", "statistic", "none"]


class Parameter(Dims):
    """Metadata of one parameter: its logical dims, how it is stored, and how training updates it.

    Attributes:
        storage: dtype of the array. Trained parameters are float32.
        update: "gradient" = by the optimizer; "statistic" = a running average, moved by the
            batches' own values (`step/statistics.py`); "none" = frozen.
        keeps_dtype: the model receives it as it is stored, not in the compute dtype.
    """

    storage: Storage
    update: Update
    keeps_dtype: bool

    def __new__(
        cls,
        names: Iterable[str | None],
        *,
        storage: Storage = "float32",
        update: Update = "gradient",
        keeps_dtype: bool = False,
    ) -> Parameter:
        """Check that only frozen parameters are stored in fewer bits."""
        if storage != "float32" and update != "none":
            raise ValueError(
                f"a parameter with storage={storage!r} and update={update!r}: trained parameters "
                "are float32. Use update='none', or storage='float32'."
            )
        self = super().__new__(cls, names)
        self.storage, self.update = storage, update
        self.keeps_dtype = keeps_dtype or storage == "int8" or update == "statistic"
        return self


def gathered_dtypes(axes: Any, compute_dtype: Any) -> Any:
    """Return the dtype in which a model receives each parameter, a tree like `axes`."""
    stored = lambda dims: jnp.dtype(dims.storage if dims.keeps_dtype else compute_dtype)
    return jax.tree.map(stored, axes)


GATHERS = ("gather_weight", "gather_rounded")
"""Functions with a custom derivative that make a parameter ready for use: gathered, and cast."""


def is_gather(primitive: Any, params: dict[str, Any]) -> bool:
    """Return whether an equation of a traced program calls one of `GATHERS`."""
    if primitive.name != "custom_vjp_call":
        return False
    return params["call_jaxpr"].jaxpr.debug_info.func_name in GATHERS


class CompositeWeight:
    """A weight that is stored in several arrays; subclasses are registered as pytrees.

    A model passes it to `Context.dot`, which calls `multiply`.
    """

    def multiply(
        self, dot: Callable[..., Array], dims: str, x: Array, *, out_dtype: Any = None
    ) -> Array:
        """Return the product [*dims after the arrow] of x [*first dims] and this weight [*second].

        `dot` multiplies arrays, and weights that are part of this one. See `types.dot`.
        """
        raise NotImplementedError

    def __getitem__(self, index: Any) -> CompositeWeight:
        """Return itself: Flax reads the value of a parameter as `param[...]`."""
        return self


def with_weights(dot: Callable[..., Array]) -> Callable[..., Array]:
    """Return a `Context.dot` of arrays [*dims], and of a `CompositeWeight`, by its `multiply`."""

    def multiply(dims: str, x: Array, w: Any, *, out_dtype: Any = None) -> Array:
        """Return the product [*dims after the arrow]; the arguments are those of `types.dot`."""
        if isinstance(w, CompositeWeight):
            return w.multiply(multiply, dims, x, out_dtype=out_dtype)
        return dot(dims, x, w, out_dtype=out_dtype)

    return multiply
