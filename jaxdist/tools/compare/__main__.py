"""`python -m jaxdist.compare A B`: find the first difference between two runs that should be equal.

    python -m jaxdist.compare runs/A runs/B
    python -m jaxdist.compare runs/A runs/B --rerun false

It first reads both run directories: different settings and software, the first step with different
data rows, the first step with a different loss, gradient norm or learning rate, and the first
checkpoint with different arrays. Then it reruns the steps after the last equal checkpoint, each run
with its own settings but on one mesh, and compares digests of parameters, activations and gradients
of every layer. It reports the first step, layer and tensor that differ. If the reruns are equal, it
reports which run recorded other values. Nothing is written into a run directory.

Exit code: 0 if the runs are equal, 1 if they diverge, 2 if they cannot be compared.
"""

from __future__ import annotations

import dataclasses
import sys
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from jaxdist import runtime
from jaxdist.checkpoint import manifest
from jaxdist.checkpoint.streaming_io import StoredArrays
from jaxdist.config import settings_of_run
from jaxdist.core.mesh import MeshSpec
from jaxdist.run.metrics_log import Record, decode, stream_records
from jaxdist.run.replay import loss_and_norm
from jaxdist.run.run_directory import START_SETTINGS, RunDirectory, flatten, read_table
from jaxdist.run.setup import Parts, assemble
from jaxdist.settings import ConfigError, read_settings, setting
from jaxdist.tools.compare.rerun import RerunStep, rerun

_NUMBERS = ("loss", "grad_norm", "learning_rate")
"""Numbers of a step that must be bit-identical, in the order of their computation."""

_VERSIONS = ("python", "versions", "nvidia", "git", "devices", "settings")

_MAX_NAMES = 8
"""Maximum names of one kind to list before "and N more"."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """The two runs to compare, and how to rerun steps."""

    a: str = setting("", "directory of run A", required=True)
    b: str = setting("", "directory of run B", required=True)
    rerun: bool = setting(
        True, "rerun the steps up to the first difference; false = read files only"
    )
    mesh: str = setting("", "mesh of the rerun; empty = that of run A")
    simulate: int = setting(
        0,
        "simulated CPU devices; 0 = real ones, or as many as the rerun's mesh has if run A was "
        "simulated",
        ge=0,
    )
    max_steps: int = setting(200, "largest number of steps to rerun", ge=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Print how two runs differ; return 0 if metrics, data and checkpoints are equal, else 1."""
    config = read_settings(
        CompareConfig,
        sys.argv[1:] if argv is None else argv,
        command="jaxdist.compare",
        summary=__doc__ or "",
        positional=("a", "b"),
    )
    runs = RunDirectory.existing(config.a), RunDirectory.existing(config.b)
    divergence = read_divergence(*runs)
    print(f"a: {runs[0].path}\nb: {runs[1].path}")
    print("\n".join(describe(divergence)))
    if divergence.is_equal:
        return 0
    if config.rerun:
        print("\n".join(_rerun_lines(config, runs, divergence)))
    return 1


def describe(runs: Divergence) -> list[str]:
    """Return lines on differences between two runs, and on equal steps and checkpoints."""
    lines = []
    for title, changes in (("setting", runs.settings), ("software", runs.environment)):
        changed = [f"{title} {key}: {a} | {b}" for key, (a, b) in changes.items()]
        lines += changed[:_MAX_NAMES]
        lines += [f"and {len(changed) - _MAX_NAMES} more"] * (len(changed) > _MAX_NAMES)
    if runs.data_step is not None:
        lines.append(f"data: step {runs.data_step} is the first with different rows")
    if runs.step is None:
        lines.append(f"numbers: equal in all common steps, the last is {runs.last_common_step}")
    else:
        pairs = ", ".join(f"{name} {a!r} | {b!r}" for name, (a, b) in runs.numbers.items())
        lines.append(f"numbers: step {runs.step} is the first that differs: {pairs}")
    if runs.checkpoint is not None:
        few = ", ".join(runs.arrays[:_MAX_NAMES]) + " ..." * (len(runs.arrays) > _MAX_NAMES)
        lines.append(
            f"checkpoints: {len(runs.arrays)} of {runs.num_arrays} arrays differ at step "
            f"{runs.checkpoint}: {few} (see `jaxdist convert diff A B`)"
        )
    if runs.equal_checkpoints:
        lines.append(f"checkpoints: equal up to step {runs.equal_checkpoints[-1]}")
    return lines


