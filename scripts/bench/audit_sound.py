"""Audits every config on many meshes: the number of false alarms, and the seconds of each audit.

    python scripts/bench/audit_sound.py [--config configs/default.toml ...] [--meshes 30]

Each config is audited on a spread of its legal meshes of 8 and 16 devices. ZeRO stage, sequence
parallelism, schedule, microbatches and number formats change from mesh to mesh. All steps are
correct, so every alarm is false.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from jaxdist.config import RunConfig
from jaxdist.config.command_line import stored_run
from jaxdist.core.mesh import factorisations
from jaxdist.run.audit import audit_parts
from jaxdist.run.setup import assemble
from jaxdist.settings import ConfigError

ROOT = Path(__file__).parent.parent.parent
SIZES = (8, 16)


def variants(config: RunConfig) -> Iterator[RunConfig]:
    """Yield the config on each mesh, with varying other settings."""
    specs = [spec for size in SIZES for spec in factorisations(size)]
    gathers = itertools.cycle(("action", "step"))
    zero = itertools.cycle((0, 1, 2, 3, 0))
    microbatches = itertools.cycle((0, 2))
    dtype = itertools.cycle(("float32", "bfloat16", "float32", "float16"))
    # A stride coprime to the count visits every mesh, with neighbors far apart.
    for index in range(len(specs)):
        spec = specs[index * 7 % len(specs)]
        yield _changed(
            config,
            mesh={
                "shape": str(spec),
                "zero": next(zero) if spec["data"] > 1 else 0,
            },
            train={"num_microbatches": next(microbatches) if spec["pipeline"] == 1 else 0},
            pipeline={"gather": next(gathers)},
            precision={"compute_dtype": next(dtype)},
        )


def _changed(config: RunConfig, **sections: dict[str, Any]) -> RunConfig:
    changed = {
        name: dataclasses.replace(getattr(config, name), **values)
        for name, values in sections.items()
    }
    return dataclasses.replace(config, init_from="", simulate=0, **changed)


def main() -> int:
    """Audit all configs; return 1 on a false alarm."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", nargs="*", default=[], help="only these")
    parser.add_argument("--meshes", type=int, default=30, help="legal meshes of each config")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(SIZES))
    paths = [Path(p) for p in options.config] or sorted((ROOT / "configs").glob("*.toml"))
    false, audited = 0, 0
    print("| config | meshes | false alarms | audit, slowest |\n|---|---|---|---|", flush=True)
    for path in paths:
        count, alarms, slowest = 0, 0, 0.0
        for config in variants(stored_run(path)):
            if count == options.meshes:
                break
            try:
                assert config.mesh.spec is not None
                parts = assemble(config, jax.devices()[: config.mesh.spec.num_devices])
            except ConfigError:  # not legal for this model or batch
                continue
            start = time.perf_counter()
            try:
                audit = audit_parts(parts)
            except ConfigError:
                continue
            count, slowest = count + 1, max(slowest, time.perf_counter() - start)
            alarms += len(audit.violations)
            for violation in audit.violations:
                print(f"   {parts.spec} {config.mesh} {config.pipeline.gather}: {violation}")
        false, audited = false + alarms, audited + count
        print(f"| {path.name} | {count} | {alarms} | {slowest:.1f} s |", flush=True)
    print(f"\n{false} false alarms in {audited} steps.")
    return int(bool(false))


if __name__ == "__main__":
    sys.exit(main())
