"""Reject models in which a value differs between devices that must have the same value."""

from __future__ import annotations

import contextlib
import inspect
import re
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxdist.core import collectives
from jaxdist.core.parallel.tensor import TENSOR
from jaxdist.core.types import Model
from jaxdist.settings import ConfigError

OWN = str(Path(__file__).parents[2])
"""Directory of the package."""

JAX = (str(Path(jax.__file__).parent), str(Path(jax.__file__).parent.parent / "flax"))
"""Directories of jax and flax."""

_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


def check_equal(value: Any, axes: set[str], name: str) -> None:
    """Raise `ConfigError` if a tree of arrays [...] varies over an axis outside `axes`."""
    if extra := sorted(varying_axes(value) - axes):
        raise ConfigError(
            f"omitted sum over {', '.join(extra)}: {name} with a different "
            f"value on each device of the axis. {_fix(extra)}"
        )


def varying_axes(tree: Any) -> set[str]:
    """Return the mesh axes over which any array [...] of the tree varies."""
    return {axis for leaf in jax.tree.leaves(tree) for axis in collectives.varying_axes(leaf)}


@contextlib.contextmanager
def explain_types(model: Model, axes: Sequence[str]) -> Iterator[None]:
    """In this block, convert jax's errors about values that vary over an axis to `ConfigError`s."""
    try:
        yield
    except ConfigError:
        raise
    except NotImplementedError as error:
        if not re.search(r"Differentiation rule for '(pmax|pmin)'", str(error)):
            raise
        raise ConfigError(
            f"omitted sum{_location(error.__cause__, model)}: the largest or smallest value of the "
            f"devices of an axis has no gradient. {_fix([TENSOR.name])} A value that needs no "
            "gradient goes through jax.lax.stop_gradient first."
        ) from error
    except (TypeError, ValueError) as error:
        if not (differing := _differing(str(error), axes)):
            raise
        kind = "omitted sum" if TENSOR.name in differing else "unequal values"
        raise ConfigError(
            f"{kind} over {', '.join(differing)}{_location(error, model)}: a value is equal on all "
            "devices of the axis at the start of a loop, in one branch or in the forward pass. At "
            "its end, in another branch or in the backward pass it differs between them. "
            f"{_fix(differing)}"
        ) from error


def _location(error: BaseException | None, model: Model) -> str:
    frames = traceback.extract_tb(error.__traceback__) if error else []
    users = [frame for frame in frames if _is_users(frame.filename)]
    if not users:
        return f" in {definition_of(model)} or in a function that they call"
    return f" at {users[-1].filename}:{users[-1].lineno} `{users[-1].line}`"


def _fix(axes: Sequence[str]) -> str:
    if TENSOR.name in axes:
        return (
            "Sum each product of split weights over the axis (Context.leave, Context.sum). "
            "Use Context.enter before such a product."
        )
    return (
        "Each device has its own rows. Start a loop from a value that varies as they do "
        "(collectives.zeros_like(x), collectives.vary), or sum over the rows of all devices "
        '(Context.sum(x, "batch")).'
    )


def _differing(message: str, axes: Sequence[str]) -> list[str]:
    """Return the axes over which only one of the two types in jax's message varies."""
    types = re.findall(r"type \w+\[[^\]]*\](?:\{V:\(?([\w, ]*)\)?\})?", message)
    varying = [set(re.findall(r"\w+", axes)) for axes in types]
    pairs = zip(varying[::2], varying[1::2], strict=False)
    differing = set().union(*(left ^ right for left, right in pairs))
    return [axis for axis in axes if axis in differing]


def _is_users(file: str) -> bool:
    in_python = file.startswith(_STANDARD_LIBRARY) and "site-packages" not in file
    return not (file.startswith((*JAX, OWN, "<@")) or in_python)


def definition_of(model: Model) -> str:
    """Return "Model.head at FILE:LINE or the objective at FILE:LINE", for an error message."""
    return f"Model.head{definition(model.head)} or the objective{definition(model.objective)}"


def definition(function: Any) -> str:
    """Return ` at file:line` of a function or callable object, or "" if it has no source line."""
    function = inspect.unwrap(getattr(function, "func", function))
    function = function if hasattr(function, "__code__") else type(function).__call__
    code = getattr(function, "__code__", None)
    return f" at {code.co_filename}:{code.co_firstlineno}" if code else ""
