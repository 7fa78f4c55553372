"""Start jobs and restart them after failures: on this host, or through a scheduler.

The launcher imports no jax: it holds no device and starts within a second. `membership.read_sizes`
and `fork_server` start child processes that do.
"""

import contextlib
import sys
from collections.abc import Sequence

from jaxdist.settings import value_of


def log(text: str) -> None:
    """Write one line to stderr, after the launcher's name."""
    write(f"launch: {text}")


def write(text: str) -> None:
    """Write a text to stderr; a full disk or a closed terminal must not end the job."""
    with contextlib.suppress(OSError):
        print(f"{text}\n", end="", file=sys.stderr, flush=True)


def run_of(arguments: Sequence[str]) -> str:
    """Return the run directory that arguments of `jaxdist.train` name; "" = a new one."""
    resume = value_of(arguments, "resume") or "auto"
    return value_of(arguments, "run_dir") or "" if resume in ("auto", "never") else resume
