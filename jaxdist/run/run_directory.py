"""The run directory: where each file lies, who may write it, and how a run goes on in it."""

from __future__ import annotations

import logging
import os
import time
import tomllib
from collections.abc import Callable, Mapping
from typing import Any

from jaxdist.run.metrics_log import RecordWriter, decode, encode
from jaxdist.runtime import coordination
from jaxdist.runtime.storage import Location, locate, remove_empty
from jaxdist.settings import ConfigError

log = logging.getLogger("jaxdist")

START_SETTINGS = ("resume", "run_dir", "override", "replay", "simulate")
"""Settings that say how to start, and nothing about what is trained."""


class RunDirectory:
    """The files of one run. Only process 0 writes them, but for each process's log and arrays.

    Attributes:
        is_writer: this is process 0.
        resumed: a run was here before; it is continued, never split.
        audited_mesh: the mesh if this start ran the deep audit of a custom model, else "".
        objective: name of the objective that a Python program passed to this start, else "".
        config: the resolved config, as TOML.
        environment: versions, git, hosts, devices and command of the newest start; older ones
            inside it.
        metrics: one JSON object per line, see `metrics_log`.
        profiles: one directory per trace, where any was asked for.
        anomalies: one JSON line for each step whose loss was bad, with its rows; absent without.
        summary: what came of the run; written when it ends.
    """

    def __init__(self, path: str | os.PathLike[str], *, is_writer: bool, resumed: bool):
        self.path, self.is_writer, self.resumed = locate(path), is_writer, resumed
        self.audited_mesh = self.objective = ""
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
        """Make the directory, or go on in it; `path` is the same on every process (`new_run_path`).

        No file is changed. `discard` removes the directories that this has made.

        Raises:
            ConfigError: a run is there and `resume` is False; the path is a file or not writable.
            FileNotFoundError: it was there when the launcher started; made again, it would hide
                below a mount that was lost.
        """
        run = cls(path, is_writer=process_id == 0, resumed=False)
        launched = os.environ.get("JAXDIST_LOG_DIR")  # the launcher has made it
        if launched and locate(launched) == run.logs and not run.logs.is_directory():
            raise FileNotFoundError(f"{run.path} is gone: is its file system still mounted?")
        run.resumed = run.metrics.exists() and run.metrics.size() > 0
        holds_run = run.resumed or any(map(str.isdecimal, run.checkpoints.entries()))
        if holds_run and not resume and run.is_writer:
            raise ConfigError(
                f"run directory {run.path} already holds a run, and resuming is off. "
                "Use --resume auto to go on with it, or another --run-dir."
            )
        try:
            run._make(run.logs)
            if run.is_writer:
                run._make(run.checkpoints)
                if run.metrics.is_local and run.metrics.exists():  # elsewhere it adds an object
                    run.metrics.appender().close()  # fails now, not after the first compilation
        except OSError as error:
            run.discard()
            raise ConfigError(
                f"run directory {run.path} cannot be written ({error.strerror}). "
                "Name a directory that can with --run-dir."
            ) from error
        return run

    def _make(self, directory: Location) -> None:
        self._made = [*directory.missing(), *self._made]
        directory.make_directory()

    def discard(self) -> None:
        """Remove the directories that `open` has made, if they are empty."""
        remove_empty(self._made)

    @classmethod
    def existing(cls, path: str | os.PathLike[str]) -> RunDirectory:
        """A run to read.

        Raises:
            ConfigError: there is no run at `path`.
        """
        run = cls(path, is_writer=False, resumed=True)
        if not run.path.is_directory():
            raise ConfigError(f"run {run.path} is no directory. {_runs_near(run.path)}")
        if not run.metrics.exists():
            raise ConfigError(
                f"run {run.path} has no metrics.jsonl. {_runs_near(run.path / 'metrics.jsonl')}"
            )
        return run

    def log(self, process_id: int) -> Location:
        """The log of one process."""
        return self.logs / f"process-{process_id}.log"

    def write_config(self, text: str) -> list[str]:
        """Write config.toml; return what differs from the config that was there, one line each.

        How this start was asked for is no change of the run. Of a config.toml that
        is missing or damaged one line says that nothing can be compared.
        """
        if not self.is_writer:
            return []
        new, problem = flatten(tomllib.loads(text)), ""
        old = new
        if self.config.exists():
            try:
                old = flatten(tomllib.loads(self.config.text()))
            except ValueError as error:
                problem = f"not known, config.toml was damaged ({error}) and is written anew"
        elif self.resumed:
            problem = "not known, config.toml was missing and is written anew"
        self.config.write(text)
        if problem:
            return [problem]
        changed = changed_settings(old, new)
        return [f"{name}: {before} -> {now}" for name, (before, now) in changed.items()]

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
                    "%s was damaged (%s): what it said of earlier starts is lost",
                    self.environment,
                    error,
                )
        own = {"audited_mesh": self.audited_mesh, "objective": self.objective}
        own = {name: value for name, value in own.items() if value}
        record = {**record, **own, "earlier": earlier}
        self.environment.write(encode(record, indent=2) + "\n")

    def write_summary(self, record: Mapping[str, Any]) -> None:
        """Write summary.json; the newest end of the run is the one that counts."""
        if self.is_writer:
            self.summary.write(encode(record, indent=2) + "\n")

    def open_metrics(self, *, is_held: bool = False) -> RecordWriter:
        """Append to metrics.jsonl; for process 0 only."""
        if not self.is_writer:
            raise ValueError("only process 0 writes metrics.jsonl")
        return RecordWriter(self.metrics, is_held=is_held)


def new_run_path(name: str) -> Location:
    """`runs/<name>-<time>`, the same on every process: they agree on process 0's clock (UTC).

    Collective where there are several processes: each must call it, after joining the job.
    """
    seconds = coordination.gather("run_start", int(time.time()))[0]
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(seconds))
    return locate("runs") / f"{name}-{stamp}"


def changed_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Name -> (old, new value) of the dotted settings that differ, but for `START_SETTINGS`."""
    names = sorted((old.keys() | new.keys()) - {*START_SETTINGS})
    pairs = {name: (old.get(name, "not set"), new.get(name, "not set")) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys: {"model": {"d_model": 8}} -> {"model.d_model": 8}."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def read_table(path: Location, parse: Callable[[str], Any]) -> dict[str, Any]:
    """The table that a file of a run holds; {} where there is no file.

    Raises:
        ConfigError: it is damaged.
    """
    try:
        record = parse(path.text()) if path.exists() else {}
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read ({error}). Mend it, or move it away.") from error
    if not isinstance(record, dict):
        raise ConfigError(f"{path} holds no table of values. Mend it, or move it away.")
    return record


_ASKED = 30
"""Names of a bucket that are looked into for runs: each is two requests."""


def _runs_near(path: Location) -> str:
    """Names runs next to what was asked for: most wrong paths are one directory off."""
    for root in (path.parent, path.parent.parent):
        names = root.entries() if root.is_local else root.entries()[-_ASKED:]
        written = {root / name: (root / name / "metrics.jsonl").version() for name in names}
        runs = sorted((run for run in written if written[run]), key=lambda run: -written[run])
        if runs:
            return "Runs there: " + ", ".join(map(str, runs[:3])) + "."
    return "Name a run directory, such as runs/<name>-<time>."
