"""Turn panics of Rust libraries into errors with a message for the user."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from jaxdist.settings.declare import ConfigError


@contextlib.contextmanager
def panics_as(problem: str, *also: type[Exception]) -> Iterator[None]:
    """Raise `ConfigError` for a panic, or for an error of the types `also`.

    `{}` in `problem` is replaced by the error's first line. A panic derives from `BaseException`.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException" and not isinstance(error, also):
            raise
        cause = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise ConfigError(problem.replace("{}", cause)) from None
