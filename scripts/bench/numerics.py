"""Losses of a small run and of ten meshes, against recorded ones: does a change keep them?

    python scripts/bench/numerics.py [--out TABLE.md] [--only NAME ...] [--record]

Each run trains a byte-level model, the default at the time of the recording, for 12 steps. Losses
and gradient norms are compared bit by bit with `results/numerics.json`, which names its commit.
`--record` then writes the new values into that file.
About 4 minutes on 2 quiet cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
RECORDED = ROOT / "scripts/bench/results/numerics.json"
BASE = [
    "--steps=12",
    "--monitoring.tracker=",
    # The default model at the time of the recording.
    *("--train.global_batch_size=32", "--train.seq_len=128", "--model.vocab_size=256"),
    *("--data.tokenizer=bytes", "--optim.optimizer=adamw", "--optim.peak_lr=3e-3"),
    *("--optim.warmup_steps=20", "--optim.schedule=cosine", "--optim.min_lr_ratio=0.1"),
]
RUNS = {
    "default": [],
    "dp8": ["--simulate=8", "--mesh=dp=8"],
    "fsdp8": ["--simulate=8", "--mesh=fsdp=8"],
    "dp4_zero2": ["--simulate=4", "--mesh=dp=4", "--mesh.zero=2"],
    "tp4": ["--simulate=4", "--mesh=tp=4"],
    "dp2fsdp2tp2": ["--simulate=8", "--mesh=dp=2,fsdp=2,tp=2"],
    "pp4": ["--simulate=4", "--mesh=pp=4"],
    "pp2tp2dp2": ["--simulate=8", "--mesh=pp=2,tp=2,dp=2"],
    "dp2pp2_v2": ["--simulate=4", "--mesh=pp=2,dp=2", "--pipeline.num_virtual_stages=2"],
    "dp2_acc4": ["--simulate=2", "--mesh=dp=2", "--train.num_microbatches=4", "--train.remat=full"],
}


def losses(name: str, folder: Path) -> list[tuple[float, float]]:
    """Train, and return (loss, gradient norm) of each step."""
    command = [sys.executable, "-m", "jaxdist.train", "--run-dir", str(folder / name), *BASE]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([*command, *RUNS[name]], env=environment, check=True, capture_output=True)
    return read(folder / name)


def read(run: Path) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of each step, from a run directory."""
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(r["loss"], r["grad_norm"]) for r in records if r["kind"] == "train"]


def compare(
    measured: list[tuple[float, float]], expected: list[list[float]]
) -> tuple[int, float, float]:
    """Return the number of bit-identical steps, and relative loss differences: largest, first."""
    same = sum(list(a) == list(b) for a, b in zip(measured, expected, strict=True))
    distances = [abs(a[0] - b[0]) / b[0] for a, b in zip(measured, expected, strict=True)]
    return same, max(distances), distances[0]


def main() -> int:
    """Run, compare, print the table; return 1 if a loss differs by more than 2e-5 in 20 steps."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    parser.add_argument("--record", action="store_true", help="then write what is found")
    options = parser.parse_args()
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {"runs": {}}
    lines = ["| run | steps with the same bits | first loss differs by | largest difference |"]
    lines += ["|---|---|---|---|"]
    worst, runs = 0.0, {}
    with tempfile.TemporaryDirectory() as folder:
        for name in options.only:
            runs[name] = losses(name, Path(folder))
            if name not in recorded["runs"]:
                continue
            same, largest, first = compare(runs[name], recorded["runs"][name])
            worst = max(worst, largest)
            lines.append(f"| {name} | {same} of {len(runs[name])} | {first:.1e} | {largest:.1e} |")
            print(lines[-1], flush=True)
    if options.record:
        head = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(head, cwd=ROOT, capture_output=True, text=True, check=True)
        made = {
            "commit": commit.stdout.strip(),
            "python": platform.python_version(),
            "jax": version("jax"),
        }
        RECORDED.write_text(json.dumps({**made, "runs": recorded["runs"] | runs}, indent=1) + "\n")
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")
    return int(worst > 2e-5)


if __name__ == "__main__":
    sys.exit(main())
