"""Map the leaves of a state to names and back, so that checkpoints do not depend on classes.

A state (a dict or dataclass with `params`, `copies`, `opt_state` and others) becomes nested
plain dicts in the items of `ITEMS`. Tuples of an optimizer become dicts by index or field, typed
PRNG keys their uint32 data. The structure of the restore target reverses this.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from jaxdist.core.types import Array
from jaxdist.core.weights import GROUPS
from jaxdist.settings import ConfigError

ITEMS = (*(group.item for group in GROUPS.values()), "opt_state", "rest")
"""Parts of a checkpoint that can be read separately."""

OPTIONAL = tuple(group.item for name, group in GROUPS.items() if name != "model")
"""Parts that a run or a checkpoint may lack."""

Weights: TypeAlias = Literal["auto", "ema", "raw"]
"""Weights as trained (raw), their moving average (ema); auto = the average if one is stored."""


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of a state: its item (of `ITEMS`), its keys in the item, and its array or shape."""

    item: str
    path: tuple[str, ...]
    value: Any

    @property
    def name(self) -> str:
        """Name in the checkpoint, e.g. `params/layers/attention/q`."""
        return "/".join((self.item, *self.path))

    @property
    def is_key(self) -> bool:
        """Return whether this is a typed PRNG key or an array of them."""
        return jnp.issubdtype(self.value.dtype, jax.dtypes.prng_key)

    @property
    def num_bytes(self) -> int:
        """Bytes of the global array, without copies on several devices."""
        return math.prod(self.value.shape) * self.value.dtype.itemsize


def leaves_of(state: Any) -> list[Leaf]:
    """Return the leaves of a state of arrays or `jax.ShapeDtypeStruct`s, in `jax.tree` order."""
    leaves = []
    for path, value in jax.tree_util.tree_flatten_with_path(state)[0]:
        keys = tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
        if keys[:1] == ("copies",):
            keys = (GROUPS[keys[1]].item, *keys[2:])
        item = keys[0] if keys and keys[0] in ITEMS else "rest"
        inner = keys[1:] if keys and keys[0] in ITEMS else keys
        leaf = Leaf(item, inner or ("value",), value)
        if not (hasattr(value, "shape") and hasattr(value, "sharding")):
            raise TypeError(f"{leaf.name} is {type(value).__name__}: a state holds jax.Arrays only")
        leaves.append(leaf)
    # Orbax joins keys with dots, so "a.b" and ("a", "b") would be one array on disk.
    dotted = [".".join((leaf.item, *leaf.path)) for leaf in leaves]
    twice = sorted(name for name, count in collections.Counter(dotted).items() if count > 1)
    if twice:
        raise TypeError(f"two leaves of the state share the name {', '.join(twice)}")
    return leaves


