"""Compile the 64-GPU pipeline with the real XLA:GPU compiler, without a GPU; writes a page.

    python scripts/bench/pipeline_gpu.py

Each row is the train step of `configs/pipeline_64gpu.toml` with other settings: time by the
roofline of `gpu_program.py`, memory by the compiler's buffer assignment.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gpu_program import run_case, table

OUTPUT = Path(__file__).parent / "results" / "pipeline_gpu_compile.md"

CASES = {
    "1 virtual stage, remat full": "--pipeline.num_virtual_stages 1 --train.remat full",
    "1 virtual stage": "--pipeline.num_virtual_stages 1",
    "2 virtual stages": "--pipeline.num_virtual_stages 2",
    "5 virtual stages (the config)": "",
    "5, weights gathered in each pass": "--pipeline.gather action",
    "5, remat none": "--train.remat none",
    "10 virtual stages": "--pipeline.num_virtual_stages 10",
    "fsdp=64, no stages": "--mesh fsdp=64 --zero 0 --train.num_microbatches 1",
}
"""Name -> settings on top of the config's."""

HEAD = """# The 64-GPU pipeline as XLA:GPU compiles it

Made by `python scripts/bench/pipeline_gpu.py` without a GPU: Llama 2 13B on 8 nodes of 8 H100,
dp=4,tp=4,pp=4, 128 rows of 4,096 tokens, 16 microbatches, ZeRO-1, remat `dots` unless the row names
another. Times are those of a roofline that is 5 to 14 % optimistic; branches count as often as a
stage takes them. Memory is the buffer assignment; the CUDA context and NCCL come on top (about
2 GiB). No GPU was used.

"""


def main() -> int:
    """Compile all cases and write the table."""
    rows, versions = [], {}
    for name, flags in CASES.items():
        _, figures, versions = run_case(f"case h100:64 pipeline_64gpu {flags}", [])
        rows.append((name, figures))
    made = ", ".join(f"{name} {version}" for name, version in versions.items())
    OUTPUT.write_text(f"{HEAD}{table(rows)}\n{made}.\n")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
