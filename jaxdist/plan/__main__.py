"""`python -m jaxdist.plan`: estimate if a run fits, on which mesh, how fast and at what price.

    python -m jaxdist.plan --config configs/llama3_8b.toml --gpus h100:8
    python -m jaxdist.plan --config configs/llama3_8b.toml --gpus h100:64,a100-80:64 --tokens 1e12
    python -m jaxdist.plan --config configs/llama3_70b.toml --gpus h100:128 --mesh fsdp=16,tp=8
    python -m jaxdist.plan --show-schedule --stages 4 --microbatches 8

Takes the settings of training, needs no GPU and starts no device. Without --mesh it searches the
best one. If the extra `plan` is installed, it compiles the step for those GPUs (--compile).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence

from jaxdist import runtime


def main(argv: Sequence[str] | None = None) -> int:
    """Plan a run, or draw schedules, and print; return 0, also if the run does not fit."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # estimates must never start a GPU
    from jaxdist.plan.options import clusters_of, read_gpus, read_plan

    config, mesh = read_plan(sys.argv[1:] if argv is None else argv, summary=__doc__ or "")
    if config.show_schedule:
        from jaxdist.plan.text import drawings

        print(drawings(config.stages, config.microbatches, config.virtual_stages))
        return 0
    from jaxdist.plan.advice import advise
    from jaxdist.plan.json_record import record_of
    from jaxdist.plan.planner import make_plan
    from jaxdist.plan.text import text_of

    catalog = read_gpus(config)
    plans = [make_plan(config, cluster, mesh) for cluster in clusters_of(config)]
    advice = [advise(plan, config, catalog) for plan in plans]
    pairs = list(zip(plans, advice, strict=True))
    if config.json:
        print(json.dumps({"plans": [record_of(*pair) for pair in pairs]}, indent=2))
    else:
        texts = [text_of(*pair, top=config.top) for pair in pairs]
        print(("\n\n" + "=" * 100 + "\n\n").join(texts))
    return 0


if __name__ == "__main__":
    runtime.run_command(main)