def nest(leaves: Sequence[Leaf], values: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Return item -> nested dicts with `values` (arrays or their shapes) as leaves."""
    items: dict[str, dict[str, Any]] = {}
    for leaf, value in zip(leaves, values, strict=True):
        inner = items.setdefault(leaf.item, {})
        for key in leaf.path[:-1]:
            inner = inner.setdefault(key, {})
        inner[leaf.path[-1]] = value
    return items


def pick(items: dict[str, dict[str, Any]], leaf: Leaf) -> Any:
    """Return the value of a leaf in the result of `nest`."""
    inner: Any = items[leaf.item]
    for key in leaf.path:
        inner = inner[key]
    return inner


def plain(leaf: Leaf) -> Array:
    """Return the array to write: the leaf [...] itself or, for a PRNG key, uint32 [..., words]."""
    return jax.random.key_data(leaf.value) if leaf.is_key else leaf.value


def describe(leaves: Sequence[Leaf], arrays: Sequence[Array]) -> dict[str, dict[str, Any]]:
    """Return name -> shape, dtype, path (and kind of PRNG key) of `plain` arrays [...], as JSON."""
    described = {}
    for leaf, array in zip(leaves, arrays, strict=True):
        entry = {
            "shape": list(array.shape),
            "dtype": array.dtype.name,
            "path": list(leaf.path),  # keys may contain slashes
        }
        if leaf.is_key:
            entry["key"] = str(jax.random.key_impl(leaf.value))
        described[leaf.name] = entry
    return described


def with_checksums(
    described: dict[str, dict[str, Any]], checksums: Sequence[int]
) -> dict[str, dict[str, Any]]:
    """Return the result of `describe` with the checksum of each array added."""
    pairs = zip(described.items(), checksums, strict=True)
    return {name: {**entry, "checksum": checksum} for (name, entry), checksum in pairs}


def mismatches(
    leaves: Sequence[Leaf], stored: dict[str, dict[str, Any]], *, ignore: Collection[str] = ()
) -> list[str]:
    """Return an error per missing, differing or (unless `under` a name in `ignore`) extra leaf."""
    lines = []
    names = {leaf.name for leaf in leaves}
    for leaf in leaves:
        entry = stored.get(leaf.name)
        if entry is None:
            lines.append(f"{leaf.name} {list(leaf.value.shape)} is not in the checkpoint. {_FIX}")
        elif leaf.is_key != ("key" in entry):
            lines.append(
                f"{leaf.name} is a PRNG key only in the checkpoint, or only here. Use the config "
                "that wrote it."
            )
        elif (want := list(leaf.value.shape)) != (have := _shape(entry)):
            lines.append(f"{leaf.name} is {have} in the checkpoint and {want} here. {_FIX}")
    lines += [
        f"{name} {_shape(entry)} is in the checkpoint but not in the state here. {_FIX}"
        for name, entry in stored.items()
        if name not in names and not under(name, ignore)
    ]
    return lines


_FIX = (
    "Use the model and optimizer that wrote it, or start a new run with init_from, and name it in "
    "reinit_params."
)


def under(name: str, prefixes: Collection[str]) -> bool:
    """Return whether a leaf's name equals one of `prefixes` or is below it in the tree."""
    return any(name == prefix or name.startswith(prefix.rstrip("/") + "/") for prefix in prefixes)


def in_params(names: Collection[str], item: str = "params") -> list[str]:
    """Return `item/NAME` for each parameter; `names` may have a leading `params/`."""
    bare = [
        name.removeprefix("params").removeprefix("/") if under(name, ["params"]) else name
        for name in names
    ]
    return [f"{item}/{name}" if name else item for name in bare]


def weights_item(weights: Weights, names: Collection[str]) -> str:
    """Return the item that has the requested weights; raises `ConfigError` if it is missing."""
    stored = stored_copies(names)
    if weights in GROUPS and weights not in stored:
        flag = GROUPS[weights].setting.replace("_", "-")
        raise ConfigError(
            f"weights={weights}: the checkpoint holds no {weights} of its weights. Use --weights "
            f"raw, or train with --{flag}."
        )
    averages = [name for name in stored if GROUPS[name].is_average]
    chosen = next(iter(averages), "model") if weights == "auto" else weights
    return GROUPS[chosen.replace("raw", "model")].item


def stored_copies(names: Collection[str]) -> list[str]:
    """Return the groups besides the model's, e.g. "ema", whose arrays are among `names`."""
    return [
        name
        for name, group in GROUPS.items()
        if group.item in OPTIONAL and any(under(one, [group.item]) for one in names)
    ]


def split_stored(target: Any, item: str, names: Collection[str]) -> tuple[Any, Any]:
    """Return the parameters [...] to read from `item`, and others that only `params` has.

    Both are trees like `target`, with None at the leaves of the other. `names` are the names of a
    checkpoint's arrays.
    """
    model = GROUPS["model"].item

    def is_own(path: Any) -> bool:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return f"{item}/{name}" in names or f"{model}/{name}" not in names

    select = lambda own: jax.tree_util.tree_map_with_path(
        lambda path, x: x if is_own(path) == own else None, target
    )
    return select(True), select(False)


def target_of(leaf: Leaf, entry: dict[str, Any]) -> jax.ShapeDtypeStruct:
    """Return a leaf's stored shape and dtype with its requested sharding."""
    dtype = jnp.dtype(entry["dtype"])
    return jax.ShapeDtypeStruct(tuple(entry["shape"]), dtype, sharding=leaf.value.sharding)


def restored(leaf: Leaf, array: Array, entry: dict[str, Any]) -> Array:
    """Return a leaf [...] from the stored array, in the leaf's dtype and on its sharding.

    A cast deletes `array`. A PRNG key is built from uint32 data [..., words of a key].
    """
    dtype, sharding = leaf.value.dtype, leaf.value.sharding
    if not leaf.is_key:
        if array.dtype == dtype:
            return array
        cast = jax.jit(lambda x: x.astype(dtype), out_shardings=sharding)(array)
        array.delete()  # leaf by leaf: both dtypes of all leaves never coexist
        return cast
    wrap = lambda data: jax.random.wrap_key_data(data, impl=entry["key"])
    key = jax.jit(wrap, out_shardings=sharding)(array)
    if key.dtype != dtype:
        raise ConfigError(
            f"{leaf.name} is a {entry['key']} key in the checkpoint and {leaf.value.dtype} "
            "here. Set jax_default_prng_impl to the one that wrote it."
        )
    return key


def _shape(entry: dict[str, Any]) -> list[int]:
    # Key data has one more dim than the key.
    return entry["shape"][:-1] if "key" in entry else entry["shape"]
