"""Check refusals by the facts they name: a setting, a file, the actual and the allowed value."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxdist.settings import ConfigError


@contextlib.contextmanager
def refused(
    *facts: object, error: type[Exception] = ConfigError, num_problems: int = 1
) -> Iterator[pytest.ExceptionInfo]:
    """Expect `error` with this many problems that name all `facts`."""
    with pytest.raises(error) as caught:
        yield caught
    problems = getattr(caught.value, "problems", [str(caught.value)])
    assert len(problems) == num_problems, problems
    assert not (absent := missing(str(caught.value), *facts)), (absent, problems)


def snapshot(directory: Path) -> dict[str, bytes | None]:
    """Return path -> content of each file, None for a directory."""
    paths = sorted(directory.rglob("*"))
    return {str(p.relative_to(directory)): None if p.is_dir() else p.read_bytes() for p in paths}


def missing(text: str, *facts: object) -> list[str]:
    """Return the items of `facts` that `text` does not name."""
    return [fact for fact in map(str, facts) if fact not in text]