def _rerun_lines(
    config: CompareConfig, runs: tuple[RunDirectory, RunDirectory], divergence: Divergence
) -> list[str]:
    start, last = divergence.rerun_from, divergence.last_to_rerun
    if last - start > config.max_steps:
        return [
            f"not rerun: steps {start + 1} to {last} are more than --max-steps "
            f"{config.max_steps}. Raise it, or keep more checkpoints (checkpoint.max_to_keep)."
        ]
    parts = _parts_of(config, runs, start)
    checkpoint = divergence.checkpoint
    difference, done = rerun(runs, parts, start, last, checkpoint=checkpoint)
    where = f"steps {start + 1} to {done[-1][0].step} rerun on mesh {parts[0].spec}"
    if difference is not None:
        return [
            f"{where}: step {difference.step} differs first in {difference.what} "
            f"({difference.also} later digests differ too)"
        ]
    lines = _recorded_otherwise(runs, done, checkpoint, str(parts[0].spec))
    return [f"{where}: all digests are equal, so the difference does not recur", *lines]


def _parts_of(
    config: CompareConfig, runs: tuple[RunDirectory, RunDirectory], start: int
) -> tuple[Parts, Parts]:
    """Return both runs' parts on one mesh, by their settings at step `start`."""
    stored = [settings_of_run(run.path, start) for run in runs]
    shape = config.mesh or (_meshes_of(runs[0]) or [stored[0].mesh.shape])[-1]
    simulated = config.simulate or (MeshSpec.parse(shape).num_devices if stored[0].simulate else 0)
    if simulated:
        runtime.simulate(simulated)
    runtime.setup_compilation_cache()
    devices = jax.devices()
    spec = MeshSpec.parse(shape, len(devices))
    meshes = [dataclasses.replace(own.mesh, shape=str(spec)) for own in stored]
    a, b = (
        assemble(dataclasses.replace(own, mesh=mesh), devices[: spec.num_devices])
        for own, mesh in zip(stored, meshes, strict=True)
    )
    return a, b


def _meshes_of(run: RunDirectory) -> list[str]:
    return [r["mesh"] for r, _ in stream_records(run.metrics) if r.get("event") == "run"]


def _recorded_otherwise(
    runs: tuple[RunDirectory, RunDirectory],
    done: list[tuple[RerunStep, RerunStep]],
    checkpoint: int | None,
    mesh: str,
) -> list[str]:
    """Return a line for each run: whether its records and checkpoint equal the rerun on `mesh`."""
    lines = []
    for name, run, own in zip("ab", runs, zip(*done, strict=True), strict=True):
        differences: list[str] = []
        steps = {step.step for step in own}
        recorded = {r["step"]: loss_and_norm(r) for r in steps_of(run) if r["step"] in steps}
        wrong = (s for s in own if repr(recorded.get(s.step, s.numbers)) != repr(s.numbers))
        first = next(wrong, None)
        if first is not None:
            differences.append(f"first recorded different numbers at step {first.step}")
        arrays = next((step.arrays for step in own if step.arrays), None)
        if arrays is not None and checkpoint is not None:
            stored = stored_arrays(run, checkpoint)  # also has moments outside of the devices
            other = unequal_arrays(arrays, {name: stored.get(name) for name in arrays})
            if other:
                differences.append(f"saved {len(other)} different arrays at step {checkpoint}")
        others = [other for other in dict.fromkeys(_meshes_of(run)) if other != mesh]
        if not differences:
            lines.append(f"{name}: equals the rerun")
        elif others:
            lines.append(
                f"{name}: {' and '.join(differences)}. It ran on mesh {' and '.join(others)}, "
                "where sums have a different order, so rounding differs. Rerun its steps there: "
                f"--mesh {others[-1]}."
            )
        else:
            lines.append(
                f"{name}: {' and '.join(differences)}. The likely cause is a device or its "
                "software at that time (resilience.sdc_check_interval_steps finds a device)."
            )
    return lines


@dataclasses.dataclass(frozen=True, kw_only=True)
class Divergence:
    """Differences between two run directories.

    `settings` and `environment` map a name to its value in both runs, None if a run lacks it.
    `data_step` is the first step with different rows; None without a difference or a ledger. `step`
    is the first step with a different loss, gradient norm or learning rate, and `numbers` maps the
    names of those to both values. `checkpoint` is the oldest step whose checkpoints differ,
    `arrays` the names of the arrays that differ; `num_arrays` counts all of run A.
    """

    settings: dict[str, tuple[Any, Any]]
    environment: dict[str, tuple[Any, Any]]
    last_common_step: int
    data_step: int | None
    step: int | None
    numbers: dict[str, tuple[float, float]]
    equal_checkpoints: list[int]
    checkpoint: int | None
    arrays: list[str]
    num_arrays: int

    @property
    def is_equal(self) -> bool:
        """Return whether metrics, data rows and checkpoints at all common steps are equal."""
        return self.step is None and self.data_step is None and self.checkpoint is None

    @property
    def last_to_rerun(self) -> int:
        """Return the first different step, or the one after `checkpoint` if that is earlier."""
        after = None if self.checkpoint is None else self.checkpoint + 1
        return min(s for s in (self.step, self.data_step, after) if s is not None)

    @property
    def rerun_from(self) -> int:
        """Return the step of the newest equal checkpoint before `last_to_rerun`; 0 without one."""
        return max((s for s in self.equal_checkpoints if s < self.last_to_rerun), default=0)


