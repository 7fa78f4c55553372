"""jaxdist: train models on many NVIDIA GPUs with JAX and Flax, one compiled step on a named mesh.

    run = jaxdist.train("llama3_8b", mesh="fsdp=8")
    run = jaxdist.open("runs/NAME")
    plans = jaxdist.plan("h100:8", "llama3_8b")

The Python API is described in `docs/python.md`. Importing the package does not start a device or
import a heavy library. Each command is `python -m jaxdist.<name>`.
"""

import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

if sys.version_info < (3, 11):  # noqa: UP036 - a checkout also runs without pip's check
    raise SystemExit("jaxdist requires Python 3.11 or newer")

if TYPE_CHECKING:
    from jaxdist.api import Run, open, plan, train
    from jaxdist.settings.declare import ConfigError

__version__ = "0.1.0"
__all__ = ["ConfigError", "Run", "open", "plan", "train"]

# `python -m jaxdist.launch` runs the command in tools/; code imports jaxdist.tools.launch.
__path__.append(str(Path(__file__).parent / "tools"))

_CALLED = ("train", "plan")
"""Command modules that can also be called like functions: `jaxdist.train(...)`."""


class _CalledModule(types.ModuleType):
    """A command module; calling it calls the function with the same name in `jaxdist.api`."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.__wrapped__(*args, **options)

    @property
    def __wrapped__(self) -> Any:  # use the function's signature
        from jaxdist import api

        return getattr(api, self.__name__.rpartition(".")[2])

    @property
    def __doc__(self) -> str:  # type: ignore[override]  # of the function: `help(jaxdist.train)`
        import inspect

        function = self.__wrapped__
        return f"{function.__name__}{inspect.signature(function)}\n\n{inspect.getdoc(function)}"


class _Package(types.ModuleType):
    """The package. Its submodules in `_CALLED` can be called once they are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _CALLED and type(value) is types.ModuleType:
            value.__class__ = _CalledModule
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    """Import a public name at its first use."""
    import importlib

    if name in _CALLED:
        return importlib.import_module(f"jaxdist.{name}")
    if name == "ConfigError":
        from jaxdist.settings.declare import ConfigError

        return ConfigError
    if name in __all__:
        from jaxdist import api

        return getattr(api, name)
    raise AttributeError(f"module 'jaxdist' has no attribute {name!r}")
