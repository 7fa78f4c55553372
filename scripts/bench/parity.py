"""Compare losses of meshes with one device, relative to the run's sensitivity to rounding.

    python scripts/bench/parity.py [--meshes tp=2 dp=2,fsdp=2 ...] [--out TABLE.md] [-- FLAGS]

FLAGS are flags of `jaxdist.train`; `--chaotic` names a case that amplifies rounding. Every run
takes 20 steps in float32 from equal parameters. Two results are printed for each run:

- the first step from an equal state: loss within 1e-6, gradient norm within 1e-5;
- the largest loss difference over 20 steps, and the sensitivity: the same difference for a run on
  one device whose initial weights are one unit in the last place larger. Training amplifies
  rounding, so the bound is 2e-5 or `FACTOR` times the sensitivity, whichever is larger.

About 20 s for each mesh on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
LOSS, GRADIENT, LOSSES, FACTOR = 1e-6, 1e-5, 2e-5, 10
MESHES = ["dp=2", "fsdp=2", "tp=2", "pp=2", "dp=2,fsdp=2,tp=2"]
BASE = [
    *("--steps=20", "--monitoring.tracker=", "--eval.interval_steps=0"),
    *("--eval.final_max_batches=1", "--precision.compute_dtype=float32"),
]
CHAOTIC = [
    *("--model.num_kv_heads=2", "--model.head_dim=8", "--model.qk_norm=head"),
    *("--model.sliding_window=16", "--optim.peak_lr=3e-3", "--optim.warmup_steps=0"),
]
ONE_ULP = """
import dataclasses, sys
import jax, jax.numpy as jnp
from jaxdist.run import setup

init = setup.init_state
def perturbed(*arguments, **options):
    state = init(*arguments, **options)
    params = jax.tree.map(lambda x: jnp.nextafter(x, jnp.full_like(x, jnp.inf)), state.params)
    return dataclasses.replace(state, params=params)
setup.init_state = perturbed

from jaxdist import train
sys.exit(train.main(sys.argv[1:]))
"""


def history(
    folder: Path, flags: list[str], *, perturbed: bool = False
) -> list[tuple[float, float]]:
    """Train, and return (loss, gradient norm) of each step."""
    program = ["-c", ONE_ULP] if perturbed else ["-m", "jaxdist.train"]
    command = [sys.executable, *program, f"--run-dir={folder}", *BASE, *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(r["loss"], r["grad_norm"]) for r in records if r["kind"] == "train"]


def distance(
    measured: list[tuple[float, float]], expected: list[tuple[float, float]]
) -> list[float]:
    """Return relative differences: first loss, first gradient norm, largest of any loss."""
    losses = [abs(a[0] - b[0]) / abs(b[0]) for a, b in zip(measured, expected, strict=True)]
    return [losses[0], abs(measured[0][1] - expected[0][1]) / expected[0][1], max(losses)]


def main() -> int:
    """Run, compare, print the table; return 1 if a mesh exceeds its bounds."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--meshes", nargs="*", default=MESHES)
    parser.add_argument("--chaotic", action="store_true", help="a model that amplifies rounding")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    parser.add_argument("flags", nargs="*", help="of jaxdist.train, after --")
    options = parser.parse_args()
    flags = [*(CHAOTIC if options.chaotic else []), *options.flags]
    lines = ["| run | first loss | first gradient norm | largest of 20 losses | ÷ sensitivity |"]
    lines += ["|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        alone = history(Path(folder) / "alone", [*flags, "--simulate=1"])
        ulp = history(Path(folder) / "ulp", [*flags, "--simulate=1"], perturbed=True)
        sensitivity = distance(ulp, alone)[2]
        rows = {"one device, one ulp": distance(ulp, alone)}
        for number, mesh in enumerate(options.meshes):
            devices = 1
            for part in mesh.split(","):
                devices *= int(part.partition("=")[2])
            run = history(
                Path(folder) / str(number), [*flags, f"--simulate={devices}", f"--mesh={mesh}"]
            )
            rows[mesh] = distance(run, alone)
    for name, (loss, norm, largest) in rows.items():
        share = largest / sensitivity if sensitivity else float("inf")
        lines.append(f"| {name} | {loss:.1e} | {norm:.1e} | {largest:.1e} | {share:.1f} |")
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")
    bound = max(LOSSES, FACTOR * sensitivity)
    meshes = [row for name, row in rows.items() if name in options.meshes]
    return int(any(a > LOSS or b > GRADIENT or c > bound for a, b, c in meshes))


if __name__ == "__main__":
    sys.exit(main())
