"""Does `jaxdist verify` stay silent on healthy runs?

    python scripts/bench/verify_healthy.py [--runs 200] [--seed 0] [--out TABLE.md]

Trains small models for 5 to 8 steps on four simulated devices, each with random settings: family,
optimizer, format of its moments, mesh, objective, and every second one adapters of the last export
(variant, format of the frozen weights, trained token rows). A third is resumed on another mesh.
Each pair of settings runs three times, with other weights and data, because compiled programs are
then reused. Verifies each run, most of them with an export. Prints each alarm, and writes the table
after each run. About 8 s per run on 2 quiet cores.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import platform
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

# Most of the time is compilation, and the programs are tiny.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true"
)

from jaxdist import train as training  # noqa: E402
from jaxdist.tools.convert.__main__ import main as convert  # noqa: E402
from jaxdist.tools.verify.__main__ import main as verify  # noqa: E402

SIZES = [
    *("--model.d_model=64", "--model.num_layers=2", "--model.num_heads=4", "--model.mlp_dim=128"),
    *("--train.seq_len=32", "--train.global_batch_size=8", "--data.eval_fraction=0"),
    *("--optim.warmup_steps=2", "--monitoring.tracker=", "--resilience.sdc_check_interval_steps=0"),
    "--override=audit",
]
UNCUT = ("dp=4", "dp=2,pp=2")  # cut no block of a quantized weight
MESHES = (
    *(*UNCUT, "dp=2,cp=2", "cp=2,pp=2", "fsdp=4", "fsdp=2,tp=2", "cp=2,tp=2", "fsdp=2,pp=2"),
    "pp=2,tp=2",
)
OPTIMIZERS = ("adamw", "adamw", "muon", "lion", "sgd", "adafactor")
MODELS = {
    "llama": [],
    "qwen2": ["--model.bias=qkv"],
    "qwen3": ["--model.qk_norm=head"],
    "mistral": ["--model.sliding_window=16"],
    "tied": ["--model.tie_embeddings=true"],
    "experts": ["--model.num_experts=4", "--model.experts_per_token=2", "--model.norm_topk=true"],
}
EXTRAS = (
    *([], [], ["--optim.ema_decay=0.9"], ["--optim.freeze=embed"], ["--train.remat=full"]),
    *(["--train.num_microbatches=2"], ["--optim.groups=embed:lr=0.5"], ["--train.z_loss=1e-4"]),
)
OBJECTIVES = ("text", "text", "chat", "dpo", "orpo", "distill")


@dataclasses.dataclass(frozen=True)
class Base:
    """An exported model: its directory, whether it has experts or a tied head."""

    path: Path
    has_experts: bool
    is_tied: bool


def quiet(main: object, *words: object) -> tuple[int, str]:
    """Return exit code and output of a command in this process."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(io.StringIO()):
        code = main([str(word) for word in words])  # type: ignore[operator]
    return code, text.getvalue()


def check(run: Path, export: Path | None) -> list[str]:
    """Return the problems that `verify` reports."""
    words = [run, "--json", *(["--export", export] if export else [])]
    _, text = quiet(verify, *words)
    return [problem for one in json.loads(text)["checks"] for problem in one["problems"]]


def write_records(folder: Path) -> None:
    """Write chats and preferences of one turn."""
    answer = lambda text: [{"role": "assistant", "content": text}]
    ask = lambda i: [{"role": "user", "content": f"{i} + 1?"}]
    chats = [{"messages": ask(i) + answer(f"{i + 1}")} for i in range(256)]
    pairs = [
        {"prompt": ask(i), "chosen": answer(f"{i + 1}"), "rejected": answer("no")}
        for i in range(256)
    ]
    for name, records in (("chats", chats), ("pairs", pairs)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))


def objective(name: str, folder: Path, base: Base) -> list[str]:
    """Return the flags of an objective."""
    if name in ("dpo", "orpo"):
        records = [f"--data.sources={folder}/pairs.jsonl", "--data.records=preference"]
        return [*records, f"--objective.kind={name}"]
    if name == "chat":
        return [f"--data.sources={folder}/chats.jsonl", "--data.records=chat"]
    return ["--objective.kind=distill", f"--objective.teacher={base.path}"] * (name == "distill")


