"""Estimate the time of the compiled GPU step without a GPU: a roofline over its schedule.

    python scripts/bench/gpu_program.py [--only NAME ...] [--check | --record] [--flags "--a.b c"]

Each case is a run's own train step, compiled by the real XLA:GPU compiler (the extra `plan`) for
GPUs that are not here, and taken apart by `roofline.py`: seconds by class of work,
exposed traffic by mesh axis, model FLOPs utilisation (causal). `--flags` are added to every
case, to compare two programs. Nothing here was measured on a GPU: programs for one GPU compare
well, absolute times are 5 to 15 % too short.

`--check` compares what it compiles with the figures in `results/gpu_program.json`, class by class,
and exits with 1 where one has moved; `--record` puts what it compiles there. The compiler gives the
same program twice, so that what moves is the code's doing or the compiler's version's.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roofline import model_times

from jaxdist.config import read_run
from jaxdist.core.mesh import MeshSpec
from jaxdist.hardware import GIB, parse_gpus
from jaxdist.models import build
from jaxdist.plan.compiled.check import NotCompiled, compile_step

ROOT = Path(__file__).parents[2]
FIGURES = Path(__file__).parent / "results" / "gpu_program.json"
"""Case -> commit, date, versions and figures of the last recording."""

_SHARE_OF_STEP = 0.01  # allowed change of a class or of the step
_SHARE_OF_MEMORY = 0.02
_MEMORY = ("temporary", "total")  # GiB; `mfu` and `again` are shares, the others seconds

MEDIUM = (
    "--mesh dp=1 --model.d_model 2048 --model.num_layers 24 --model.num_heads 16"
    " --model.num_kv_heads 16 --model.mlp_dim 5632 --train.seq_len 4096"
    " --train.global_batch_size 4 --train.num_microbatches 1 --train.remat dots"
)
ROWS_OF_TWO = "--train.num_microbatches 16"  # rows of eight exceed GPU memory
LONG = "--train.seq_len 8192 --train.remat dots --train.num_microbatches 8"

# name, GPUs, config, flags; the mesh is the config's unless a flag sets it.
CASES = f"""
gpt2_124m       h100:8   gpt2_124m --train.remat none
1.7b_4096       h200:1   llama3_8b {MEDIUM}
8b_4096         h100:8   llama3_8b --train.seq_len 4096 --train.remat dots
8b_8192         h100:8   llama3_8b {LONG}
8b_8192_fp8     h100:8   llama3_8b {LONG} --precision.matmul-dtype fp8
8b_8192_packed  h100:8   llama3_8b {LONG} --data.packing documents
8b_fsdp4tp2     h100:8   llama3_8b --mesh fsdp=4,tp=2 {ROWS_OF_TWO}
70b_fsdp128     h100:128 llama3_70b
70b_fsdp16tp8   h100:128 llama3_70b --mesh fsdp=16,tp=8
13b_pipeline    h100:64  pipeline_64gpu
30b_a3b         h100:8   qwen3_30b_a3b
mixtral         h100:32  mixtral_8x7b
235b_a22b       h100:256 qwen3_235b_a22b
"""


def run_case(line: str, more: list[str]) -> tuple[str, dict[str, float], dict[str, str]]:
    """Return (name, figures: seconds by class, memory and utilization, versions) of a case."""
    name, gpus, config_name, *flags = line.split()
    path = ROOT / "configs" / f"{config_name}.toml"
    data = ["--data.sources", "stdlib", "--data.tokenizer", "bytes"]
    config = read_run(["--config", str(path), *data, *flags, *more], command="gpu_program")
    cluster = parse_gpus(gpus)[0]
    spec = MeshSpec.parse(config.mesh.shape, cluster.num_gpus)
    step = compile_step(config, spec, cluster, timeout_s=900)
    if isinstance(step, NotCompiled):
        raise SystemExit(f"{name}: {step.reason}. {step.fix}\n{step.details}")
    seq_len = config.train.seq_len
    tokens = config.train.global_batch_size * seq_len / cluster.num_gpus
    flops = build(config.model, seq_len=seq_len).flops_per_token["causal"] * tokens
    times = model_times(step.program, spec.sizes, cluster, step.branch_shares)
    print(f"{name}: {times.calls}, compiled in {step.compile_s:.0f} s", flush=True)
    figures = {
        "step": times.seconds,
        "mfu": flops / times.seconds / cluster.gpu.peak_flops["bfloat16"],
        "again": times.flops / flops,
        "temporary": step.memory.temporary_bytes / GIB,
        "total": step.memory.total_bytes / GIB,
        **times.classes,
    }
    return name, figures, step.versions


def differences(measured: Mapping[str, float], recorded: Mapping[str, float]) -> list[str]:
    """Return the differences between two sets of figures of one case, one sentence each.

    A class may change by 1 % of the recorded step, so that a single kernel launch does not fail a
    small class. Memory may change by 2 %, and shares of FLOPs by 0.01.
    """
    moved = []
    for key in sorted({*measured, *recorded}):
        new, old = measured.get(key, 0.0), recorded.get(key, 0.0)
        if key in _MEMORY:
            unit, factor, allowed = "GiB", 1.0, _SHARE_OF_MEMORY * old
        elif key == "again":
            unit, factor, allowed = "times the useful FLOPs", 1.0, _SHARE_OF_STEP
        elif key == "mfu":  # follows from the step
            continue
        else:
            unit, factor, allowed = "ms", 1e3, _SHARE_OF_STEP * recorded["step"]
        if not abs(new - old) <= allowed:
            moved.append(f"{key}: {factor * old:.4g} -> {factor * new:.4g} {unit}")
    return moved


def table(rows: list[tuple[str, dict[str, float]]]) -> str:
    """Return the cases as Markdown."""
    classes = ("products", "fp8 products", "attention", "element-wise", "copies")
    heads = ("program", "step ms", "MFU %", "FLOPs run / useful", *(f"{c} ms" for c in classes))
    lines = ["| " + " | ".join((*heads, "exposed ms", "temporaries GiB", "total GiB")) + " |"]
    lines.append("|" + "---|" * (len(heads) + 3))
    for name, row in rows:
        exposed = ", ".join(
            f"{key.removeprefix('exposed ')} {1e3 * value:.1f}"
            for key, value in row.items()
            if key.startswith("exposed") and value > 5e-5
        )
        cells = [f"{1e3 * row['step']:.1f}", f"{100 * row['mfu']:.1f}", f"{row['again']:.3f}"]
        cells += [f"{1e3 * row.get(c, 0.0):.1f}" for c in classes]
        cells += [exposed or "0", f"{row['temporary']:.2f}", f"{row['total']:.2f}"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _record(name: str, figures: dict[str, float], versions: dict[str, str]) -> None:
    """Store the figures of a case in the recorded ones."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    rounded = {key: round(value, 5) for key, value in figures.items()}
    entry = {
        "commit": commit, "date": str(datetime.date.today()), "versions": versions,
        "figures": rounded,
    }  # fmt: skip
    recorded: dict[str, Any] = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    names = [line.split()[0] for line in CASES.strip().splitlines()]
    recorded = {n: entry if n == name else recorded.get(n) for n in names}
    kept = {n: entry for n, entry in recorded.items() if entry}
    FIGURES.write_text(json.dumps(kept, indent=1) + "\n")


