"""Plant a fault at every collective of the step on each mesh, and count the faults that are caught.

    python scripts/bench/audit_mutants.py [--mesh dp=2,tp=2 ...] [--out TABLE.md]

A fault changes one call of `core/collectives.py` while the step is traced: the call is omitted (a
reduce-scatter becomes a slice), doubled, done over another mesh axis, applied to gathered data, or
done in bfloat16. It is caught by jax's types (the step cannot be traced), by the mesh audit, or by
the deep audit, which runs one small step. Faults that do not change the traced program are not
counted.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.config import RunConfig
from jaxdist.core import collectives, step_plan
from jaxdist.core.mesh import MeshSpec
from jaxdist.core.parallel.pipeline.config import PipelineConfig
from jaxdist.core.sharding import MeshConfig
from jaxdist.core.step import TrainConfig
from jaxdist.core.types import Model
from jaxdist.models import DecoderConfig
from jaxdist.run.audit import audit_parts, differences
from jaxdist.run.setup import Parts, assemble
from jaxdist.runtime.formatting.numbers import percent

KINDS = ("omitted", "doubled", "wrong axis", "gathered, then summed", "bfloat16")


@dataclasses.dataclass(frozen=True)
class Case:
    """A mesh and how it is used."""

    mesh: str
    zero: int = 0
    sequence: bool = True
    num_virtual_stages: int = 1
    gather: str = "action"
    attention: str = "auto"

    def __str__(self) -> str:
        words = [self.mesh, f"zero={self.zero}" * bool(self.zero)]
        words.append("" if self.sequence else "no sequence parallelism")
        if "pp" in self.mesh:
            words += [f"v={self.num_virtual_stages}", f"gather={self.gather}"]
        words.append(f"{self.attention} attention" if "cp" in self.mesh else "")
        return ", ".join(filter(None, words))

    def config(self) -> RunConfig:
        """Return the settings of a small run."""
        return RunConfig(
            model=DecoderConfig(
                d_model=32, num_layers=4, num_heads=4, mlp_dim=64, vocab_size=64, bias=["out"]
            ),
            mesh=MeshConfig(
                shape=self.mesh,
                zero=self.zero,
                context_attention=self.attention,
            ),
            train=TrainConfig(global_batch_size=32, seq_len=16, num_microbatches=2),
            pipeline=PipelineConfig(
                num_virtual_stages=self.num_virtual_stages,
                gather=self.gather,
            ),
        )

    def parts(self) -> Parts:
        """Return the parts of the run."""
        devices = jax.devices()[: MeshSpec.parse(self.mesh).num_devices]
        return assemble(self.config(), devices, model=self.model())

    def model(self, seq_len: int = 16) -> Model:
        """Return the model of the run, with or without sequence parallelism."""
        del seq_len
        return dataclasses.replace(self.config().build_model(), sequence=self.sequence)


CASES = (
    Case("dp=4"),
    Case("dp=4", zero=1),
    Case("dp=2,fsdp=2", zero=2),
    Case("dp=4", zero=3),
    Case("fsdp=4"),
    Case("tp=4"),
    Case("tp=4", sequence=False),
    Case("dp=2,fsdp=2,tp=2"),
    Case("dp=2,fsdp=2,tp=2", sequence=False, zero=1),
    Case("pp=2,dp=2,tp=2"),
    Case("pp=2,fsdp=2,tp=2", sequence=False, gather="step"),
    Case("pp=2,dp=2", zero=2),
    Case("pp=2,dp=2,tp=2", num_virtual_stages=2),
    Case("cp=4", attention="ring"),
    Case("cp=2,fsdp=2", attention="all_gather"),
    Case("dp=2,cp=2,tp=2", attention="all_to_all"),
    Case("pp=2,cp=2", attention="ring"),
)

Site = tuple[str, int, str, str]
"""File, line and axes of a call, and the name of the collective."""


class Planter:
    """Replaces the collectives, and plants a fault in the calls of one site."""

    def __init__(self, mesh: MeshSpec) -> None:
        self.axes = [axis.name for axis in mesh.used]
        self.sites: dict[Site, int] = {}
        self.target: Site | None = None
        self.kind = ""

    @contextlib.contextmanager
    def planted(self) -> Iterator[None]:
        """Replace the collectives in the block."""
        names = (
            *("all_reduce", "reduce_scatter", "all_gather"),
            *("all_to_all", "permute", "permute_in_pairs"),
        )
        own = {name: getattr(collectives, name) for name in names}
        try:
            for name in names:
                setattr(collectives, name, self._stand_in(name, own[name], own))
            yield
        finally:
            for name in names:
                setattr(collectives, name, own[name])

    def _stand_in(self, name: str, real: Callable[..., Any], own: dict[str, Any]) -> Any:
        def call(x: Any, axes: Any, *args: Any, **options: Any) -> Any:
            frame = sys._getframe(1)
            largest = name == "all_reduce" and "max" in (*args, *options.values())
            called = "all_reduce max" if largest else name
            site = (frame.f_code.co_filename, frame.f_lineno, str(axes), called)
            self.sites[site] = self.sites.get(site, 0) + 1
            if site != self.target:
                return real(x, axes, *args, **options)
            return self._wrong(name, x, axes, args, options, own)

        return call

    def _wrong(
        self, name: str, x: Any, axes: Any, args: Any, options: Any, own: dict[str, Any]
    ) -> Any:
        real = lambda x, axes=axes: own[name](x, axes, *args, **options)
        if self.kind == "omitted":
            return _omitted(name, x, axes, args, options)
        if self.kind == "doubled":
            return real(own["all_reduce"](x, axes))
        if self.kind == "wrong axis":
            named = (axes,) if isinstance(axes, str) else axes
            others = [axis for axis in self.axes if axis not in named]
            return real(x, others[0] if isinstance(axes, str) else tuple(others[:1]))
        if self.kind == "bfloat16":
            return real(x.astype(jnp.bfloat16)).astype(x.dtype)
        gathered = jax.lax.all_gather(x, axes)
        return real(jnp.sum(gathered, 0) if gathered.ndim > x.ndim else gathered)

    def applies(self, site: Site, kind: str) -> bool:
        """Return True if a fault of this kind can be planted there."""
        _, _, axes, name = site
        if kind == "wrong axis":
            return any(axis not in axes for axis in self.axes)
        # A doubled max has no effect, and the step uses max only to shift a softmax.
        return kind == "omitted" or name in ("all_reduce", "reduce_scatter")


def _omitted(name: str, x: Any, axes: Any, args: Any, options: Any) -> Any:
    """Return the local value, in the shape that the collective would return."""
    if name == "all_to_all":
        split_dim, concat_dim = args[:2]
        size = options.get("group") or collectives.group_size(axes)
        part = x.shape[split_dim] // size
        start = collectives.group_index(axes) % size * part
        own = jax.lax.dynamic_slice_in_dim(x, start, part, split_dim)
        return jnp.concatenate([own] * size, concat_dim)
    dim = options.get("dim", args[0] if args else 0)
    if name == "all_gather":
        return jnp.concatenate([x] * collectives.group_size(axes), dim)
    if name != "reduce_scatter":
        return x
    size = x.shape[dim] // collectives.group_size(axes)
    start = collectives.group_index(axes) * size
    return jax.lax.dynamic_slice_in_dim(x, start, size, dim)


def verdict(case: Case, planter: Planter, sound: str) -> tuple[str, str]:
    """Return the outcome for the planted fault, and the first violation."""
    with planter.planted():
        try:
            audit = audit_parts(case.parts())
        except Exception as error:  # any error that prevents tracing
            return "types", type(error).__name__
    if not audit.is_clean:
        return "audit", str(audit.violations[0])
    if _program(case, planter) == sound:
        return "no fault", ""
    with planter.planted():
        try:
            problems = differences(case.config(), jax.devices(), case.model)
        except Exception as error:  # it cannot be traced on a single axis
            return "deep", type(error).__name__
    return ("deep", str(problems[0])) if problems else ("SURVIVED", "")


def _program(case: Case, planter: Planter) -> str:
    with planter.planted():
        parts = case.parts()
        traced = parts.step.train.trace(parts.step_state(), parts.abstract_batch(), math.inf)
        return str(traced.jaxpr)


def try_case(
    case: Case, kinds: Sequence[str] = KINDS
) -> tuple[collections.Counter[tuple[str, str]], list[str]]:
    """Return the counts of (kind, verdict), and the survivors."""
    planter = Planter(MeshSpec.parse(case.mesh))
    sound = _program(case, planter)
    with planter.planted():
        assert audit_parts(case.parts()).is_clean, f"a false alarm on {case}"
    counts: collections.Counter = collections.Counter()
    survivors = []
    for site in sorted(planter.sites):
        for kind in kinds:
            if not planter.applies(site, kind):
                continue
            planter.target, planter.kind = site, kind
            # jax caches traces of custom gradients: clear them before and after each fault.
            is_kept = Path(site[0]).name in ("fsdp.py", "losses.py")
            if is_kept:
                jax.clear_caches()
            result, _ = verdict(case, planter, sound)
            if is_kept:
                jax.clear_caches()
            counts[kind, result] += 1
            if result == "SURVIVED":
                file, line, axes, name = site
                survivors.append(f"{kind}: {name} over {axes} at {Path(file).name}:{line} ({case})")
    return counts, survivors


def main() -> int:
    """Plant all faults; return 1 if all checks together catch fewer than 98 % of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mesh", nargs="*", default=[], help="only these meshes")
    parser.add_argument("--cases", nargs="*", type=int, help="only these, counted from 1")
    parser.add_argument("--out", default="", help="write the table here")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    step_plan.UNROLL_UP_TO = 0  # one copy of the layer, which is quick to trace
    total: collections.Counter = collections.Counter()
    lines, alive = [], []
    for number, case in enumerate(CASES, start=1):
        if options.mesh and case.mesh not in options.mesh:
            continue
        if options.cases and number not in options.cases:
            continue
        start = time.monotonic()
        counts, survivors = try_case(case)
        total, alive = total + counts, alive + survivors
        lines.append(f"| {case} | {_cells(counts)} |")
        if options.out:
            Path(options.out).write_text(_page(lines, total, alive))
        print(f"{lines[-1]} {time.monotonic() - start:.0f} s", flush=True)
        for survivor in survivors:
            print("   survived:", survivor, flush=True)
    print("\n" + _page(lines, total, alive))
    return int(_killed(total, "types", "audit", "deep") < 0.98 * _faults(total))


