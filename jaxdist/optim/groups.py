"""Groups of parameters with a learning rate and weight decay of their own."""

from __future__ import annotations

import fnmatch
import re
from typing import Any, NamedTuple

import jax
import optax

from jaxdist.core.types import Params
from jaxdist.optim.config import OptimConfig

_VALUE = re.compile(r"(lr|weight_decay)=([0-9]*\.?[0-9]+(?:e-?[0-9]+)?)")
_EXAMPLE = "Use e.g. embed:lr=0.1 or */bias:lr=2:weight_decay=0."


class OptimGroup(NamedTuple):
    """A name pattern, a factor of the learning rate, and a weight decay; None = unchanged."""

    pattern: str
    lr: float | None = None
    weight_decay: float | None = None

    def matches(self, name: str) -> bool:
        """Return True for a parameter, e.g. "layers/mlp/up", or for the parts below a folder."""
        return any(fnmatch.fnmatchcase(name, end) for end in (self.pattern, f"{self.pattern}/*"))


def group_problems(config: OptimConfig, axes: Params) -> list[str]:
    """Return the problems of `config.groups` for a model with these parameters."""
    groups, problems = [], []
    for text in config.groups:
        pattern, *values = text.split(":")
        if pattern and values and all(map(_VALUE.fullmatch, values)):
            groups.append(_parse(text))
        else:
            problems.append(
                f"optim.groups has {text!r}, not PATTERN:lr=X:weight_decay=Y. {_EXAMPLE}"
            )
    names = [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(axes)]
    return problems + [
        f"optim.groups has {group.pattern!r}, which matches no parameter. The model has "
        f"{', '.join(names)}."
        for group in groups
        if not any(map(group.matches, names))
    ]


def per_parameter(config: OptimConfig, decays: Params) -> tuple[Params, Params]:
    """Return trees like `decays` of learning-rate factors and weight decays, floats.

    `decays` has True for leaves with `config.weight_decay`. The first group that matches
    a leaf applies; its weight decay is also that of vectors.
    """
    groups = [_parse(text) for text in config.groups]

    def leaf(path: Any, decay: bool) -> tuple[float, float]:
        group = next((g for g in groups if g.matches(_name(path))), OptimGroup(""))
        usual = config.weight_decay if decay else 0.0
        return (
            1.0 if group.lr is None else group.lr,
            usual if group.weight_decay is None else group.weight_decay,
        )

    pairs = jax.tree_util.tree_map_with_path(leaf, decays)
    is_pair = lambda node: isinstance(node, tuple) and bool(node) and isinstance(node[0], float)
    lr, weight_decay = (
        jax.tree.map(lambda pair, i=i: pair[i], pairs, is_leaf=is_pair) for i in (0, 1)
    )
    return lr, weight_decay


def scale_by_groups(lr: Params, weight_decay: Params) -> optax.GradientTransformation:
    """Make updates lr · (update + weight_decay · parameter), float32 leaves [...]; no state."""

    def update(updates: Params, state: Any, params: Params | None = None) -> tuple[Params, Any]:
        scale = lambda u, p, factor, decay: factor * (u + decay * p if decay else u)
        return jax.tree.map(scale, updates, params, lr, weight_decay), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def _parse(text: str) -> OptimGroup:
    pattern, *values = text.split(":")
    pairs = (value.split("=") for value in values)
    return OptimGroup(pattern.removeprefix("params/"), **{key: float(x) for key, x in pairs})


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
