"""Compare the planner's memory with the GPU compiler's; writes a table and its numbers.

    python scripts/bench/plan_memory.py [--only NAME ...]

Needs the extra `plan` (no GPU). Each case compiles the train step of a config on a mesh, which
takes half a minute on 2 cores. Results go to `results/plan_memory.json`, which a test compares with
the current estimate, and to `results/plan_memory.md`. Existing cases are kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
from pathlib import Path
from typing import Any

from jaxdist.config import RunConfig, read_run
from jaxdist.core.mesh import MeshSpec
from jaxdist.hardware import GIB, parse_gpus
from jaxdist.plan.compiled.check import NotCompiled, compile_step
from jaxdist.plan.estimate.job import Job
from jaxdist.plan.estimate.memory import estimate_memory
from jaxdist.runtime.formatting.numbers import percent

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
NUMBERS, TABLE = RESULTS / "plan_memory.json", RESULTS / "plan_memory.md"

# name, GPUs, config, flags; the mesh is the config's unless a flag sets it.
CASES = """
gpt2_dp8              h100:8   gpt2_124m
gpt2_one              h100:1   gpt2_124m --mesh dp=1 --train.num_microbatches 32
gpt2_one_none         h100:1   gpt2_124m --mesh dp=1 --train.num_microbatches 32 --train.remat none
gpt2_one_full         h100:1   gpt2_124m --mesh dp=1 --train.num_microbatches 32 --train.remat full
gpt2_zero1            h100:8   gpt2_124m --zero 1
gpt2_zero2            h100:8   gpt2_124m --zero 2
gpt2_zero3            h100:8   gpt2_124m --zero 3
gpt2_lion             h100:8   gpt2_124m --optim.optimizer lion
gpt2_muon             h100:8   gpt2_124m --optim.optimizer muon
gpt2_adafactor        h100:8   gpt2_124m --optim.optimizer adafactor
gpt2_pp2dp2tp2        h100:8   gpt2_124m --mesh pp=2,dp=2,tp=2 --train.num_microbatches 8
qwen06_l4             l4:8     qwen3_0.6b
qwen8b_fsdp8          h100:8   qwen3_8b
8b_fsdp8              h100:8   llama3_8b
8b_fsdp8_dots         h100:8   llama3_8b --train.remat dots
8b_fsdp8_none         h100:8   llama3_8b --train.remat none
8b_fsdp8_names        h100:8   llama3_8b --train.remat names:qkv,attention
8b_fsdp8_at_once      h100:8   llama3_8b --train.num_microbatches 1 --train.global_batch_size 8
8b_fsdp8_a100         a100-80:8 llama3_8b
8b_fsdp4tp2           h100:8   llama3_8b --mesh fsdp=4,tp=2
8b_tp8                h100:8   llama3_8b --mesh tp=8 --train.global_batch_size 16
8b_dp8fsdp8_zero1     h100:64  llama3_8b --mesh dp=8,fsdp=8 --train.num_microbatches 2 --zero 1
8b_lora               h100:1   llama3_8b_lora
8b_qlora              l4:1     llama3_8b_qlora
70b_lora              h100:8   llama3_70b_lora --train.remat names:attention,attention_out
8b_xla_attention      h100:8   llama3_8b --model.attention xla --train.seq_len 2048
13b_pp4dp4tp4         h100:64  pipeline_64gpu
13b_stages_none       h100:64  pipeline_64gpu --train.remat none
13b_stages_full       h100:64  pipeline_64gpu --train.remat full
13b_stages1           h100:64  pipeline_64gpu --pipeline.num_virtual_stages 1
13b_stages2_action h100:64 pipeline_64gpu --pipeline.num_virtual_stages 2 --pipeline.gather action
13b_stages_fsdp       h100:64  pipeline_64gpu --zero 0 --mesh pp=4,fsdp=4,tp=4
13b_fsdp_action h100:64 pipeline_64gpu --zero 0 --mesh pp=4,fsdp=4,tp=4 --pipeline.gather action
13b_muon h200:8 pipeline_64gpu --zero 0 --mesh fsdp=8 --train.remat full --optim.optimizer muon
70b_fsdp16tp8         h100:128 llama3_70b
70b_fsdp16tp8_dots    h100:128 llama3_70b --train.remat dots
70b_zero3             h200:128 llama3_70b --mesh dp=128 --zero 3 --train.num_microbatches 1
70b_fsdp64            h200:64  llama3_70b --mesh fsdp=64 --train.num_microbatches 4
70b_pp4fsdp4tp8       h100:128 llama3_70b --mesh pp=4,fsdp=4,tp=8 --train.num_microbatches 16
405b_fsdp256tp2       h100:512 llama3_405b
405b_fsdp64tp8        h100:512 llama3_405b --mesh fsdp=64,tp=8
405b_pp2fsdp32tp8     h100:512 llama3_405b --mesh pp=2,fsdp=32,tp=8 --train.num_microbatches 8
"""


# Settings of the compiled numbers that no line above and no flag sets. The shipped configs follow
# the planner's advice, so they may change.
SETTINGS = {
    "gpt2_124m": {"train.remat": "dots", "train.num_microbatches": "4"},
    "qwen3_0.6b": {"train.remat": "dots"},
    "qwen3_8b": {"train.remat": "full"},
    "llama3_8b": {"train.remat": "full", "train.num_microbatches": "16"},
    "llama3_70b": {"mesh": "fsdp=16,tp=8", "train.remat": "full", "train.num_microbatches": "8"},
    "pipeline_64gpu": {
        "train.remat": "dots",
        "pipeline.num_virtual_stages": "5",
        "pipeline.gather": "step",
    },
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One line of `CASES`."""

    name: str
    gpus: str
    config: str
    flags: tuple[str, ...]

    @functools.cached_property
    def run(self) -> RunConfig:
        """Return the settings; data need not exist."""
        argv = ["--config", str(ROOT / "configs" / f"{self.config}.toml"), *self.flags]
        for name, value in SETTINGS.get(self.config, {}).items():
            if not any(flag.partition("=")[0] == f"--{name}" for flag in self.flags):
                argv += [f"--{name}", value]
        argv += ["--data.sources", "stdlib", "--data.tokenizer", "bytes"]
        return read_run(argv, command="plan_memory")

    @functools.cached_property
    def job(self) -> Job:
        """Return the estimate."""
        cluster = parse_gpus(self.gpus)[0]
        spec = MeshSpec.parse(self.run.mesh.shape, cluster.num_gpus)
        return Job.of(self.run, spec, cluster)


