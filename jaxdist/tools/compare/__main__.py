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
from collections.abc import Sequence

import jax

from jaxdist import runtime
from jaxdist.config import settings_of_run
from jaxdist.core.mesh import MeshSpec
from jaxdist.run.metrics_log import Record, stream_records
from jaxdist.run.replay import loss_and_norm
from jaxdist.run.run_directory import RunDirectory
from jaxdist.run.setup import Parts, assemble
from jaxdist.settings import read_settings, setting
from jaxdist.tools.compare.records import (
    Divergence,
    read_divergence,
    steps_of,
    stored_arrays,
    unequal_arrays,
)
from jaxdist.tools.compare.rerun import RerunStep, rerun

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
        recorded = {r["step"]: r for r in steps_of(run) if r["step"] in steps}
        wrong = next((step for step in own if _is_other(step, recorded.get(step.step))), None)
        if wrong is not None:
            differences.append(f"first recorded different numbers at step {wrong.step}")
        arrays = next((step.arrays for step in own if step.arrays), None)
        if arrays is not None and checkpoint is not None:
            other = unequal_arrays(arrays, stored_arrays(run, checkpoint))
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


def _is_other(step: RerunStep, recorded: Record | None) -> bool:
    return recorded is not None and repr(step.numbers) != repr(loss_and_norm(recorded))


if __name__ == "__main__":
    runtime.run_command(main)
