"""Where the time of the compiled GPU step goes, without a GPU: a roofline over its schedule.

    python scripts/bench/gpu_program.py [--only NAME ...] [--out TABLE.md] [--flags "--a.b c ..."]

Each case is a run's own train step, compiled by the real XLA:GPU compiler (the extra `plan`) for
GPUs that are not here, and taken apart by `jaxdist.plan.compiled.roofline`: seconds by class of
work, exposed traffic by mesh axis, model FLOPs utilisation (causal). `--flags` are added to every
case, to compare two programs. Nothing here was measured on a GPU: programs for one GPU compare
well, absolute times are 5 to 15 % too short.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
from pathlib import Path

from jaxdist.config import read_run
from jaxdist.core.mesh import MeshSpec
from jaxdist.models import build
from jaxdist.plan.compiled.check import NotCompiled, compile_step
from jaxdist.plan.hardware import GIB, parse_gpus

ROOT = Path(__file__).parents[2]

MEDIUM = (
    "--mesh dp=1 --model.d_model 2048 --model.num_layers 24 --model.num_heads 16"
    " --model.num_kv_heads 16 --model.mlp_dim 5632 --train.seq_len 4096"
    " --train.global_batch_size 4 --train.num_microbatches 1 --train.remat dots"
)
LONG = "--train.seq_len 8192 --train.remat dots --train.num_microbatches 8"

# name, GPUs, config, flags; the mesh is the config's where no flag names one.
CASES = f"""
gpt2_124m       h100:8   gpt2_124m
1.7b_4096       h200:1   llama3_8b {MEDIUM}
8b_4096         h100:8   llama3_8b --train.seq_len 4096 --train.remat dots
8b_8192         h100:8   llama3_8b {LONG}
8b_8192_fp8     h100:8   llama3_8b {LONG} --precision.matmul-dtype fp8
8b_8192_packed  h100:8   llama3_8b {LONG} --data.packing documents
8b_fsdp4tp2     h100:8   llama3_8b --mesh fsdp=4,tp=2
70b_fsdp16tp8   h100:128 llama3_70b
13b_pipeline    h100:64  pipeline_64gpu
"""


def run_case(line: str, more: list[str]) -> tuple[str, dict[str, float]]:
    """(name, seconds by class, memory and utilisation) of one case."""
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
    times = step.times
    print(f"{name}: {times.calls}, compiled in {step.compile_s:.0f} s", flush=True)
    return name, {
        "step": times.seconds,
        "mfu": flops / times.seconds / cluster.gpu.peak_flops["bfloat16"],
        "again": times.flops / flops,
        "temporary": step.memory.temporary_bytes / GIB,
        "total": step.memory.total_bytes / GIB,
        **times.classes,
    }


def table(rows: list[tuple[str, dict[str, float]]]) -> str:
    """The cases as Markdown."""
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


def main() -> None:
    """Compile, take apart, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=[], help="cases to compile")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    parser.add_argument("--flags", default="", help="settings added to every case")
    options = parser.parse_args()
    lines = CASES.strip().splitlines()
    wanted = [line for line in lines if not options.only or line.split()[0] in options.only]
    rows = [run_case(line, options.flags.split()) for line in wanted]
    text = table(rows)
    print(text)
    if options.out:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
        ).stdout.strip()
        command = f"python scripts/bench/gpu_program.py {options.flags and repr(options.flags)}"
        head = (
            f"# The compiled GPU step, taken apart\n\n`{command.strip()}`, commit {commit}, "
            f"{datetime.date.today()}. No GPU took part: modelled times, see the script.\n\n"
        )
        options.out.write_text(head + text)


if __name__ == "__main__":
    main()
