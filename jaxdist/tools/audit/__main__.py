"""`python -m jaxdist.audit`: check that every sum of the train step is taken once, on this mesh.

    python -m jaxdist.audit --mesh dp=2,fsdp=2,tp=2
    python -m jaxdist.audit --config configs/llama3_8b.toml --mesh fsdp=4,tp=2

Takes the settings of training and needs no GPU: it traces the step on simulated devices and follows
every value over every mesh axis. It prints what the step moves, and names each sum that is missing,
taken twice or taken of the wrong parts, with its parameter, line and fix. A user's own model is
audited too. Every run does the same before it compiles its step.

Exit code: 0 if nothing is wrong, 2 if something is or the settings are bad.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxdist import runtime

if TYPE_CHECKING:
    from jaxdist.plan.audit import Audit
    from jaxdist.run.audit import MeshDifference
    from jaxdist.run.setup import Parts
    from jaxdist.tools.audit.options import AuditConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Audit and print; returns the exit code."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # tracing must never start a GPU
    from jaxdist.tools.audit.options import read_audit

    config = read_audit(sys.argv[1:] if argv is None else argv, summary=__doc__ or "")
    runtime.simulate(config.num_devices)
    import jax

    from jaxdist.plan.audit.table import text_of
    from jaxdist.run.audit import audit_parts
    from jaxdist.run.setup import assemble

    parts = assemble(config.run, jax.devices()[: config.num_devices])
    audit = audit_parts(parts)
    found = _looked_deep(config, parts) if config.deep else []
    if config.json:
        print(json.dumps(_record(parts, audit, found), indent=2))
    else:
        devices = f"{config.num_devices} simulated devices, step plan {parts.plan.digest}"
        print(f"{parts.model.name} on mesh {parts.spec} ({devices})\n")
        print(text_of(audit))
        if config.deep:
            verdict = "deep audit: loss and every gradient of one step equal one device's"
            print("\n" + ("\n".join(f"  ✗ {one}" for one in found) or verdict))
    return 0 if audit.is_clean and not found else 2


def _record(parts: Parts, audit: Audit, found: list[MeshDifference]) -> dict[str, Any]:
    return {
        "differences": [dataclasses.asdict(one) for one in found],
        "model": parts.model.name,
        "mesh": str(parts.spec),
        "step_plan": parts.plan.digest,
        "violations": [dataclasses.asdict(violation) for violation in audit.violations],
        "transfers": [dataclasses.asdict(transfer) for transfer in audit.transfers],
        "num_parameters": audit.num_parameters,
        "seconds": audit.seconds,
    }


def _looked_deep(config: AuditConfig, parts: Parts) -> list[MeshDifference]:
    """One step on the mesh against one device."""
    import jax

    from jaxdist.run.audit import differences

    mesh = dataclasses.replace(config.mesh, shape=str(parts.spec))
    return differences(dataclasses.replace(parts.config, mesh=mesh), jax.devices())


if __name__ == "__main__":
    runtime.run_command(main)