def cases() -> list[Case]:
    """Return all cases."""
    shipped = []
    for line in CASES.strip().splitlines():
        name, gpus, config, *flags = line.split()
        shipped.append(Case(name, gpus, config, tuple(flags)))
    return shipped


def compiled(case: Case) -> dict[str, Any]:
    """Return the memory according to the compiler, in bytes."""
    job = case.job
    step = compile_step(job.config, job.spec, job.cluster, timeout_s=600)
    if isinstance(step, NotCompiled):
        raise SystemExit(f"{case.name}: {step.reason}. {step.fix}\n{step.details}")
    return {
        **dataclasses.asdict(step.memory),
        "total_bytes": step.memory.total_bytes,
        "compile_s": round(step.compile_s, 1),
        "versions": step.versions,
    }


def estimated(case: Case) -> float:
    """Return the total bytes estimated by the planner."""
    return estimate_memory(case.job).total_bytes


def table(numbers: dict[str, Any]) -> str:
    """Return the comparison as Markdown."""
    rows, errors = [], []
    for case in cases():
        if case.name not in numbers:
            continue
        total, guess = numbers[case.name]["total_bytes"], estimated(case)
        errors.append(guess / total - 1)
        flags = " ".join(case.flags) or "as it is"
        rows.append(
            f"| {case.config} | {flags} | {case.gpus} | {case.job.spec} | {total / GIB:.2f} | "
            f"{guess / GIB:.2f} | {percent(errors[-1], sign=True)} |"
        )
    size = list(map(abs, errors))
    versions = next(iter(numbers.values()))["versions"] if numbers else {}
    return "\n".join(
        [
            "# Memory of one device: estimated against compiled",
            "",
            "Written by `python scripts/bench/plan_memory.py`: argument + output − alias + "
            "temporary + attention workspace of the real XLA:GPU compiler, without a GPU "
            f"({', '.join(f'{k} {v}' for k, v in versions.items())}). GiB.",
            "",
            "405B with tp and no pp was compiled before rows went through layers in groups.",
            "",
            f"{len(size)} programs: {sum(e <= 0.05 for e in size)} within 5 %, "
            f"{sum(e <= 0.10 for e in size)} within 10 %; median of |error| "
            f"{percent(statistics.median(size))}, largest {percent(max(size))}.",
            "",
            "| config | flags | GPUs | mesh | compiled | estimated | error |",
            "|---|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> None:
    """Compile the missing cases, then write both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=None, metavar="NAME")
    arguments = parser.parse_args()
    numbers = json.loads(NUMBERS.read_text()) if NUMBERS.exists() else {}
    for case in cases():
        if case.name in numbers or (arguments.only is not None and case.name not in arguments.only):
            continue
        numbers[case.name] = compiled(case)
        error = estimated(case) / numbers[case.name]["total_bytes"] - 1
        print(
            f"{case.name:<22}{numbers[case.name]['total_bytes'] / GIB:8.2f} GiB "
            f"{percent(error, sign=True)}",
            flush=True,
        )
        NUMBERS.write_text(json.dumps(numbers, indent=1) + "\n")
    TABLE.write_text(table(numbers), encoding="utf-8")
    print(f"wrote {TABLE}")


if __name__ == "__main__":
    main()
