"""TensorBoard files through tensorboardX, which is imported only if a run writes them.

Its `SummaryWriter` passes events to a thread, and its `flush` does not wait for that thread: a kill
right after a flush loses the newest events (measured: one in 25 steps). The lower-level
`EventsWriter`, which is used here, writes synchronously.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxdist.runtime.storage import Mirror, locate, mirror

logger = logging.getLogger("jaxdist")

_MIRRORED_BYTES = 1 << 20
"""Maximum size of a file on an object store, where each flush uploads the complete file."""


class TensorBoard:
    """Writes scalars and text of a run synchronously. A resumed run adds a file.

    TensorBoard hides points of earlier starts from `first_step` on.
    """

    def __init__(self, path: str | os.PathLike[str], first_step: int | None = None):
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import SessionLog

        self._path = locate(path)
        self._path.make_directory()
        self._new_writer = EventsWriter
        self._has_warned = False
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        if not self._path.is_local:
            self._scratch = tempfile.TemporaryDirectory(prefix="jaxdist-tensorboard-")
        self._open()
        if first_step is not None:
            self._write(first_step, session_log=SessionLog(status=SessionLog.START))
        self._safely(self._writer.flush)

    def text(self, tag: str, text: str) -> None:
        """Write a text, displayed unformatted."""
        from tensorboardX.summary import text as summary_of

        indented = "\n".join("    " + line for line in text.splitlines())  # Markdown for code
        self._write(0, summary=summary_of(tag, indented))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write one point for each tag in one event; non-numeric values are omitted."""
        from tensorboardX.proto.summary_pb2 import Summary

        points = [
            Summary.Value(tag=tag, simple_value=float(value))
            for tag, value in values.items()
            if isinstance(value, int | float)
        ]
        self._write(step, summary=Summary(value=points))

    def close(self) -> None:
        """Flush and close."""
        self._safely(self._writer.close)
        if self._mirror is not None:
            self._safely(self._mirror.close)
        if self._scratch is not None:
            self._scratch.cleanup()

    def _open(self) -> None:
        """Start a file.

        TensorBoard reads files in the order of their names, which contain seconds. The nanoseconds
        in the suffix keep a quick restart from overwriting the previous file.
        """
        suffix = f".{time.time_ns() % 10**9:09d}"
        folder = self._scratch.name if self._scratch else str(self._path)
        self._writer = self._new_writer(f"{folder}/events", suffix)
        self._written = 0
        self._mirror: Mirror | None = None
        if self._scratch is not None:
            name = next(n for n in locate(folder).entries() if n.endswith(suffix))
            self._mirror = mirror(Path(folder) / name, self._path / name)

    def _safely(self, write: Callable[[], Any]) -> None:
        """Ignore a full disk: metrics.jsonl has the points that are missing here."""
        try:
            write()
        except OSError as failure:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "%s cannot be written (%s): TensorBoard misses points meanwhile; "
                    "metrics.jsonl has them",
                    self._path,
                    failure.strerror,
                )

    def _write(self, step: int, **content: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        event = Event(wall_time=time.time(), step=step, **content)
        self._safely(lambda: (self._writer.write_event(event), self._writer.flush()))
        self._written += event.ByteSize()
        if self._mirror is not None and self._written > _MIRRORED_BYTES:
            self._safely(self._writer.close)
            self._safely(self._mirror.close)
            self._open()
