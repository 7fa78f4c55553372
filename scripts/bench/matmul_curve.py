"""A small run's learning curve with products in fewer bits beside that without.

    python scripts/bench/matmul_curve.py [--formats fp8 mxfp8 nvfp4] [--steps 160] [--batch 32]
        [--runs FOLDER] [--out TABLE.md]

All runs train a byte-level model in bfloat16 from the same weights and batches. The first run is
the baseline. In the others, all layers except the first and the last multiply in a format of
`precision.matmul_dtype`, emulated on a CPU. Goal: a final loss within 1 % of the baseline. A run
whose complete curve is in FOLDER is not repeated.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parent.parent.parent
GOAL = 0.01
WINDOW = 20
"""Steps averaged per table row, because single batches differ more than the formats do."""


def losses(run: Path, matmul_dtype: str, steps: int, batch: int) -> np.ndarray:
    """Train, and return the loss of each step, nats per token, [steps]."""
    values = read(run)
    if len(values) == steps:
        return values
    command = [sys.executable, "-m", "jaxdist.train", "--run-dir", str(run), f"--steps={steps}"]
    command += [f"--train.global-batch-size={batch}", "--monitoring.tracker="]
    command += ["--data.tokenizer=bytes", "--model.vocab-size=256", "--train.seq-len=128"]
    command += ["--precision.compute-dtype=bfloat16", f"--precision.matmul-dtype={matmul_dtype}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return read(run)


def read(run: Path) -> np.ndarray:
    """Return the losses that a run has logged so far, [steps]."""
    path = run / "metrics.jsonl"
    records = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    return np.array([record["loss"] for record in records if record["kind"] == "train"])


def table(curves: dict[str, np.ndarray]) -> str:
    """Return curves [steps] by format as Markdown, averaged over windows; bfloat16 is first."""
    plain, *others = curves
    lines = [
        "| steps | loss in bfloat16 | " + " | ".join(f"{name} | difference" for name in others),
        "|---|---" + "|---|---" * len(others),
    ]
    for end in range(WINDOW, len(curves[plain]) + 1, WINDOW):
        means = {name: curve[end - WINDOW : end].mean() for name, curve in curves.items()}
        cells = [f"{end - WINDOW + 1} to {end}", f"{means[plain]:.4f}"]
        for name in others:
            cells += [f"{means[name]:.4f}", f"{means[name] / means[plain] - 1:+.2%}"]
        lines.append("| " + " | ".join(cells))
    return "".join(f"{line} |\n" for line in lines)


def main() -> int:
    """Run all, print the table; return 1 if a last window misses the goal."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--formats", nargs="+", default=["fp8", "mxfp8", "nvfp4"])
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--batch", type=int, default=32, help="rows of a step")
    parser.add_argument("--runs", type=Path, help="folder of the runs, kept")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.runs or Path(scratch)
        curves = {
            dtype: losses(folder / dtype, dtype, options.steps, options.batch)
            for dtype in ("auto", *options.formats)
        }
    text = table(curves)
    print(text)
    if options.out:
        requested = " ".join(options.formats)
        head = (
            f"# Learning with products in fewer bits\n\n`python scripts/bench/matmul_curve.py "
            f"--formats {requested} --steps {options.steps} --batch {options.batch}`, "
            f"{datetime.date.today()}, 2 shared CPU cores, narrow products emulated. The default "
            "model, means of the training loss.\n\n"
        )
        options.out.write_text(head + text)
    last = [curve[-WINDOW:].mean() for curve in curves.values()]
    return any(abs(mean / last[0] - 1) > GOAL for mean in last[1:])


if __name__ == "__main__":
    sys.exit(main())
