"""Audits every config on many meshes: the number of false alarms, and the seconds of each audit.

    python scripts/bench/audit_sound.py [--config configs/default.toml ...] [--meshes 30]
        [--compiled]

Each config is audited on a spread of its legal meshes of 8 and 16 devices. ZeRO stage, sequence
parallelism, schedule, microbatches and number formats change from mesh to mesh. All steps are
correct, so every alarm is false. With `--compiled` each step is also compiled. The script counts
and prints the rows of the transfer table that differ from the compiled program.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxdist.config import RunConfig
from jaxdist.config.command_line import stored_run
from jaxdist.core.mesh import factorisations
from jaxdist.plan.audit import Audit
from jaxdist.plan.audit.step import Transfer
from jaxdist.plan.compiled.collectives import SCALAR_BYTES, Collective, read_collectives
from jaxdist.run.audit import audit_parts
from jaxdist.run.setup import Parts, assemble
from jaxdist.runtime.formatting.numbers import in_bytes
from jaxdist.runtime.formatting.tables import columns
from jaxdist.settings import ConfigError

ROOT = Path(__file__).parent.parent.parent
SIZES = (8, 16)

Moved = Mapping[tuple[str, str], float]
"""(kind, "data+fsdp") -> bytes of unsharded arrays in one step."""


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


def unlike(parts: Parts, audit: Audit) -> list[str]:
    """Return the rows of the transfer table that differ from the compiled step."""
    lowered = parts.step.train.lower(parts.step_state(), parts.abstract_batch(), math.inf)
    program = lowered.compile().as_text()
    collectives = read_collectives(program, parts.layout.mesh_spec.sizes)
    rows = comparison(audit.transfers, collectives, jax.default_backend()).splitlines()
    return [" ".join(row.split()) for row in rows if row.endswith("differs")]


def traced_bytes(transfers: Iterable[Transfer], *, is_widened: bool = False) -> Moved:
    """Return the bytes that the traced step transfers, by kind and axes.

    Args:
        transfers: transfers of the traced step.
        is_widened: count bfloat16 as float32.
    """
    sent: Counter[tuple[str, str]] = Counter()
    for one in transfers:
        width = 2 if is_widened and one.dtype == "bfloat16" else 1
        sent[one.kind, "+".join(one.axes)] += width * one.num_bytes
    return sent


def widens_bfloat16(collectives: Iterable[Collective], platform: str) -> bool:
    """Return True if a compiled program communicates float32 although bfloat16 was requested.

    XLA:CPU computes and transfers bfloat16 as float32, but keeps float16. In a GPU program, float32
    instead of bfloat16 is a difference.
    """
    return platform == "cpu" and all("bf16" not in one.dtypes for one in collectives)


def compiled_bytes(collectives: Iterable[Collective]) -> Moved:
    """Return the bytes that the compiled step transfers, by kind and axes."""
    sent: Counter[tuple[str, str]] = Counter()
    for one in collectives:
        sent[one.kind, "+".join(one.axes)] += one.count * one.bytes
    return sent


def comparison(
    transfers: Sequence[Transfer], collectives: Sequence[Collective], platform: str
) -> str:
    """Compare the traced with the compiled step, and return whether they agree.

    The compiler adds collectives (gathers of new parameters under ZeRO) and may merge or drop some.
    It does not report arrays below 64 bytes.

    Args:
        transfers: transfers of the traced step.
        collectives: collectives of the compiled step.
        platform: target platform of the compiler, "cpu" or "gpu".
    """
    is_widened = widens_bfloat16(collectives, platform)
    is_widened &= any(one.dtype == "bfloat16" for one in transfers)
    traced = traced_bytes(transfers, is_widened=is_widened)
    compiled = compiled_bytes(collectives)
    rows = [("collective", "over", "traced", "compiled", "")]
    differ = 0
    for kind, axes in sorted({*traced, *compiled}):
        expected, moved = traced.get((kind, axes), 0), compiled.get((kind, axes), 0)
        agrees = abs(expected - moved) <= max(SCALAR_BYTES * 16, 0.01 * max(expected, moved))
        differ += not agrees
        verdict = "agrees" if agrees else "differs"
        if not agrees and not expected:
            verdict = "added by the compiler"
        rows.append((kind, axes, in_bytes(expected), in_bytes(moved), verdict))
    end = "The compiled step moves what the traced one asks for."
    if differ:
        end = f"{differ} of {len(rows) - 1} rows differ."
    if is_widened:
        end += "\nbfloat16 is counted as float32 here: XLA:CPU moves it so."
    return "\n".join([*columns(rows, left=2), "", end])


def main() -> int:
    """Audit all configs; return 1 on a false alarm."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", nargs="*", default=[], help="only these")
    parser.add_argument("--meshes", type=int, default=30, help="legal meshes of each config")
    parser.add_argument("--compiled", action="store_true", help="compare with compiled programs")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(SIZES))
    paths = [Path(p) for p in options.config] or sorted((ROOT / "configs").glob("*.toml"))
    false, audited, differ = 0, 0, 0
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
            for row in unlike(parts, audit) if options.compiled else ():
                differ += 1
                print(f"   {parts.spec} {config.mesh} {config.pipeline.gather}: {row}")
        false, audited = false + alarms, audited + count
        print(f"| {path.name} | {count} | {alarms} | {slowest:.1f} s |", flush=True)
    print(f"\n{false} false alarms in {audited} steps.")
    if options.compiled:
        print(f"{differ} rows of the tables differ from the compiled programs.")
    return int(bool(false))


if __name__ == "__main__":
    sys.exit(main())
