"""Pipelines against one device: every division into stages with every strategy, 20 steps each.

    python scripts/bench/pipeline_product.py [--out TABLE.md]

Each row is a run of 20 steps of a decoder of the tests, with 16 positions and 6 microbatches, on 2
to 8 simulated CPU devices, against one device without stages: the first loss within 1e-6 relative,
the first gradients within 1e-5 of the largest, all losses within 2e-5. In float16 the bounds are
those of its rounding (11 bits). Muon has no gradients in its state, so its row has only losses.
Losses beyond the bound are inside if 2, 3 or 6 microbatches on one device differ as much from one
microbatch (last column): the run amplifies rounding, or another step of float16 overflows.

The exit code is 1 if a row exceeds its bounds.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import itertools
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import conftest  # noqa: E402, F401, eight devices, compiled as in the tests
import jax  # noqa: E402
import numpy as np  # noqa: E402
from pipeline_parity import FAMILIES, SEQ_LEN, host_batch  # noqa: E402

from jaxdist.config import RunConfig  # noqa: E402
from jaxdist.core.mesh import MeshSpec  # noqa: E402
from jaxdist.core.parallel.context import place_batch  # noqa: E402
from jaxdist.core.parallel.pipeline.config import PipelineConfig  # noqa: E402
from jaxdist.core.precision import PrecisionConfig  # noqa: E402
from jaxdist.core.sharding import MeshConfig  # noqa: E402
from jaxdist.core.step import TrainConfig  # noqa: E402
from jaxdist.models import DecoderConfig  # noqa: E402
from jaxdist.optim import OptimConfig  # noqa: E402
from jaxdist.run.setup import assemble  # noqa: E402

DIVISIONS: dict[str, dict[int, tuple[int, str]]] = {
    "1 virtual stage": {2: (1, "2,2"), 4: (1, "1,1,1,1")},
    "2 virtual stages": {2: (2, "1,1,1,1"), 4: (2, "1,1,1,1,1,1,1,1")},
    "3 virtual stages": {2: (3, "1,1,1,1,1,1"), 4: (3, "1,1,1,1,1,1,1,1,1,1,1,1")},
    "unequal": {2: (1, "3,1"), 4: (1, "1,2,2,1")},
    "2 unequal virtual stages": {2: (2, "1,2,2,0"), 4: (2, "1,1,2,1,1,1,1,0")},
}
"""Name -> number of stages -> (virtual stages of a stage, layers of each)."""

STRATEGIES: dict[str, dict[str, Any]] = {
    "dp=2": {},
    "dp=2, ZeRO-2": {"zero": 2},
    "fsdp=2": {},
    "fsdp=2, gathered once": {"gather": "step"},
    "tp=2": {"family": "gemma"},
    "cp=2": {},
    "dp=1, dropout": {"family": "gpt2"},
    "tp=2, tied embeddings": {"family": "llama_tied"},
    "dp=2, remat dots": {"remat": "dots"},
    "dp=2, float16": {"dtype": "float16"},
    "dp=2, Muon": {"optimizer": "muon"},
}
"""Name, which starts with the rest of the mesh -> fields of the case."""

BOUNDS, HALF_BOUNDS = (1e-6, 1e-5, 2e-5), (1e-3, 1e-2, 1e-3)
MICROBATCHES, ROWS = 6, 12
TITLES = ("stages", "division", "strategy", "first loss", "gradients", "20 losses", "one device")


@functools.cache
def run(
    mesh: str, depths: str = "auto", layers: int = 0, virtual: int = 1, microbatches: int = 1,
    *, family: str = "llama", zero: int = 0, gather: str = "action", remat: str = "none",
    dtype: str = "float32", optimizer: str = "adamw",
) -> tuple[np.ndarray, Any]:  # fmt: skip
    """Return the losses of 20 steps, float64 [20], and the first gradients in model order."""
    config = RunConfig(
        model=DecoderConfig(
            d_model=32, num_layers=layers, num_heads=4, num_kv_heads=4, mlp_dim=64, vocab_size=60,
            max_seq_len=SEQ_LEN, **FAMILIES[family],
        ),
        mesh=MeshConfig(shape=mesh, zero=zero),
        pipeline=PipelineConfig(
            num_virtual_stages=virtual, layers_per_stage=depths, gather=gather
        ),
        precision=PrecisionConfig(compute_dtype=dtype),
        optim=OptimConfig(optimizer=optimizer, peak_lr=3e-3, warmup_steps=0, weight_decay=0.0),
        train=TrainConfig(
            global_batch_size=ROWS, seq_len=SEQ_LEN, remat=remat, steps=20,
            num_microbatches=microbatches,
        ),
    )  # fmt: skip
    parts = assemble(config, jax.devices()[: MeshSpec.parse(mesh).num_devices])
    state, losses, moments = parts.init_state(), [], {}
    for number in range(20):
        batch = host_batch(ROWS)
        batch["tokens"] = np.roll(batch["tokens"], number, axis=1)
        batch = place_batch(batch, parts.step.batch_sharding)
        state, metrics = parts.step.train(state, batch, np.inf)
        losses.append(float(metrics["loss"]))
        if not any(np.any(x) for x in moments.values()):
            # After the first update (float16 may skip some), it is proportional to the gradient.
            leaves = jax.tree_util.tree_leaves_with_path(parts.in_model_order(state).opt_state)
            names = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
            moments = jax.device_get({n: x for n, x in names.items() if ".mu" in n})
    return np.array(losses), moments


def measure(stages: int, division: str, strategy: str) -> list[float]:
    """Return differences: first loss, gradients relative to the largest, most of 20 losses.

    The fourth is that of the 20 losses of one device with other numbers of microbatches; 0 if the
    third is within its bound.
    """
    virtual, depths = DIVISIONS[division][stages]
    mesh, fields = strategy.partition(", ")[0], STRATEGIES[strategy]
    layers = sum(map(int, depths.split(",")))
    of_one = {k: v for k, v in fields.items() if k in ("family", "dtype", "optimizer")}
    losses, grads = run.__wrapped__(
        f"pp={stages},{mesh}", depths, layers, virtual, MICROBATCHES, **fields
    )
    expected, exact = run("dp=1", layers=layers, **of_one)
    apart = np.abs(losses / expected - 1)
    largest = max((np.abs(x).max() for x in exact.values()), default=1.0)
    differences = [np.abs(grads[name] - exact[name]).max() / largest for name in exact]
    is_muon = fields.get("optimizer") == "muon"
    values = [float(apart[0]), 0.0 if is_muon else float(max(differences)), float(apart.max()), 0.0]
    if values[2] > bounds(strategy)[2]:
        others = [run("dp=1", layers=layers, microbatches=n, **of_one)[0] for n in (2, 3, 6)]
        values[3] = max(float(np.abs(other / expected - 1).max()) for other in others)
    return values


def bounds(strategy: str) -> tuple[float, float, float]:
    """Return the bounds of first loss, gradients and 20 losses."""
    return HALF_BOUNDS if "float16" in strategy else BOUNDS


def main() -> int:
    """Run all rows, write the table, and return 1 if a row exceeds its bounds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    options = parser.parse_args()
    cells = lambda row: f"| {' | '.join(map(str, row))} |"
    rows, red, worst = [], 0, np.zeros(3)
    cases = list(itertools.product((2, 4), DIVISIONS, STRATEGIES))
    for stages, division, strategy in cases:
        *values, spread = measure(stages, division, strategy)
        first, gradients, later = bounds(strategy)
        limits = (first, gradients, max(later, spread))
        red += not all(value <= limit for value, limit in zip(values, limits, strict=True))
        worst = worst if spread or "float16" in strategy else np.maximum(worst, values)
        numbers = [f"{value:.1e}" for value in values] + [f"{spread:.1e}" if spread else ""]
        rows.append(cells((stages, division, strategy, *numbers)))
        print(rows[-1], flush=True)
        if options.out:
            options.out.write_text(
                "# Pipelines against one device, every case\n\n"
                f"{(__doc__ or '').split(chr(10) * 2)[2]}\n\n"
                f"`python scripts/bench/pipeline_product.py`, {datetime.date.today()}, jax "
                f"{jax.__version__}, 2 shared cores: {len(rows)} of {len(cases)} rows were run, "
                f"{len(rows) - red} are within the bounds. Worst in float32: loss {worst[0]:.1e}, "
                f"gradients {worst[1]:.1e}, 20 losses {worst[2]:.1e}.\n\n"
                + "\n".join([cells(TITLES), "|---:|---|---|---:|---:|---:|---:|", *rows])
                + "\n"
            )
    return int(bool(red))


if __name__ == "__main__":
    sys.exit(main())
