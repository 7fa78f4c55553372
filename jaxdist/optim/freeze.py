"""Parameters that training does not update."""

from __future__ import annotations

from typing import Any

import jax

from jaxdist.core.types import Dims, Params
from jaxdist.core.weights import freeze
from jaxdist.optim.config import OptimConfig


def with_frozen(config: OptimConfig, axes: Params) -> Params:
    """Return `Model.axes` with the leaves named by `config.freeze` marked as frozen."""
    if problems := frozen_problems(config, axes):
        raise ValueError(" ".join(problems))

    def leaf(path: Any, dims: Dims) -> Dims:
        return freeze(dims) if is_frozen(config, _name(path)) else dims

    return jax.tree_util.tree_map_with_path(leaf, axes)


def is_frozen(config: OptimConfig, name: str) -> bool:
    """Return True if `config.freeze` names this parameter, e.g. "layers/mlp/up"."""
    return any(_below(name, _plain(part)) for part in config.freeze)


def frozen_problems(config: OptimConfig, axes: Params) -> list[str]:
    """Return the problems of `config.freeze` for a model with these parameters."""
    names = [_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(axes)]
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
