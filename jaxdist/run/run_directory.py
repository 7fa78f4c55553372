"""The run directory: its files, their writers, and resuming in it."""

from __future__ import annotations

import logging
import os
import time
import tomllib
from collections.abc import Callable, Mapping
from typing import Any

from jaxdist.run.metrics_log import decode, encode
from jaxdist.runtime import coordination
from jaxdist.runtime.storage import Location, locate, remove_empty
from jaxdist.settings import ConfigError

log = logging.getLogger("jaxdist")

START_SETTINGS = ("resume", "run_dir", "override", "replay", "simulate")
"""Settings of a single start, which are not settings of the run."""

_NAME = "Name a run directory, such as runs/<name>-<time>."


class RunDirectory:
    """The files of one run. Process 0 writes them, each process its own logs, traces and arrays.

    `resumed`: the directory already contains a run. `audited_mesh`: the mesh if this start
    passed the deep audit, else "". `objective`: names of the objects that a Python program passed
    to this start, else "". `compiled`: see `Parts.compiled`; {} if not compiled to a budget.
    """

    def __init__(self, path: str | os.PathLike[str], *, is_writer: bool, resumed: bool):
        self.path, self.is_writer, self.resumed = locate(path), is_writer, resumed
        self.audited_mesh = self.objective = ""
        self.compiled: dict[str, Any] = {}
        self._made: list[Location] = []
        self.config = self.path / "config.toml"
        self.environment = self.path / "environment.json"
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.profiles = self.path / "profile"
        self.checkpoints = self.path / "checkpoints"
        self.logs = self.path / "logs"
        self.anomalies = self.path / "anomalies.jsonl"
        self.summary = self.path / "summary.json"

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, process_id: int = 0, resume: bool = True
    ) -> RunDirectory:
        """Return the directory, created if needed; change no file.

        Raise ConfigError if a run exists and `resume` is False, or if the path is a file or not
        writable. Raise FileNotFoundError if the directory existed when the launcher started but is
        missing now: its mount may be lost, so it is not created again.
        """
        run = cls(path, is_writer=process_id == 0, resumed=False)
        launched = os.environ.get("JAXDIST_LOG_DIR")  # created by the launcher
        if launched and locate(launched) == run.logs and not run.logs.is_directory():
            raise FileNotFoundError(f"{run.path} is gone: is its file system still mounted?")
        run.resumed = run.metrics.exists() and run.metrics.size() > 0
        holds_run = run.resumed or any(map(str.isdecimal, run.checkpoints.entries()))
        if holds_run and not resume and run.is_writer:
            raise ConfigError(
                f"run directory {run.path} already contains a run, and resume=never. "
                "Use --resume auto to continue it, or another --run-dir."
            )
        try:
            run._make(run.logs)
            if run.is_writer:
                run._make(run.checkpoints)
                if run.metrics.is_local and run.metrics.exists():  # a store would add an object
                    run.metrics.appender().close()  # fail now, not after the first compilation
        except OSError as error:
            run.discard()
            raise ConfigError(
                f"run directory {run.path} is not writable ({error.strerror}). "
                "Name a writable directory with --run-dir."
            ) from error
        return run

    def _make(self, directory: Location) -> None:
        self._made = [*directory.missing(), *self._made]
        directory.make_directory()

    def discard(self) -> None:
        """Remove the directories that `open` created, if they are empty."""
        remove_empty(self._made)

    @classmethod
    def existing(cls, path: str | os.PathLike[str]) -> RunDirectory:
        """Return the directory of an existing run, to read it; raise ConfigError without one."""
        run = cls(path, is_writer=False, resumed=True)
        if not run.path.is_directory():
            raise ConfigError(f"run {run.path} is not a directory. {_NAME}")
        if not run.metrics.exists():
            raise ConfigError(f"run {run.path} has no metrics.jsonl. {_NAME}")
        return run

    def log(self, process_id: int) -> Location:
        """Return the log file of a process."""
        return self.logs / f"process-{process_id}.log"

    def write_config(self, text: str) -> list[str]:
        """Write config.toml; return a line for each changed setting except `START_SETTINGS`.

        If the old file is damaged, or a resumed run has none, the only line reports that.
        Processes other than 0 write nothing and return [].
        """
        if not self.is_writer:
            return []
        new, problem = flatten(tomllib.loads(text)), ""
        old = new
        if self.config.exists():
            try:
                old = flatten(tomllib.loads(self.config.text()))
            except ValueError as error:
                problem = f"unknown, config.toml was damaged ({error}) and is rewritten"
        elif self.resumed:
            problem = "unknown, config.toml was missing and is rewritten"
        self.config.write(text)
        if problem:
            return [problem]
        changed = changed_settings(old, new)
        return [f"{name}: {before} -> {now}" for name, (before, now) in changed.items()]

    def starts(self) -> list[dict[str, Any]]:
        """Return the newest record of environment.json, then the earlier ones, the oldest first."""
        try:
            record = read_table(self.environment, decode)
        except ConfigError:
            return []
        return [record, *record.get("earlier", ())] if record else []

    def write_environment(self, record: Mapping[str, Any]) -> None:
        """Write environment.json, keeping the records of earlier starts under `earlier`."""
        if not self.is_writer:
            return
        earlier = []
        if self.environment.exists():
            try:
                before = decode(self.environment.text())
                earlier = [*before.pop("earlier", []), before]
            except (ValueError, AttributeError, TypeError) as error:
                log.warning(
                    "%s was damaged (%s): its records of earlier starts are lost",
                    self.environment,
                    error,
                )
        own = {
            "audited_mesh": self.audited_mesh, "objective": self.objective, "remat": self.compiled
        }  # fmt: skip
        own = {name: value for name, value in own.items() if value}
        record = {**record, **own, "earlier": earlier}
        self.environment.write(encode(record, indent=2) + "\n")

    def write_summary(self, record: Mapping[str, Any]) -> None:
        """Write summary.json, replacing the file of an earlier start."""
        if self.is_writer:
            self.summary.write(encode(record, indent=2) + "\n")


def new_run_path(name: str) -> Location:
    """Return `runs/<name>-<time>` (UTC), by the clock of process 0. Collective, after joining."""
    seconds = coordination.decide("run_start", lambda: int(time.time()))
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(seconds))
    return locate("runs") / f"{name}-{stamp}"


def changed_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return name -> (old, new value) of the settings that differ, except `START_SETTINGS`."""
    names = sorted((old.keys() | new.keys()) - {*START_SETTINGS})
    pairs = {name: (old.get(name, "not set"), new.get(name, "not set")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one, with dotted keys: {"model": {"d": 8}} -> {"model.d": 8}."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def read_table(path: Location, parse: Callable[[str], Any]) -> dict[str, Any]:
    """Return the table that `parse` reads from a file of a run; {} without a file."""
    try:
        record = parse(path.text()) if path.exists() else {}
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read ({error}). Fix it, or move it away.") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{path} is not a table of values. Fix it, or move it away.")
    return record
