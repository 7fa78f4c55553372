"""Check refusals by the facts they name: a setting, a file, the actual and the allowed value."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxdist import runtime
from jaxdist.settings import ConfigError


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch, tmp_path):
    """Fail a test whose command would join a job or change the devices."""

    def started(*_, **__):
        pytest.fail("the command went on although its settings are wrong")

    monkeypatch.setattr(runtime, "join", started)
    monkeypatch.setattr(runtime, "simulate", started)
    monkeypatch.chdir(tmp_path)
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


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
    paths = sorted(directory.rglob("*"))
    return {str(p.relative_to(directory)): None if p.is_dir() else p.read_bytes() for p in paths}


def missing(text: str, *facts: object) -> list[str]:
    return [fact for fact in map(str, facts) if fact not in text]
