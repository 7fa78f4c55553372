"""`python -m jaxdist.verify RUN`: check that nothing trained was lost on the way to its use.

    python -m jaxdist.verify runs/NAME
    python -m jaxdist.verify runs/NAME --export tuned

Follows the weights of a run from training to checkpoint, to what `generate` loads, and to an
exported directory (`convert to-hf`, `to-peft` or `merge`). It names each parameter that had no
gradient, did not change, lost its moments, or has other values after the export. It changes
nothing, and needs the `init_from` of the run, if set, for the weights before training.

Exit code: 0 without a problem, 1 with one, 2 with bad settings.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence

from jaxdist.run.command_settings import CheckpointSettings
from jaxdist.runtime import run_command
from jaxdist.runtime.storage import read_url
from jaxdist.settings import read_settings, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifyConfig(CheckpointSettings):
    """Settings: the checkpoint of a run, an export to compare with it, and the devices."""

    export: str = setting(
        "", "output of `convert to-hf`, `to-peft` or `merge` to check too; empty = check no export"
    )
    json: bool = setting(False, "print one JSON object instead of text")


def main(argv: Sequence[str] | None = None) -> int:
    """Check a run and print the results; return 1 if there is a problem, else 0."""
    config = read_settings(
        VerifyConfig,
        sys.argv[1:] if argv is None else argv,
        command="jaxdist.verify",
        summary=__doc__ or "",
        positional=("run",),
        read_url=read_url,
    )
    from jaxdist.run.trained_run import open_run
    from jaxdist.tools.convert.checkpoint_paths import checkpoint_of
    from jaxdist.tools.verify.exports import check_export
    from jaxdist.tools.verify.training import Trained, check_run

    step = None if config.step < 0 else config.step
    run = open_run(config.run, step=step, mesh=config.mesh, simulate=config.simulate)
    step = run.step if step is None else step
    checkpoint = checkpoint_of(str(run.path), -1 if step is None else step)
    trained = Trained(run, checkpoint, config.weights)
    checks = check_run(trained)
    if config.export and trained.loaded is not None:
        checks += check_export(trained, config.export)
    is_healthy = not any(check.problems for check in checks)
    if config.json:
        facts = {"run": str(run.path), "step": int(checkpoint.name), "healthy": is_healthy}
        print(json.dumps(facts | {"checks": [dataclasses.asdict(check) for check in checks]}))
        return 0 if is_healthy else 1
    print(f"{run.path}, checkpoint {checkpoint.name}")
    for check in checks:
        state = "FAILED" if check.problems else "ok" if check.is_done else "-"
        print(f"  {state:<7}{check.name:<12}{check.summary}")
        for problem in check.problems:
            print(f"         {problem}")
    return 0 if is_healthy else 1


if __name__ == "__main__":
    run_command(main)