def _check(name: str, figures: dict[str, float], versions: dict[str, str]) -> bool:
    """Return True if the figures of a case equal the recorded ones; print the differences."""
    recorded = json.loads(FIGURES.read_text()).get(name)
    if recorded is None:
        print(f"{name}: no figures are recorded")
        return False
    if versions != recorded["versions"]:
        print(f"{name}: recorded with {recorded['versions']}, compiled with {versions}")
    moved = differences(figures, recorded["figures"])
    print("\n".join(f"{name}: {line}" for line in moved) or f"{name}: as recorded", flush=True)
    return not moved


def main() -> None:
    """Compile, analyze, print the table; record or check it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], help="cases to compile")
    parser.add_argument("--flags", default="", help="settings added to every case")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="compare with the figures recorded")
    what.add_argument("--record", action="store_true", help="record the figures")
    options = parser.parse_args()
    if options.flags and (options.record or options.check):
        parser.error("--flags make other cases than those recorded: use them alone")
    lines = {line.split()[0]: line for line in CASES.strip().splitlines()}
    if unknown := set(options.only) - set(lines):
        parser.error(f"no case {', '.join(sorted(unknown))}. There are {', '.join(lines)}")
    selected = [lines[name] for name in lines if not options.only or name in options.only]
    rows, same = [], True
    for line in selected:
        name, figures, versions = run_case(line, options.flags.split())
        rows.append((name, figures))
        if options.record:
            _record(name, figures, versions)
        if options.check:
            same &= _check(name, figures, versions)
    print(table(rows))
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
