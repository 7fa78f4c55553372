"""Measure the compile time of a train step: 32 layers on dp=4, tp=4, pp=4, simulated on CPU.

    python scripts/bench/compile.py [--layers 64]

Each number of virtual stages is a separate run of `python -m jaxdist.train` for one step with an
empty compile cache. The table shows the seconds that the run records (trace, lowering and
compilation), its wall time and its peak memory. One thread of XLA:CPU does most of the work.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs" / "pipeline_64cpu.toml"


def main() -> None:
    """Print one row per number of virtual stages."""
    arguments = _arguments()
    load = os.getloadavg()[0]
    print(f"{arguments.layers} layers, {CONFIG.name}, load average before {load:.1f}\n")
    print("| virtual stages | compile, s | whole run, s |\n|---|---|---|")
    for virtual in (1, 2, 4):
        compile_s, wall_s = measure(virtual, arguments.layers)
        print(f"| {virtual} | {compile_s:.1f} | {wall_s:.1f} |", flush=True)
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(f"\nlargest process {peak:.1f} GiB")


def measure(virtual: int, num_layers: int) -> tuple[float, float]:
    """Return (seconds of compiling the train step, seconds of the complete run)."""
    with tempfile.TemporaryDirectory(prefix="bench-compile-") as folder:
        run = Path(folder) / "run"
        start = time.perf_counter()
        subprocess.run(
            [
                *(sys.executable, "-m", "jaxdist.train", "--config", str(CONFIG)),
                *("--simulate=64", "--mesh=dp=4,tp=4,pp=4", "--steps=1", f"--run-dir={run}"),
                *(f"--model.num_layers={num_layers}", "--optim.warmup_steps=0"),
                f"--pipeline.num_virtual_stages={virtual}",
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "JAXDIST_CACHE": f"{folder}/cache"},
        )
        wall_s = time.perf_counter() - start
        records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        (seconds,) = (
            record["seconds"]
            for record in records
            if record.get("event") == "compile" and record["function"] == "train step"
        )
        return seconds, wall_s


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=32)
    return parser.parse_args()


if __name__ == "__main__":
    main()