def read_divergence(a: RunDirectory, b: RunDirectory) -> Divergence:
    """Return how settings, software, metrics, data and checkpoints of two runs differ."""
    step = data_step = last = None
    numbers: dict[str, tuple[float, float]] = {}
    for x, y in _common_steps(a, b):
        last = x["step"]
        if data_step is None and _differ(x, y, "data_ledger"):
            data_step = last
        if step is None and (unequal := [n for n in _NUMBERS if _differ(x, y, n)]):
            step, numbers = last, {n: (x[n], y[n]) for n in unequal}
    if last is None:
        raise ConfigError(
            f"runs {a.path} and {b.path} have no step in common. Name two runs that trained the "
            "same steps."
        )
    return Divergence(
        settings=_unequal(*(_settings_of(run) for run in (a, b))),
        environment=_unequal(*(_environment_of(run) for run in (a, b))),
        last_common_step=last,
        data_step=data_step,
        step=step,
        numbers=numbers,
        **_checkpoints(a, b),
    )


def _differ(a: Record, b: Record, name: str) -> bool:
    """Return whether both records have the field `name`, with different bits; NaN equals NaN."""
    return name in a and name in b and repr(a[name]) != repr(b[name])


def _common_steps(a: RunDirectory, b: RunDirectory) -> Iterator[tuple[Record, Record]]:
    others = steps_of(b)
    other = next(others, None)
    for record in steps_of(a):
        while other is not None and other["step"] < record["step"]:
            other = next(others, None)
        if other is not None and other["step"] == record["step"]:
            yield record, other


def steps_of(run: RunDirectory) -> Iterator[Record]:
    """Yield the train records of a run in step order, without steps that a resume discarded."""
    records = stream_records(run.metrics)
    return (r for r, is_current in records if is_current and r["kind"] == "train")


def _settings_of(run: RunDirectory) -> dict[str, Any]:
    text = manifest.stored_config(run.checkpoints)
    table = flatten(tomllib.loads(text) if text else read_table(run.config, tomllib.loads))
    return {key: value for key, value in table.items() if key not in (*START_SETTINGS, "name")}


def _environment_of(run: RunDirectory) -> dict[str, Any]:
    record = read_table(run.environment, decode)
    flat = flatten({name: record[name] for name in _VERSIONS if name in record})
    return {key: value for key, value in flat.items() if value not in (None, "", [])}


def _unequal(a: dict[str, Any], b: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    keys = sorted(a.keys() | b.keys())
    return {key: (a.get(key), b.get(key)) for key in keys if a.get(key) != b.get(key)}


def _checkpoints(a: RunDirectory, b: RunDirectory) -> dict[str, Any]:
    """Return the fields of `Divergence` about checkpoints: equal ones, the first that differs."""
    steps = [manifest.steps_in(run.checkpoints) for run in (a, b)]
    equal: list[int] = []
    different: dict[str, Any] = {"checkpoint": None, "arrays": [], "num_arrays": 0}
    for step in sorted(set(steps[0]) & set(steps[1])):
        entries = [stored_arrays(run, step) for run in (a, b)]
        if names := unequal_arrays(*entries):
            different = {"checkpoint": step, "arrays": names, "num_arrays": len(entries[0])}
            break
        equal.append(step)
    return {"equal_checkpoints": equal, **different}


def unequal_arrays(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Return the names of arrays that differ in shape, dtype or checksum, or that a side lacks."""
    names = [*a, *(name for name in b if name not in a)]
    return [name for name in names if _identity(a.get(name)) != _identity(b.get(name))]


def stored_arrays(run: RunDirectory, step: int) -> dict[str, Any]:
    """Return name -> shape, dtype and checksum of the arrays of a checkpoint."""
    try:
        return StoredArrays(run.checkpoints / str(step)).entries
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"checkpoint {step} of run {run.path} cannot be read ({error}). Move it away."
        ) from error


def _identity(entry: Any) -> Any:
    return entry and (entry["shape"], entry["dtype"], entry["checksum"])


if __name__ == "__main__":
    runtime.run_command(main)
