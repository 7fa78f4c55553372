"""Measure one train step: ours, and a bare hand-written one of the same shapes, interleaved.

    python scripts/bench/step.py --preset cpu-256 --preset cpu-32k
    python scripts/bench/step.py --preset gpt2-124m --json results.json     # on a GPU

Both steps run in one process on the same batches, in alternating blocks whose order swaps, so that
noise of the machine affects both equally. The script reports medians, p99, and the median ratio of
neighboring blocks, for wall time and on CPU also for CPU time, which other programs disturb less.
It reports MFU by both conventions if the peak of the device is known.

`--json` is written after the compilation and again after each pair of blocks, so a process that is
stopped leaves the numbers it has. A file that is complete is not measured again. Compiled programs
are cached between processes (`JAXDIST_CACHE`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import bare
import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.config import RunConfig
from jaxdist.core.sharding import MeshConfig
from jaxdist.data import DataConfig
from jaxdist.data.packing import text_fields
from jaxdist.hardware import peak_flops
from jaxdist.models import DecoderConfig
from jaxdist.plan.estimate.time import estimate_time
from jaxdist.run.monitoring.summary import device_memory
from jaxdist.run.setup import Parts, assemble, compare_kernel
from jaxdist.runtime import setup_compilation_cache

# name: (vocab, d_model, layers, heads, kv_heads, mlp, seq, batch, remat, compare with bare step)
PRESETS = {
    "cpu-256": (256, 384, 6, 6, 6, 1024, 256, 8, "none", True),
    "cpu-32k": (32768, 384, 6, 6, 6, 1024, 256, 8, "none", True),
    "gpt2-124m": (50304, 768, 12, 12, 12, 2048, 1024, 32, "none", True),
    "1.7b": (131072, 2048, 24, 16, 8, 8192, 4096, 4, "dots", False),
    "llama2-7b": (32000, 4096, 32, 32, 32, 11008, 4096, 2, "dots", False),
}


def main() -> None:
    """Run the named presets and print a table; `--json` also writes every number."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--preset", action="append", choices=PRESETS, required=True)
    parser.add_argument("--blocks", type=int, default=8, help="pairs of blocks")
    parser.add_argument("--block-steps", type=int, default=3, help="steps of a block")
    parser.add_argument(
        "--batch", type=int, default=0, help="rows of a step instead of the preset's"
    )
    parser.add_argument(
        "--documents", type=int, default=0, help="pack each row from so many documents"
    )
    parser.add_argument("--remat", default="", help="remat policy instead of the preset's")
    parser.add_argument("--moments", default="float32", help="dtype of AdamW's first moment")
    parser.add_argument(
        "--matmul-dtype",
        default="auto",
        choices=("auto", "fp8", "mxfp8", "nvfp4"),
        help="of the layers' products",
    )
    parser.add_argument("--no-bare", action="store_true", help="measure ours alone")
    parser.add_argument("--json", default="", help="file to write")
    args = parser.parse_args()
    if args.json and is_complete(Path(args.json)):
        print(f"{args.json} is complete")
        return
    setup_compilation_cache()
    report = {"conditions": conditions(), "complete": False, "results": []}
    for name in args.preset:
        report["results"].append({})
        for result in measure(name, args):
            report["results"][-1] = result
            write(args.json, report)
    report["complete"] = True
    write(args.json, report)
    print(table(report))


def is_complete(path: Path) -> bool:
    """Return whether the file has all numbers of an earlier process."""
    return path.exists() and json.loads(path.read_text()).get("complete", False)


def write(path: str, report: dict) -> None:
    """Replace the file, if one is named."""
    if path:
        Path(path + ".new").write_text(json.dumps(report, indent=1) + "\n")
        Path(path + ".new").replace(path)


