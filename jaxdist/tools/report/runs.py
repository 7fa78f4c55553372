"""Read a run from its directory, also while it runs or after it was killed."""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxdist.checkpoint import manifest
from jaxdist.hardware import gpu_of
from jaxdist.run.metrics_log import Record, decode, device_seconds, stream_records
from jaxdist.run.run_directory import RunDirectory, flatten, read_table
from jaxdist.runtime.storage import Location
from jaxdist.settings import ConfigError

MAX_RECORDS = 4096
"""With more train records than this, a run is thinned, see `stream_records`."""

_COUNTED = {"skipped_steps": "skipped_step", "recompilations": "recompile", "warnings": "*"}
"""Row of the table -> event to count; * = every event of level warning or above."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportedRun:
    """A run and its outcome; unknown values are None.

    `config` is dotted setting -> value, from the newest checkpoint or config.toml. `train` and
    `evals` lack steps that a resume discarded; `train` is thinned, see `MAX_RECORDS`. `restarts`
    are steps at which the run was restarted. `outcome` is field of `--json` -> value.
    """

    name: str
    path: Location
    config: dict[str, Any]
    train: list[Record]
    evals: list[Record]
    restarts: list[int]
    unit: str
    outcome: dict[str, Any]

    def record(self) -> dict[str, Any]:
        """Return the fields that `--json` prints."""
        return {"name": self.name, "path": self.path, "unit": self.unit, **self.outcome}


def read_runs(paths: Sequence[str]) -> list[ReportedRun]:
    """Return the runs of these directories; raise ConfigError with all that cannot be read."""
    problems = [
        f"run {path} is listed twice. List each run once."
        for i, path in enumerate(paths)
        if Path(path).resolve() in {Path(other).resolve() for other in paths[:i]}
    ]
    runs: list[ReportedRun] = []
    for path, name in zip(paths, _short_names(paths), strict=True):
        try:
            runs.append(read_run(path, name))
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return runs


def read_run(path: str, name: str) -> ReportedRun:
    """Return the run of a directory; `name` is its label in the report."""
    directory = RunDirectory.existing(path)
    train: list[Record] = []
    evals: list[Record] = []
    events: list[Record] = []
    counts: collections.Counter[str] = collections.Counter()
    seconds = device_seconds(_sorted(directory.metrics, train, evals, events, counts))
    starts = [r for r in events if r["event"] == "start"]
    unit = str(starts[-1].get("unit", "tokens")) if starts else "tokens"
    text = manifest.stored_config(directory.checkpoints)
    config = flatten(tomllib.loads(text) if text else read_table(directory.config, tomllib.loads))
    environment = read_table(directory.environment, decode)
    device_kind = environment.get("devices", {}).get("kind", "")
    facts = {"device_kind": environment.get("devices", {}).get("kind")}
    git = (environment.get("git") or [{}])[0]
    if git.get("commit"):
        facts["commit"] = git["commit"][:9] + (" dirty" if git.get("dirty") else "")
    return ReportedRun(
        name=name,
        path=directory.path,
        config=config,
        train=train,
        evals=evals,
        restarts=[start.get("step", 0) for start in starts[1:]],
        unit=unit,
        outcome=_outcome(events, train, evals, unit, device_kind, seconds / 3600)
        | {name: counts[event] for name, event in _COUNTED.items()}
        | facts,
    )


def _sorted(
    metrics: Location,
    train: list[Record],
    evals: list[Record],
    events: list[Record],
    counts: collections.Counter[str],
) -> Iterator[Record]:
    """Yield all records; append those that the report shows to the lists.

    `counts` receives the number of events by name, and of warnings as "*".
    """
    for record, is_current in stream_records(metrics, max_train=MAX_RECORDS):
        if record["kind"] != "event":
            kept = train if record["kind"] == "train" else evals
            kept += [record] * is_current
        else:
            counts[str(record.get("event"))] += is_current
            counts["*"] += is_current and "level" in record
            events += [record] * (record.get("event") in ("start", "run", "end"))
        yield record


def _outcome(
    events: list[Record],
    train: list[Record],
    evals: list[Record],
    unit: str,
    device_kind: str,
    device_hours: float,
) -> dict[str, Any]:
    starts = [r for r in events if r["event"] == "start"]
    facts = [r for r in events if r["event"] == "run"]
    rated = [r for r in evals if math.isfinite(r.get("loss", math.nan))]
    best = min(rated, key=lambda r: r["loss"]) if rated else {}
    first = {start.get("step", 0) + 1 for start in starts}
    steady = [record for record in train if record["step"] not in first]
    gpu = gpu_of(device_kind)
    return {
        "exit_reason": _exit_reason(events),
        "step": train[-1]["step"] if train else None,
        "total_steps": starts[-1].get("total_steps") if starts else None,
        "train_loss": train[-1].get("loss") if train else None,
        "eval_loss": evals[-1].get("loss") if evals else None,
        "eval_bits_per_byte": evals[-1].get("bits_per_byte") if evals else None,
        "eval_losses": set_losses(evals[-1:]),
        "best_eval_loss": best.get("loss"),
        "best_eval_step": best.get("step"),
        "units": train[-1].get(unit) if train else None,
        "units_per_s": _median(steady, f"{unit}_per_s"),
        "units_per_s_per_device": _median(steady, f"{unit}_per_s_per_device"),
        "step_time_s": _median(steady, "step_time_s"),
        "mfu": _median(steady, "mfu"),
        "mfu_convention": facts[-1].get("mfu_convention") if facts else None,
        "memory_peak_bytes": max((r.get("memory_peak_bytes", 0) for r in train), default=0) or None,
        "num_devices": starts[-1].get("num_devices") if starts else None,
        "starts": len(starts),
        "device_hours": device_hours,
        "cost": device_hours * gpu.price_per_hour if gpu else None,
    }


def set_losses(evals: Sequence[Record]) -> dict[str, float]:
    """Return name of an evaluation set -> its newest loss in `evals`."""
    return {
        name.removesuffix("/loss"): value
        for record in evals
        for name, value in record.items()
        if name.endswith("/loss")
    }


def _exit_reason(events: list[Record]) -> str:
    """Return how the newest start ended; "unfinished" if it still runs or was killed."""
    for record in reversed(events):
        if record.get("event") == "end":
            return str(record.get("exit_reason", "ended"))
        if record.get("event") == "start":
            break
    return "unfinished"


def _median(records: list[Record], key: str) -> float | None:
    values = [r[key] for r in records if isinstance(r.get(key), int | float)]
    return statistics.median(values) if values else None


def _short_names(paths: Sequence[str]) -> list[str]:
    resolved = [Path(path).resolve() for path in paths]
    for depth in range(1, max(len(path.parts) for path in resolved)):
        names = ["/".join(path.parts[-depth:]) for path in resolved]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in resolved]
