"""Objects that a Python program passes to `jaxdist.train`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jaxdist.core.types import Model, Objective
from jaxdist.run.metrics_log import Record
from jaxdist.run.run_directory import RunDirectory
from jaxdist.runtime import setup_logging
from jaxdist.runtime.storage import Location


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """Objects and functions of a Python program; a command uses the defaults.

    Attributes:
        model: seq_len -> the model; replaces the model of the settings.
        objective: replaces the objective of the model.
        optimizer: optax optimizer, whose updates are multiplied by the learning rate of `schedule`
            (1 without it).
        schedule: int32 step -> learning rate; replaces that of the settings.
        rows: the rows, or a function that returns them; replaces the function in `data.sources`.
        on_start: called with the run directory, on every process, before the step compiles.
        on_record: called with each train and eval record, and a function that returns the state,
            on every process.
        owns_stdout: the output of C code may be redirected to the log.
        has_bar: a progress bar shows steps and evaluations, so the console does not.
    """

    model: Callable[[int], Model] | None = None
    objective: Objective | None = None
    optimizer: Any = None
    schedule: Callable[[Any], Any] | None = None
    rows: Any = None
    on_start: Callable[[RunDirectory], None] = lambda run: None
    on_record: Callable[[Record, Callable[[], Any]], None] = lambda record, state: None
    owns_stdout: bool = True
    has_bar: bool = False

    @property
    def object_names(self) -> str:
        """Names of objective, optimizer and schedule, which a resume needs again; "" = none."""
        names = [_name_of(self.objective)] if self.objective is not None else []
        if self.optimizer is not None:
            names.append(f"optimizer {_name_of(self.optimizer.update)}")
        if self.schedule is not None:
            names.append(f"schedule {_name_of(self.schedule)}")
        return ", ".join(names)

    def setup_logging(self, process_id: int, log_file: Location | None = None) -> None:
        """Call `runtime.setup_logging` with the options of the program."""
        setup_logging(process_id, log_file, owns_stdout=self.owns_stdout, has_bar=self.has_bar)


def _name_of(value: Any) -> str:
    """Return module:name of an object or of its class."""
    named: Any = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}:{named.__qualname__}"
