"""`python -m jaxdist.compare A B`: find where two runs first differ that should be equal.

    python -m jaxdist.compare runs/A runs/B
    python -m jaxdist.compare runs/A runs/B --rerun false

It reads both run directories first: settings and software that differ, the first step with other
rows of the data, the first step with another loss, and the first checkpoint with other arrays. Then
it does the steps from the last equal checkpoint before that on again, each run with its own
settings, and compares digests of parameters, activations and gradients of every layer. It names the
first step, layer and tensor that differ. Where the steps done again are equal, it says which run
recorded something else. Nothing is written into a run directory.

Exit code: 0 if the runs are equal, 1 if they part, 2 if they cannot be compared.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxdist import runtime
from jaxdist.settings import read_settings, setting

if TYPE_CHECKING:
    from jaxdist.run.metrics_log import Record
    from jaxdist.run.run_directory import RunDirectory
    from jaxdist.run.setup import Parts
    from jaxdist.tools.compare.records import Parting
    from jaxdist.tools.compare.rerun import StepDone

_SHOWN = 8
"""Names of one kind that are listed before "and N more"."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareConfig:
    """Which two runs to compare, and how."""

    a: str = setting("", "run directory", required=True)
    b: str = setting("", "run directory to compare it with", required=True)
    rerun: bool = setting(
        True, "repeat the steps around the first difference; false = read files only"
    )
    mesh: str = setting("", "mesh for the repeated steps; empty = that of run A")
    simulate: int = setting(
        0,
        "simulated CPU devices; 0 = the machine's own devices, or those of the mesh where run A "
        "was simulated",
        ge=0,
    )
    max_steps: int = setting(200, "largest number of steps to repeat", ge=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print; returns the exit code."""
    config = read_settings(
        CompareConfig,
        sys.argv[1:] if argv is None else argv,
        command="jaxdist.compare",
        summary=__doc__ or "",
        positional=("a", "b"),
    )
    from jaxdist.run.run_directory import RunDirectory
    from jaxdist.tools.compare.records import read_parting

    runs = RunDirectory.existing(config.a), RunDirectory.existing(config.b)
    parting = read_parting(*runs)
    print(f"a: {runs[0].path}\nb: {runs[1].path}")
    print("\n".join(told(parting)))
    if parting.is_equal:
        return 0
    if config.rerun:
        print("\n".join(_done_again(config, runs, parting)))
    return 1


def told(parting: Parting) -> list[str]:
    """What the run directories say, one line each."""
    lines = []
    for title, changes in (("setting", parting.settings), ("software", parting.environment)):
        named = [f"{title} {key}: {a} | {b}" for key, (a, b) in changes.items()]
        lines += named[:_SHOWN]
        lines += [f"and {len(named) - _SHOWN} more"] * (len(named) > _SHOWN)
    if parting.data_step is not None:
        lines.append(f"data: other rows from step {parting.data_step} on")
    if parting.step is None:
        lines.append(f"numbers: equal in all common steps, the last is {parting.last_common_step}")
    else:
        pairs = ", ".join(f"{name} {a!r} | {b!r}" for name, (a, b) in parting.numbers.items())
        lines.append(f"numbers: step {parting.step} is the first that differs: {pairs}")
    if parting.checkpoint is not None:
        few = ", ".join(parting.arrays[:_SHOWN]) + " ..." * (len(parting.arrays) > _SHOWN)
        lines.append(
            f"checkpoints: {len(parting.arrays)} of {parting.num_arrays} arrays differ at step "
            f"{parting.checkpoint}: {few} (jaxdist convert diff A B says where)"
        )
    if parting.equal_checkpoints:
        lines.append(f"checkpoints: equal up to step {parting.equal_checkpoints[-1]}")
    return lines


def _done_again(
    config: CompareConfig, runs: tuple[RunDirectory, RunDirectory], parting: Parting
) -> list[str]:
    """The lines about the steps done again."""
    start, last = parting.rerun_from, parting.last_to_rerun
    if last - start > config.max_steps:
        return [
            f"not done again: steps {start + 1} to {last} are more than --max-steps "
            f"{config.max_steps}. Raise it, or keep more checkpoints (checkpoint.max_to_keep)."
        ]
    from jaxdist.tools.compare.rerun import rerun

    parts = _parts_of(config, runs, start)
    checkpoint = parting.checkpoint
    difference, done = rerun(runs, parts, start, last, checkpoint=checkpoint)
    where = f"steps {start + 1} to {done[-1][0].step} done again on mesh {parts[0].spec}"
    if difference is not None:
        return [
            f"{where}: step {difference.step} differs first in {difference.what} "
            f"(and in {difference.also} digests that follow)"
        ]
    return [f"{where}: all digests are equal, so what parted the runs does not come back", *(
        _recorded_otherwise(runs, done, checkpoint, str(parts[0].spec))
    )]  # fmt: skip


def _parts_of(
    config: CompareConfig, runs: tuple[RunDirectory, RunDirectory], start: int
) -> tuple[Parts, Parts]:
    """The parts of both runs from their checkpoints of `start`, on one mesh of this machine."""
    from jaxdist.config import settings_of_run
    from jaxdist.core.mesh import MeshSpec

    stored = [settings_of_run(run.path, start) for run in runs]
    shape = config.mesh or (_meshes_of(runs[0]) or [stored[0].mesh.shape])[-1]
    simulated = config.simulate or (MeshSpec.parse(shape).num_devices if stored[0].simulate else 0)
    if simulated:
        runtime.simulate(simulated)
    runtime.setup_compilation_cache()
    import jax

    from jaxdist.run.setup import assemble

    devices = jax.devices()
    spec = MeshSpec.parse(shape, len(devices))
    meshes = [dataclasses.replace(own.mesh, shape=str(spec)) for own in stored]
    a, b = (
        assemble(dataclasses.replace(own, mesh=mesh), devices[: spec.num_devices])
        for own, mesh in zip(stored, meshes, strict=True)
    )
    return a, b


def _meshes_of(run: RunDirectory) -> list[str]:
    """The meshes that a run says it trained on, the last one last."""
    from jaxdist.run.metrics_log import stream_records

    return [r["mesh"] for r, _ in stream_records(run.metrics) if r.get("event") == "run"]


def _recorded_otherwise(
    runs: tuple[RunDirectory, RunDirectory],
    done: list[tuple[StepDone, StepDone]],
    checkpoint: int | None,
    mesh: str,
) -> list[str]:
    """Which run recorded or saved something else than the steps done again on `mesh` give."""
    from jaxdist.tools.compare.records import steps_of, stored_arrays, unequal_arrays

    lines = []
    for name, run, own in zip("ab", runs, zip(*done, strict=True), strict=True):
        found: list[str] = []
        steps = {step.step for step in own}
        recorded = {r["step"]: r for r in steps_of(run) if r["step"] in steps}
        wrong = next((step for step in own if _is_other(step, recorded.get(step.step))), None)
        if wrong is not None:
            found.append(f"recorded other numbers from step {wrong.step} on")
        arrays = next((step.arrays for step in own if step.arrays), None)
        if arrays is not None and checkpoint is not None:
            other = unequal_arrays(arrays, stored_arrays(run, checkpoint))
            found += [f"saved {len(other)} other arrays at step {checkpoint}"] if other else []
        others = [other for other in dict.fromkeys(_meshes_of(run)) if other != mesh]
        if not found:
            lines.append(f"{name}: as the steps done again")
        elif others:
            lines.append(
                f"{name}: {' and '.join(found)}. It ran on mesh {' and '.join(others)}, where sums "
                "have another order: differences of rounding are to be expected. Do its steps "
                f"again there: --mesh {others[-1]}."
            )
        else:
            lines.append(
                f"{name}: {' and '.join(found)}. Its devices, or the software it had then, are at "
                "fault (resilience.sdc_check_interval_steps finds a device)."
            )
    return lines


def _is_other(step: StepDone, recorded: Record | None) -> bool:
    from jaxdist.run.replay import loss_and_norm

    return recorded is not None and repr(step.numbers) != repr(loss_and_norm(recorded))


if __name__ == "__main__":
    runtime.run_command(main)