def conditions() -> dict[str, str]:
    """Return the conditions of the measurement."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "devices": str(len(jax.devices())),
        "cores": str(len(os.sched_getaffinity(0))),
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()),
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", "") or "none",
        "jax": jax.__version__,
        "jaxlib": jax.lib.__version__,
        "python": sys.version.split()[0],
        "command": " ".join(sys.argv),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def measure(name: str, args: argparse.Namespace) -> Iterator[dict]:
    """Yield the results of a preset so far: ours, and the bare step unless it is excluded."""
    vocab, d_model, layers, heads, kv_heads, mlp, seq, batch, remat, with_bare = PRESETS[name]
    batch, with_bare = args.batch or batch, with_bare and not args.no_bare
    shape = bare.Shape(vocab, d_model, layers, heads, kv_heads, mlp, seq)
    config = run_config(shape, batch, args.remat or remat, args)
    parts = assemble(config, jax.devices()[:1])
    if args.documents:
        parts = compare_kernel(parts, text_fields(seq, packed=True))
    batches = make_batches(vocab, batch, seq, parts.step.batch_sharding, args.documents)
    ours = Ours(parts, batches)
    rivals = [ours, *([Bare(shape, parts, batches)] if with_bare else [])]
    compile_s = [rival.warm_up() for rival in rivals]
    result = {
        "preset": name,
        "batch": batch,
        "documents": args.documents or 1,
        **packed_kernel(parts),
        "remat": config.train.remat,
        "dtype": str(parts.plan.compute_dtype),
        "compile_s": compile_s[0],
        **memory(ours),
    }
    if budget := parts.budget():
        budget = budget.replanned(parts.packed, parts.checks)
        result["planned_gb"] = budget.memory.total_bytes / 1e9
        result["planned_step_ms"] = 1e3 * estimate_time(budget.job).seconds
    yield result
    times: list[list[Block]] = [[] for _ in rivals]
    for block in range(args.blocks):
        alternate(rivals, times, block, args.block_steps)
        yield result | speed(parts, batch * seq, times)
    result |= speed(parts, batch * seq, times) | memory(ours)
    result["dispatch_ms"] = 1e3 * ours.dispatch_s()
    losses = [rival.loss() for rival in rivals]  # same batches, different initial weights
    result["loss"] = losses[0]
    if with_bare:
        result |= {"bare_compile_s": compile_s[1], "bare_loss": losses[1]}
    yield result


def speed(parts: Parts, tokens: int, times: Sequence[Sequence[Block]]) -> dict[str, float]:
    """Return the numbers of the blocks so far for steps of `tokens`; ours come first."""
    median = statistics.median(block.wall_s for block in times[0])
    result = {
        "blocks": len(times[0]),
        "tokens_per_s": tokens / median,
        "step_ms_p50": 1e3 * median,
        "step_ms_p99": 1e3 * float(np.percentile([block.wall_s for block in times[0]], 99)),
        "processor_ms": 1e3 * statistics.median(block.processor_s for block in times[0]),
    }
    peak = peak_flops(jax.devices()[0].device_kind, str(parts.plan.compute_dtype))
    if peak:
        for convention, flops in parts.model.flops_per_token.items():
            result[f"mfu_{convention}"] = result["tokens_per_s"] * flops / peak
    if len(times) > 1:
        ratio = lambda of: statistics.median(
            of(bare) / of(our) for our, bare in zip(*times, strict=True)
        )
        result |= {
            "bare_tokens_per_s": tokens / statistics.median(block.wall_s for block in times[1]),
            "ratio_to_bare": ratio(lambda block: block.wall_s),
        }
        if jax.devices()[0].platform == "cpu":
            result["processor_ratio_to_bare"] = ratio(lambda block: block.processor_s)
    return result


def run_config(shape: bare.Shape, batch: int, remat: str, args: argparse.Namespace) -> RunConfig:
    """Return run settings for the same model and step."""
    model = DecoderConfig(
        vocab_size=shape.vocab,
        d_model=shape.d_model,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        mlp_dim=shape.mlp,
    )
    data = DataConfig(packing="documents" if args.documents else "stream")
    base = RunConfig(model=model, data=data, mesh=MeshConfig(shape="dp=1"))
    return dataclasses.replace(
        base,
        train=dataclasses.replace(
            base.train,
            global_batch_size=batch,
            seq_len=shape.seq,
            remat=remat,
        ),
        optim=dataclasses.replace(
            base.optim, schedule="constant", warmup_steps=0, moment_dtype=args.moments
        ),
        precision=dataclasses.replace(base.precision, matmul_dtype=args.matmul_dtype),
    )


class Ours:
    """jaxdist's compiled step."""

    def __init__(self, parts, batches):
        self.parts, self.batches, self.count = parts, batches, 0
        self.state, self.compiled = parts.init_state(), parts.step.train

    def warm_up(self) -> float:
        """Compile; return the seconds."""
        begin = time.perf_counter()
        self.compiled = self.parts.step.train.lower(self.state, self.batches[0], np.inf).compile()
        seconds = time.perf_counter() - begin
        self.run(2)
        return seconds

    def run(self, steps: int) -> None:
        """Dispatch some steps and wait for the last."""
        for _ in range(steps):
            batch = self.batches[self.count % len(self.batches)]
            self.state, self.metrics = self.compiled(self.state, batch, np.inf)
            self.count += 1
        jax.block_until_ready(self.metrics["loss"])

    def dispatch_s(self) -> float:
        """Return the median seconds of a call on the host while the device is idle."""
        times = []
        for _ in range(5):
            jax.block_until_ready(self.state)
            begin = time.perf_counter()
            self.state, self.metrics = self.parts.step.train(self.state, self.batches[0], np.inf)
            times.append(time.perf_counter() - begin)
        return statistics.median(times)

    def loss(self) -> float:
        """Return the loss of the last step."""
        return float(self.metrics["loss"])


