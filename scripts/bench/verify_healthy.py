"""Does `jaxdist verify` stay silent on healthy runs?

    python scripts/bench/verify_healthy.py [--runs 200] [--seed 0] [--out TABLE.md]

Trains small models with random optimizers, families, adapters and meshes of eight simulated
devices for 5 to 8 steps, exports every second one, and verifies them. Prints each alarm, and
writes the table after each run.
About 10 s per run on 2 quiet cores.
"""

from __future__ import annotations

import argparse
import contextlib
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

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

from jaxdist import train as training  # noqa: E402
from jaxdist.tools.convert.__main__ import main as convert  # noqa: E402
from jaxdist.tools.verify.__main__ import main as verify  # noqa: E402

SIZES = [
    *("--model.d_model=32", "--model.num_layers=4", "--model.num_heads=4", "--model.mlp_dim=64"),
    *("--train.seq_len=32", "--train.global_batch_size=8", "--eval.final_max_batches=1"),
    *("--optim.warmup_steps=2", "--monitoring.tracker=", "--eval.interval_steps=0"),
]
MESHES = ("dp=8", "fsdp=8", "fsdp=4,tp=2", "dp=2,fsdp=2,tp=2", "dp=2,cp=2,tp=2", "dp=4,pp=2")
OPTIMIZERS = ("adamw", "muon", "lion", "sgd", "adafactor")
MODELS = {
    "llama": [],
    "qwen2": ["--model.bias=qkv"],
    "qwen3": ["--model.qk_norm=head"],
    "mistral": ["--model.sliding_window=16"],
    "tied": ["--model.tie_embeddings=true"],
    "experts": ["--model.num_experts=4", "--model.experts_per_token=2", "--model.norm_topk=true"],
}
EXTRAS = (
    *([], [], [], ["--optim.ema_decay=0.9"], ["--optim.freeze=embed"]),
    *(["--train.num_microbatches=2"], ["--optim.groups=embed:lr=0.5"], ["--train.remat=full"]),
)


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


def one_run(folder: Path, rng: random.Random, number: int) -> tuple[str, list[str]]:
    """Train, export and verify one random configuration; return its flags and the problems."""
    family, optimizer = rng.choice([*MODELS]), rng.choice(OPTIMIZERS)
    mesh, extra = rng.choice(MESHES), rng.choice(EXTRAS)
    steps = f"--train.steps={rng.randint(5, 8)}"
    words = [*SIZES, *MODELS[family], f"--optim.optimizer={optimizer}", f"--mesh={mesh}", steps]
    run, exports = folder / f"run{number}", number % 2 == 0
    flags = [family, optimizer, mesh, *extra]
    quiet(training.main, *words, *extra, "--run-dir", run)
    export = folder / f"hf{number}" if exports else None
    if exports:
        quiet(convert, "to-hf", run, export)
    problems = check(run, export)
    if exports and family != "experts":
        variant = rng.choice(["lora", "rslora", "dora"])
        adapted, peft = folder / f"adapted{number}", folder / f"peft{number}"
        base = [word for word in words if not word.startswith(("--model", "--optim.opt"))]
        lora = ["--init-from", export, "--lora.rank=4", f"--lora.variant={variant}"]
        quiet(training.main, *base, *lora, "--run-dir", adapted)
        quiet(convert, "to-peft", adapted, peft)
        problems += check(adapted, peft)
        flags.append(variant)
    return " ".join(flags), problems


def main(argv: Sequence[str] | None = None) -> int:
    """Run all configurations; return 1 if one caused an alarm."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    import jax

    rng, lines, num_alarms = random.Random(options.seed), [], 0
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(options.runs):
            flags, problems = one_run(Path(temporary), rng, number)
            num_alarms += bool(problems)
            lines += [f"- {flags}: {problem}" for problem in problems]
            print(number, flags, problems or "healthy", flush=True)
            result = (
                "# Healthy runs under `jaxdist verify`\n\n`python scripts/bench/verify_healthy.py "
                f"--runs {options.runs} --seed {options.seed}`, Python "
                f"{platform.python_version()}, jax {jax.__version__}, 8 simulated devices: "
                f"{num_alarms} of the {number + 1} runs that ended caused an alarm. Every second "
                "run was also exported, and adapters were trained and exported from it.\n\n"
            )
            if options.out:
                options.out.write_text((result + "\n".join(lines)).rstrip("\n") + "\n")
    print(result, "\n".join(lines))
    return 1 if num_alarms else 0


if __name__ == "__main__":
    sys.exit(main())
