"""Compile the 64-GPU pipeline with the real XLA:GPU compiler, without a GPU; writes a page.

    python scripts/bench/pipeline_gpu.py

Each row is the train step of a shipped config with other settings: time by the roofline of
`gpu_program.py`, memory by the compiler's buffer assignment.
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
"""Name -> settings on top of `configs/pipeline_64gpu.toml`."""

LARGE = {
    "70B, 10 virtual stages (the config)": "llama3_70b_pipeline",
    "70B, 5 virtual stages": "llama3_70b_pipeline --pipeline.num_virtual_stages 5",
}
"""Name -> config and settings, on 128 H100."""

LARGEST = {
    "405B, remat names:attention,attention_out (the config)": "llama3_405b_pipeline",
    "405B, remat names:attention": "llama3_405b_pipeline --train.remat names:attention",
    "405B, remat full": "llama3_405b_pipeline --train.remat full",
    "405B, pp=8, cp=2, remat names:attention": "llama3_405b_pipeline --mesh fsdp=4,tp=8,pp=8,cp=2"
    " --train.remat names:attention",
    "405B, fsdp=256,tp=2, no stages": "llama3_405b",
}
"""Name -> config and settings, on 512 H100."""

HEAD = """# The 64-GPU pipeline as XLA:GPU compiles it

Made by `python scripts/bench/pipeline_gpu.py` without a GPU: Llama 2 13B on 8 nodes of 8 H100,
dp=4,tp=4,pp=4, 128 rows of 4,096 tokens, 16 microbatches, ZeRO-1, remat `dots` unless the row names
another. 70B: 16 nodes, fsdp=4,tp=8,pp=4, 256 rows of 8,192 tokens, 32 microbatches. 405B: 64 nodes,
fsdp=4,tp=8,pp=16, 512 rows of 8,192 tokens, 64 microbatches, 4 virtual stages. Times are those of a
roofline that is 5 to 14 % optimistic; optional parts count as often as a stage runs them, and the
copies of branches that are not taken count, too.
Memory is the buffer assignment; the CUDA context and NCCL come on top (about 2 GiB). No GPU was
used.

"""


def main() -> int:
    """Compile all cases and write the table."""
    rows, versions = [], {}
    lines = {name: f"h100:64 pipeline_64gpu {flags}" for name, flags in CASES.items()}
    lines |= {name: f"h100:128 {flags}" for name, flags in LARGE.items()}
    lines |= {name: f"h100:512 {flags}" for name, flags in LARGEST.items()}
    for name, line in lines.items():
        _, figures, versions = run_case(f"case {line}", [])
        rows.append((name, figures))
    made = ", ".join(f"{name} {version}" for name, version in versions.items())
    OUTPUT.write_text(f"{HEAD}{table(rows)}\n{made}.\n")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
