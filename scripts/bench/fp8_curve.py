"""A small run's learning curve with products in 8 bits beside that without.

    python scripts/bench/fp8_curve.py [--steps 160] [--batch 32] [--out TABLE.md]

Two runs of a byte-level model from the same weights and batches, both computing in bfloat16; in
one of them all layers but the first and the last multiply in 8 bits, emulated on a CPU. The goal is
a loss within 1 % at the end.
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
"""Steps that a row of the table averages: single batches differ by more than the formats do."""


def losses(run: Path, matmul_dtype: str, steps: int, batch: int) -> np.ndarray:
    """Training loss of each step, nats per token, [steps]."""
    command = [sys.executable, "-m", "jaxdist.train", "--run-dir", str(run), f"--steps={steps}"]
    command += [f"--train.global-batch-size={batch}", "--monitoring.tensorboard=false"]
    command += ["--data.tokenizer=bytes", "--model.vocab-size=256", "--train.seq-len=128"]
    command += ["--precision.compute-dtype=bfloat16", f"--precision.matmul-dtype={matmul_dtype}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=environment, check=True, capture_output=True)
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return np.array([record["loss"] for record in records if record["kind"] == "train"])


def table(plain: np.ndarray, fp8: np.ndarray) -> str:
    """Both curves [steps] as Markdown, averaged over windows."""
    lines = [
        "| steps | loss in bfloat16 | loss with fp8 products | difference |",
        "|---|---|---|---|",
    ]
    for end in range(WINDOW, len(plain) + 1, WINDOW):
        one, other = plain[end - WINDOW : end].mean(), fp8[end - WINDOW : end].mean()
        lines.append(
            f"| {end - WINDOW + 1} to {end} | {one:.4f} | {other:.4f} | {other / one - 1:+.2%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run both, print the table; 1 where the last window misses the goal."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--batch", type=int, default=32, help="rows of a step")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        plain, fp8 = (
            losses(Path(folder) / dtype, dtype, options.steps, options.batch)
            for dtype in ("auto", "fp8")
        )
    text = table(plain, fp8)
    print(text)
    if options.out:
        head = (
            f"# Learning with products in 8 bits\n\n`python scripts/bench/fp8_curve.py --steps "
            f"{options.steps} --batch {options.batch}`, {datetime.date.today()}, 2 shared CPU "
            "cores, 8 bits emulated. The default model, means of the training loss.\n\n"
        )
        options.out.write_text(head + text)
    return abs(fp8[-WINDOW:].mean() / plain[-WINDOW:].mean() - 1) > GOAL


if __name__ == "__main__":
    sys.exit(main())
