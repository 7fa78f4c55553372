"""Is the run directory one directory for all processes? Each writes a token, all read all."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxdist.runtime.formatting.tables import few
from jaxdist.runtime.storage import Location, locate
from jaxdist.tools.doctor.findings import Finding, error, ok

_PATIENCE_S = 5.0
"""NFS shows a new file to other hosts when its cache of the directory has aged (3 s by default)."""


def token_path(directory: Path, nonce: str, process: int) -> Location:
    """Where a process leaves its token."""
    return locate(directory) / f".doctor-{nonce}-{process}"


def leave_token(directory: Path, nonce: str, process: int) -> str:
    """Write this process's token; returns why it could not, or ""."""
    try:
        token_path(directory, nonce, process).write(f"{nonce} {process}\n")
    except OSError as failure:
        return failure.strerror or str(failure)
    return ""


def read_tokens(
    directory: Path, nonce: str, writers: Sequence[int], patience_s: float = _PATIENCE_S
) -> list[int]:
    """The processes whose whole token is seen here; waits for those that are not yet."""
    until = time.monotonic() + patience_s
    while True:
        seen = [i for i in writers if _holds_token(directory, nonce, i)]
        if len(seen) == len(writers) or time.monotonic() > until:
            return seen
        time.sleep(0.1)


def _holds_token(directory: Path, nonce: str, process: int) -> bool:
    try:
        text = token_path(directory, nonce, process).text()
    except OSError:
        return False
    return text == f"{nonce} {process}\n"


def take_token(directory: Path, nonce: str, process: int) -> None:
    """Remove this process's token."""
    with contextlib.suppress(OSError):
        token_path(directory, nonce, process).delete()


def check_views(
    views: Mapping[int, Sequence[int]],
    hosts: Sequence[str],
    directory: Path,
    failed: Mapping[int, str],
) -> list[Finding]:
    """What all have seen.

    `views` maps a process to the processes whose token it has read, `failed` to why it could not
    write its own; `hosts` are by process id.
    """
    found = [
        error(
            "shared directory",
            f"process {i} on {hosts[i]} cannot write into {directory}: {why}",
            "give it the right to, or name another --run-dir that all hosts mount",
        )
        for i, why in failed.items()
    ]
    writers = [i for i in views if i not in failed]
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, seen in views.items():
        groups.setdefault(tuple(sorted(seen)), []).append(i)
    if set(groups) == {tuple(writers)}:
        good = ok("shared directory", f"{directory} is one directory for {len(views)} processes")
        return found or [good]
    shown = "; ".join(
        f"process {members[0]} on {hosts[members[0]]} sees files of {_count(seen, writers)}"
        for seen, members in list(groups.items())[:4]
    )
    split = error(
        "shared directory",
        f"{directory} is not one directory for all {len(views)} processes: {shown}",
        "name a --run-dir on a file system that every host mounts; checkpoints of a job are "
        "written by all processes into one directory",
        groups=list(groups.values()),
    )
    return [*found, split]


def _count(seen: Sequence[int], writers: Sequence[int]) -> str:
    names = few(list(map(str, seen)), 4)
    return f"{len(seen)} of {len(writers)} ({names})" if seen else "nobody"