def train(run: Path, rng: random.Random, meshes: Sequence[str], words: list[str]) -> str:
    """Train a run, a third of them in two parts on two meshes; return the meshes as text."""
    first, second, steps = rng.choice(meshes), rng.choice(meshes), rng.randint(5, 8)
    is_resumed = rng.random() < 1 / 3
    seed = f"--seed={run.name.removeprefix('run')}"
    flags = [f"--mesh={first}", f"--train.steps={steps}", *words, f"--run-dir={run}", seed]
    if is_resumed:
        flags += [f"--checkpoint.save_interval_steps={steps}"]
    code, text = quiet(training.main, *flags)
    assert code == 0, text
    if not is_resumed:
        return first
    again = [f"--resume={run}", f"--mesh={second}", f"--train.steps={steps + 3}"]
    code, text = quiet(training.main, *again)
    assert code == 0, text
    return f"{first} then {second}"


def full_run(folder: Path, rng: random.Random, number: int) -> tuple[str, list[str], Base]:
    """Train and verify all weights of a random model; return its settings, problems, export."""
    family, optimizer, extra = rng.choice([*MODELS]), rng.choice(OPTIMIZERS), rng.choice(EXTRAS)
    run, export = folder / f"run{number}", folder / f"hf{number}"
    words = [*SIZES, *MODELS[family], f"--optim.optimizer={optimizer}", *extra]
    if optimizer == "adamw" and not extra and (dtype := rng.choice(["", "bfloat16", "int8"])):
        words.append(f"--optim.moment_dtype={dtype}")
    mesh = train(run, rng, MESHES, words)
    quiet(convert, "to-hf", run, export)
    problems = check(run, export)
    changes = " ".join(word for word in words[len(SIZES) :])
    return f"{mesh} {changes}", problems, Base(export, family == "experts", family == "tied")


def adapted_run(folder: Path, rng: random.Random, number: int, base: Base) -> tuple[str, list[str]]:
    """Train and verify random adapters of an export; return the settings and the problems."""
    run, export = folder / f"run{number}", folder / f"export{number}"
    stored = rng.choice(["bf16", "float32", "nf4", "int8"])
    variant = rng.choice(["lora", "rslora"] if base.has_experts else ["lora", "rslora", "dora"])
    words = [
        *("--lora.rank=4", f"--lora.variant={variant}", f"--lora.base_format={stored}"),
        *rng.choice([[], ["--lora.token_ids=0,31"], ["--lora.targets=attention"]]),
    ]
    if variant != "dora" and not base.has_experts:
        words += rng.choice([[], ["--lora.dropout=0.1"]])
    kind = rng.choice(OBJECTIVES[:3] if base.has_experts else OBJECTIVES)
    words += objective(kind, folder, base)
    own = [word for word in SIZES if not word.startswith("--model")]
    meshes = UNCUT if stored in ("nf4", "int8") else MESHES
    mesh = train(run, rng, meshes, [*own, f"--init-from={base.path}", *words])
    command = rng.choice(["to-peft", "merge", ""])
    if command:
        quiet(convert, command, run, export)
    changes = " ".join(word for word in words if str(folder) not in word)
    problems = check(run, export if command else None)
    return f"{mesh} {kind} {changes} {command}", problems


def main(argv: Sequence[str] | None = None) -> int:
    """Run all configurations; return 1 if one caused an alarm."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    import jax

    lines, num_alarms = [], 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_records(folder)
        for number in range(options.runs):
            rng = random.Random(f"{options.seed} {number // 6} {number % 2}")
            if number % 2 == 0:
                flags, problems, base = full_run(folder, rng, number)
            else:
                flags, problems = adapted_run(folder, rng, number, base)
            num_alarms += bool(problems)
            lines += [f"- {flags}: {problem}" for problem in problems]
            print(number, flags, problems or "healthy", flush=True)
            result = (
                "# Healthy runs under `jaxdist verify`\n\n`python scripts/bench/verify_healthy.py "
                f"--runs {options.runs} --seed {options.seed}`, Python "
                f"{platform.python_version()}, jax {jax.__version__}, 4 simulated devices: "
                f"{num_alarms} of the {number + 1} runs that ended caused an alarm. Every second "
                "run trained adapters of the export of the run before it.\n\n"
            )
            if options.out:
                options.out.write_text((result + "\n".join(lines)).rstrip("\n") + "\n")
    print(result, "\n".join(lines))
    return 1 if num_alarms else 0


if __name__ == "__main__":
    sys.exit(main())
