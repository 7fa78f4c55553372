"""`python -m jaxdist.audit`: check that the train step has every reduction exactly once on a mesh.

    python -m jaxdist.audit --mesh dp=2,fsdp=2,tp=2
    python -m jaxdist.audit --config configs/llama3_8b.toml --mesh fsdp=4,tp=2

Takes the settings of training and needs no GPU: it traces the step on simulated devices and follows
every value over every mesh axis. It prints the transfers of the step, and reports each reduction
that is missing, done twice or done on wrong values, with parameter, line and fix. Custom models are
audited too. A run does the same before it compiles its step, unless override=audit.

Exit code: 0 without a violation (or a difference, with --deep), else 2; also 2 with bad settings.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax

from jaxdist import runtime
from jaxdist.config import RunConfig
from jaxdist.config.command_line import read_elsewhere
from jaxdist.plan.audit import Audit
from jaxdist.plan.audit.step import text_of
from jaxdist.run.audit import MeshDifference, audit_parts, differences
from jaxdist.run.setup import Parts, assemble
from jaxdist.settings import Removed, setting

COMMAND = "jaxdist.audit"

NUM_DEVICES = 8
"""Simulated devices if neither --mesh nor --simulate sets their number."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AuditConfig(RunConfig):
    """The settings of the run to audit, whether to run a step too, and the output format."""

    deep: bool = setting(
        False,
        "also run one step on simulated devices (few rows, decoders made small), and compare its "
        "loss and every gradient with one device's",
    )
    json: bool = setting(False, "print one JSON object instead of text")

    REMOVED: ClassVar[Mapping[str, Removed]] = {
        **RunConfig.REMOVED,
        "compiled": Removed(False, "Use scripts/bench/audit_sound.py, which compiles steps too."),
    }

    @property
    def num_devices(self) -> int:
        """Return the number of simulated devices: the mesh size; if not set, --simulate or 8."""
        spec = self.mesh.spec
        if spec is None or spec.is_open:
            return self.simulate or NUM_DEVICES
        return spec.num_devices


def main(argv: Sequence[str] | None = None) -> int:
    """Audit the train step of a mesh, print the result; return the exit code."""
    words = sys.argv[1:] if argv is None else argv
    config = read_elsewhere(AuditConfig, words, command=COMMAND, summary=__doc__ or "", simulate=0)
    runtime.simulate(config.num_devices)
    parts = assemble(config.run, jax.devices()[: config.num_devices])
    audit = audit_parts(parts)
    unequal: list[MeshDifference] = []
    if config.deep:  # one step on the mesh against one device
        mesh = dataclasses.replace(config.mesh, shape=str(parts.spec))
        unequal = differences(dataclasses.replace(parts.config, mesh=mesh), jax.devices())
    if config.json:
        print(json.dumps(_record(parts, audit, unequal), indent=2))
    else:
        devices = f"{config.num_devices} simulated devices, step plan {parts.plan.digest}"
        print(f"{parts.model.name} on mesh {parts.spec} ({devices})\n")
        print(text_of(audit))
        if config.deep:
            verdict = "deep audit: one step of a small copy equals one device's, but for rounding"
            print("\n" + ("\n".join(f"  ✗ {one}" for one in unequal) or verdict))
    return 0 if audit.is_clean and not unequal else 2


def _record(parts: Parts, audit: Audit, unequal: list[MeshDifference]) -> dict[str, Any]:
    return {
        "differences": [dataclasses.asdict(one) for one in unequal],
        "model": parts.model.name,
        "mesh": str(parts.spec),
        "step_plan": parts.plan.digest,
        "violations": [dataclasses.asdict(violation) for violation in audit.violations],
        "transfers": [dataclasses.asdict(transfer) for transfer in audit.transfers],
        "num_parameters": audit.num_parameters,
        "seconds": audit.seconds,
    }


if __name__ == "__main__":
    runtime.run_command(main)
