"""Frozen parameters, and groups with a learning rate and weight decay of their own."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from typing import Any

import jax
import optax
from jax.tree_util import tree_leaves_with_path, tree_map_with_path

from jaxdist.core.types import Dims, Params
from jaxdist.core.weights import freeze
from jaxdist.optim.config import OptimConfig

_GROUP = re.compile(r"([^:]+)((?::(?:lr|weight_decay)=[0-9]*\.?[0-9]+(?:e-?[0-9]+)?)+)")


def group_problems(config: OptimConfig, axes: Params) -> list[str]:
    """Return error messages for `config.groups`, for a model with these parameters."""
    names = [_name(path) for path, _ in tree_leaves_with_path(axes)]
    problems = []
    for text in config.groups:
        if not _GROUP.fullmatch(text):
            problems.append(
                f"optim.groups has {text!r}, not PATTERN:lr=X:weight_decay=Y. Use e.g. "
                "embed:lr=0.1 or */bias:lr=2:weight_decay=0."
            )
        elif not any(_values([text], name) for name in names):
            problems.append(
                f"optim.groups has {text!r}, which matches no parameter. The model has "
                f"{', '.join(names)}."
            )
    return problems


def scale_by_groups(config: OptimConfig, decays: Params) -> optax.GradientTransformation:
    """Make the rule that maps updates to factor · (update + weight_decay · parameter); no state.

    All are float32 leaves [...]. The first group that matches a leaf sets its factor (else 1), its
    weight decay (else `config.weight_decay` if `decays` is True, or 0), or both.
    """

    def leaf(path: Any, decays: bool, update: Any, param: Any) -> Any:
        values = _values(config.groups, _name(path))
        decay = values.get("weight_decay", config.weight_decay if decays else 0.0)
        return values.get("lr", 1.0) * (update + decay * param if decay else update)

    def update(updates: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        return tree_map_with_path(leaf, decays, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def rate_factor(config: OptimConfig, name: str) -> float:
    """Return the factor of the learning rate of a parameter, e.g. "layers/mlp/up"."""
    return _values(config.groups, name).get("lr", 1.0)


def _values(groups: Sequence[str], name: str) -> dict[str, float]:
    for text in groups:
        pattern, *values = text.split(":")
        if any(fnmatch.fnmatchcase(name, end) for end in (pattern, f"{pattern}/*")):
            return {key: float(x) for key, x in (value.split("=") for value in values)}
    return {}


def with_frozen(config: OptimConfig, axes: Params) -> Params:
    """Return `Model.axes` with the leaves named by `config.freeze` marked as frozen."""

    def leaf(path: Any, dims: Dims) -> Dims:
        return freeze(dims) if is_frozen(config, _name(path)) else dims

    return tree_map_with_path(leaf, axes)


def is_frozen(config: OptimConfig, name: str) -> bool:
    """Return True if `config.freeze` names this parameter, e.g. "layers/mlp/up"."""
    return any(_below(name, _plain(part)) for part in config.freeze)


def frozen_problems(config: OptimConfig, axes: Params) -> list[str]:
    """Return error messages for `config.freeze`, for a model with these parameters."""
    names = [_name(path) for path, _ in tree_leaves_with_path(axes)]
    parts = [_plain(part) for part in config.freeze]
    unknown = [part for part in parts if not any(_below(name, part) for name in names)]
    problems = [
        f"optim.freeze names {part!r}, and the model has no such part. It has {', '.join(names)}, "
        "and the folders above these."
        for part in unknown
    ]
    if all(is_frozen(config, name) for name in names):
        problems.append(f"optim.freeze={config.freeze} leaves nothing to train. Remove a part.")
    return problems


def _plain(part: str) -> str:
    return part.removeprefix("params/").rstrip("/")


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _below(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}/")
