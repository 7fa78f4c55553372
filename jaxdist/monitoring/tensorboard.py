"""TensorBoard files through tensorboardX, which is imported only when a run writes them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from jaxdist.types import ConfigError


class TensorBoard:
    """Scalars and text of a run.

    Args:
        path: directory of the event files; a resumed run adds a file beside the earlier ones.
        first_step: on resume, the first step that will be written: points from there on that an
            earlier start wrote are purged (TensorBoard hides them). None for a fresh run.
    """

    def __init__(self, path: Path, first_step: int | None = None):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                [
                    "monitoring.tensorboard=true needs the package tensorboardX. "
                    "Install it with `pip install tensorboardX`, or set "
                    "--monitoring.tensorboard=false."
                ]
            ) from error
        # It would print a line for each NaN it draws; the monitor reports those steps itself.
        logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)
        self._writer = SummaryWriter(str(path), purge_step=first_step)

    def text(self, tag: str, text: str) -> None:
        """A text, shown unformatted."""
        self._writer.add_text(tag, "\n".join("    " + line for line in text.splitlines()), 0)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One point for each tag. Flushed: an event still in memory would die with the process."""
        for tag, value in values.items():
            self._writer.add_scalar(tag, float(value), step)
        self._writer.flush()

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()
