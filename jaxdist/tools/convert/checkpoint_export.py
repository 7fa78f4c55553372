"""Exports of a run's checkpoints to its `export/STEP` (`checkpoint.export`).

During training, `jaxdist.checkpoint.exports` runs this module as a command: RUN STEP.
"""

from __future__ import annotations

import sys

from jaxdist.config import settings_of_run
from jaxdist.runtime.progress import waiting
from jaxdist.runtime.storage import Location, locate
from jaxdist.tools.convert import to_hf, to_peft
from jaxdist.tools.convert.checkpoint_paths import checkpoint_of


def export_checkpoint(run: Location, step: int = -1) -> str:
    """Export a checkpoint, -1 = newest valid, unless its export exists; return a summary line."""
    checkpoint = checkpoint_of(str(run), step)
    out = run / "export" / checkpoint.name
    if out.exists():
        return f"exported already: {out}"
    verb = to_peft if settings_of_run(run, int(checkpoint.name)).lora.rank else to_hf
    with waiting("exporting the weights"):
        return f"exported {verb.export(verb.Config(src=str(checkpoint), out=str(out)))}"


if __name__ == "__main__":
    print(export_checkpoint(locate(sys.argv[1]), int(sys.argv[2])))
