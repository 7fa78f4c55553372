"""Start jobs and restart them after failures: on this host, or through a scheduler.

The launcher imports no jax: it holds no device and starts within a second. `membership.read_sizes`
and `fork_server` start child processes that do.
"""

import contextlib
import sys


def log(text: str) -> None:
    """Write one line to stderr, after the launcher's name."""
    write(f"launch: {text}")


def write(text: str) -> None:
    """Write a text to stderr; a full disk or a closed terminal must not end the job."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)
