"""What a Python program that calls `jaxdist.train` gives and no setting can name."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

from jaxdist.core.types import Model, Objective
from jaxdist.run.metrics_log import Record
from jaxdist.run.run_directory import RunDirectory
from jaxdist.runtime import setup_logging
from jaxdist.runtime.storage import Location


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A program's objects and functions; a command has none of them.

    Attributes:
        model: the length of a row -> the model, in place of the one that `model.factory` names.
        objective: in place of that of the model.
        rows: in place of what the function in `data.sources` returns, or that function.
        on_start: called with the run directory, on every process, before anything is compiled.
        on_record: called with each train and eval record, on every process.
        console_level: lowest level of the log lines on the console.
        owns_stdout: the process is the command's own, and what C code prints may go to its log.
    """

    model: Callable[[int], Model] | None = None
    objective: Objective | None = None
    rows: Any = None
    on_start: Callable[[RunDirectory], None] = lambda run: None
    on_record: Callable[[Record], None] = lambda record: None
    console_level: int = logging.INFO
    owns_stdout: bool = True

    def setup_logging(self, process_id: int, log_file: Location | None = None) -> None:
        """As `runtime.setup_logging`, in the program's way."""
        setup_logging(
            process_id,
            log_file,
            console_level=self.console_level,
            owns_stdout=self.owns_stdout,
        )