class Bare:
    """The hand-written step."""

    def __init__(self, shape, parts, batches):
        kernel = "cudnn" if parts.plan.platform == "gpu" else "xla"
        self.step = bare.make_step(shape, parts.plan.compute_dtype, kernel)
        self.state, self.batches, self.count = bare.init_state(shape), batches, 0

    def warm_up(self) -> float:
        """Compile; return the seconds."""
        batch = self.batches[0]
        begin = time.perf_counter()
        self.step = self.step.lower(self.state, batch["tokens"], batch["targets"]).compile()
        seconds = time.perf_counter() - begin
        self.run(2)
        return seconds

    def run(self, steps: int) -> None:
        """Dispatch some steps and wait for the last."""
        for _ in range(steps):
            batch = self.batches[self.count % len(self.batches)]
            self.state, self.value, _ = self.step(self.state, batch["tokens"], batch["targets"])
            self.count += 1
        jax.block_until_ready(self.value)

    def loss(self) -> float:
        """Return the loss of the last step."""
        return float(self.value)


class Block(NamedTuple):
    """Wall seconds and CPU seconds (all threads) per step of a block of steps."""

    wall_s: float
    processor_s: float


def alternate(rivals: Sequence, times: list[list[Block]], block: int, block_steps: int) -> None:
    """Append one block of each rival to its times; odd blocks run in the reverse order."""
    order = range(len(rivals)) if block % 2 == 0 else reversed(range(len(rivals)))
    for index in order:
        begin = time.perf_counter(), time.process_time()
        rivals[index].run(block_steps)
        end = time.perf_counter(), time.process_time()
        spent = ((b - a) / block_steps for a, b in zip(begin, end, strict=True))
        times[index].append(Block(*spent))


def packed_kernel(parts) -> dict[str, str]:
    """Return the result of comparing cuDNN's packed kernel, if it was compared."""
    return {check.use: check.describe() for check in parts.checks}


def make_batches(vocab: int, batch: int, seq: int, sharding, documents: int) -> list[dict]:
    """Return four random batches on the device; rows have `documents` of random length."""
    batches = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        tokens = rng.integers(0, vocab, (batch, seq + 1), np.int32)
        rows = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
        rows["weights"] = np.ones((batch, seq), np.float32)
        if documents:
            starts = np.zeros((batch, seq), np.int32)
            for row in starts:
                row[rng.choice(np.arange(1, seq), documents - 1, replace=False)] = 1
            position = np.arange(seq, dtype=np.int32)
            rows["segments"] = 1 + np.cumsum(starts, 1, dtype=np.int32)
            rows["positions"] = position - np.maximum.accumulate(starts * position, axis=1)
        batches.append(jax.device_put(rows, sharding))
    return batches


def memory(ours: Ours) -> dict[str, float]:
    """Return memory planned by the compiler, and measured memory if the device reports it."""
    plan = ours.compiled.memory_analysis()
    measured = {
        "argument_gb": plan.argument_size_in_bytes / 1e9,
        "temporary_gb": plan.temp_size_in_bytes / 1e9,
    }
    peak = device_memory(jax.devices()[:1]).get("memory_peak_bytes")
    return measured | ({"peak_gb": peak / 1e9} if peak else {})


def table(report: dict) -> str:
    """Return the conditions and a Markdown table."""
    lines = [", ".join(f"{name} {value}" for name, value in report["conditions"].items()), ""]
    columns = list(dict.fromkeys(key for row in report["results"] for key in row))
    lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in report["results"]:
        cells = [row.get(column, "") for column in columns]
        cells = [f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    jnp.zeros(())  # fail first if the backend cannot start
    main()
