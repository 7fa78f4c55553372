"""Panics of libraries written in Rust, as errors that end with a message for the user."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jaxdist.core.settings.declare import ConfigError


@contextlib.contextmanager
def panics_as(problem: str) -> Iterator[None]:
    """Raise `ConfigError` if a library panics; `{}` in `problem` stands for the panic's first line.

    A `PanicException` derives from `BaseException` alone, so that `except Exception` misses it.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        cause = (str(error).splitlines() or [""])[0][:200]
        raise ConfigError(problem.replace("{}", cause)) from None
