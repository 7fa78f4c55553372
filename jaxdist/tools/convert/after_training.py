"""The export of a run after its last step (`checkpoint.export`)."""

from __future__ import annotations

from jaxdist.config import settings_of_run
from jaxdist.runtime.progress import waiting
from jaxdist.runtime.storage import Location
from jaxdist.tools.convert import to_hf, to_peft
from jaxdist.tools.convert.checkpoint_paths import checkpoint_of


def export_run(run: Location) -> str:
    """Export the newest checkpoint to `export/STEP` unless it exists; return a summary line."""
    checkpoint = checkpoint_of(str(run), -1)
    out = run / "export" / checkpoint.name
    if out.exists():
        return f"exported already: {out}"
    verb = to_peft if settings_of_run(run, int(checkpoint.name)).lora.rank else to_hf
    with waiting("exporting the weights"):
        return f"exported {verb.export(verb.Config(src=str(checkpoint), out=str(out)))}"