def _page(lines: list[str], total: collections.Counter, alive: list[str]) -> str:
    """Return the table so far, with its sums."""
    head = "| mesh | " + " | ".join(KINDS) + " |"
    table = [head, "|---" * (1 + len(KINDS)) + "|", *lines, f"| **all** | {_cells(total)} |"]
    faults, killed = _faults(total), _killed(total, "types", "audit")
    deep = _killed(total, "deep")
    verdict = (
        f"{killed} of {faults} faults killed before anything runs "
        f"({percent(killed / max(1, faults))}), {deep} of the others by the deep audit."
    )
    return "\n".join([*table, "", verdict, "", *[f"- survived: {one}" for one in alive]]) + "\n"


def _killed(counts: collections.Counter, *by: str) -> int:
    return sum(count for (_, result), count in counts.items() if result in by)


def _faults(counts: collections.Counter) -> int:
    return _killed(counts, "types", "audit", "deep", "SURVIVED")


def _cells(counts: collections.Counter) -> str:
    """Return caught faults per kind (types + audit + deep audit), and the number of faults."""
    cells = []
    for kind in KINDS:
        killed = [counts[kind, by] for by in ("types", "audit", "deep")]
        total = sum(killed) + counts[kind, "SURVIVED"]
        cells.append(f"{' + '.join(map(str, killed))} of {total}")
    return " | ".join(cells)


if __name__ == "__main__":
    sys.exit(main())
