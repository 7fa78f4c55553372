"""Groups of parameters with a learning rate and weight decay of their own."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from typing import Any

import optax
from jax.tree_util import keystr, tree_leaves_with_path, tree_map_with_path

from jaxdist.core.types import Params
from jaxdist.optim.config import OptimConfig

_GROUP = re.compile(r"([^:]+)((?::(?:lr|weight_decay)=[0-9]*\.?[0-9]+(?:e-?[0-9]+)?)+)")


def group_problems(config: OptimConfig, axes: Params) -> list[str]:
    """Return the problems of `config.groups` for a model with these parameters."""
    names = [keystr(path, simple=True, separator="/") for path, _ in tree_leaves_with_path(axes)]
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
    """Make updates lr · (update + weight_decay · parameter), float32 leaves [...]; no state.

    `decays` has True for leaves with `config.weight_decay`. The first group that matches a leaf
    applies; its weight decay is also that of vectors.
    """

    def leaf(path: Any, decays: bool, update: Any, param: Any) -> Any:
        values = _values(config.groups, keystr(path, simple=True, separator="/"))
        decay = values.get("weight_decay", config.weight_decay if decays else 0.0)
        return values.get("lr", 1.0) * (update + decay * param if decay else update)

    def update(updates: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        return tree_map_with_path(leaf, decays, updates, params), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def rate_factor(config: OptimConfig, name: str) -> float:
    """Return the factor of the learning rate of a parameter, e.g. "layers/mlp/up"."""
    return _values(config.groups, name).get("lr", 1.0)


def _values(groups: Sequence[str], name: str) -> dict[str, float]:
    """Return `lr` and `weight_decay` of the first group that matches a parameter or its folder."""
    for text in groups:
        pattern, *values = text.split(":")
        if any(fnmatch.fnmatchcase(name, end) for end in (pattern, f"{pattern}/*")):
            return {key: float(x) for key, x in (value.split("=") for value in values)}
    return {}
