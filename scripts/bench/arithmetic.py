"""Does LoRA reach the accuracy of full fine-tuning with 5 % of the parameters?

    python scripts/bench/arithmetic.py [--steps 800] [--base-steps 300] [--out TABLE.md]

Trains a small byte model on the default data, then adapts it to the addition of two-digit numbers
in chat form, at the same time with all weights and with LoRA. Of the 1,980 sums below 100 without a
carry, 400 are held out; an answer counts if its complete greedy text is right. The head of so small
a base model is not confident of any token, so LoRA also trains the rows of the tokens in answers
(`lora.token_ids`). The adapters are then merged, and compared in float32 and bfloat16. Only the
commands of a user run. About 5 minutes on 2 quiet cores.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import platform
import random
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
JOB = [
    *("--model.d-model=128", "--model.num-layers=4", "--model.num-heads=4"),
    *("--model.mlp-dim=256", "--model.vocab-size=256", "--data.tokenizer=bytes"),
    *("--train.seq-len=64", "--eval.interval-steps=0", "--eval.final-max-batches=2"),
    *("--monitoring.tracker=", "--mesh=dp=1"),
]
METHODS = {
    "all weights": ["--optim.peak-lr=2e-3"],
    "LoRA": [
        *("--lora.rank=3", "--lora.alpha=6", "--lora.base-format=float32"),
        f"--lora.token-ids={','.join(map(str, b'0123456789' + bytes(1)))}",
        "--optim.peak-lr=6e-3",
    ],
}


def talk(a: int, b: int) -> list[dict[str, str]]:
    """Return a question and its answer."""
    return [{"role": "user", "content": f"{a}+{b}"}, {"role": "assistant", "content": f"{a + b}"}]


def sums() -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the pairs to learn from, and those that are held out."""
    numbers = range(10, 100)
    pairs = [(a, b) for a in numbers for b in numbers if a % 10 + b % 10 < 10 and a + b < 100]
    random.Random(0).shuffle(pairs)
    return pairs[400:], pairs[:400]


def run(command: str, *words: object) -> str:
    """Run a command of jaxdist; return its log."""
    line = [sys.executable, "-m", f"jaxdist.{command}", *map(str, words)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(line, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(line)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout + done.stderr


def answers(trained: Path, asks: Path) -> list[str]:
    """Return the greedy answers of a run to the held-out sums."""
    out = trained.with_suffix(".jsonl")
    out.unlink(missing_ok=True)
    words = ["--chat", "--temperature=0", "--max-new-tokens=4", "--batch-size=100"]
    run("generate", trained, *words, "--prompt-file", asks, "--out", out)
    return [json.loads(line)["messages"][-1]["content"] for line in out.read_text().splitlines()]


def measure(folder: Path, steps: int, base_steps: int) -> list[str]:
    """Train all models in a folder; return the lines of the table."""
    learned, held_out = sums()
    asks, data = folder / "asks.jsonl", folder / "sums.jsonl"
    lines = lambda records: "".join(json.dumps({"messages": one}) + "\n" for one in records)
    data.write_text(lines(talk(*pair) for pair in learned))
    asks.write_text(lines(talk(*pair)[:1] for pair in held_out))
    right = [talk(*pair)[-1]["content"] for pair in held_out]
    accuracy = lambda got: f"{100 * sum(map(str.__eq__, got, right)) / len(right):.1f}"

    base = folder / "base"
    run("train", *JOB, "--run-dir", base, f"--train.steps={base_steps}")
    rows = ["| trained | % of parameters | held-out accuracy, % |", "|---|---|---|"]
    texts = []
    rows += [f"| nothing | 0 | {accuracy(answers(base, asks))} |"]

    def tune(name: str) -> str:
        """Train a model, and return its row of the table."""
        chat = [f"--data.sources={data}", "--data.records=chat", "--data.packing=best_fit"]
        chat += [*JOB, *METHODS[name], f"--train.steps={steps}", "--init-from", base]
        log = run("train", *chat, "--run-dir", folder / name)
        count = re.search(r"trained parameters \(([\d.]+) %", log)
        row = (
            f"| {name} | {count[1] if count else 100} | {accuracy(answers(folder / name, asks))} |"
        )
        print(row, flush=True)
        return row

    with concurrent.futures.ThreadPoolExecutor(len(METHODS)) as pool:
        rows += pool.map(tune, METHODS)
    tuned = folder / "LoRA"
    for dtype in ("float32", "bfloat16"):
        if dtype == "bfloat16":  # a further step stores the dtype in the settings of the run
            more = [f"--train.steps={steps + 1}", "--precision.compute-dtype=bfloat16"]
            run("train", "--resume", tuned, *more)
        merged = folder / f"merged-{dtype}"
        run("convert", "merge", tuned, merged)
        pairs = [*zip(answers(tuned, asks), answers(merged, asks), strict=True)]
        tokens = sum(one[:1] == two[:1] for one, two in pairs)
        equal = sum(one == two for one, two in pairs)
        total = len(pairs)
        texts.append(
            f"In {dtype}, merged and unmerged adapters have the same first greedy token for "
            f"{tokens} of {total} prompts, and the same answer to {equal}."
        )
    return [*rows, "", *texts]


def main() -> None:
    """Print the result, and write it if `--out` is set."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--base-steps", type=int, default=300)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(folder), options.steps, options.base_steps)
    steps = f"--steps {options.steps} --base-steps {options.base_steps}"
    text = "\n".join(
        [
            "# Two-digit addition: LoRA and full fine-tuning\n",
            f"`python scripts/bench/arithmetic.py {steps}`, Python {platform.python_version()}, "
            f"jax {version('jax')}, {os.cpu_count()} CPU cores shared with other work.\n",
            *rows,
        ]
    )
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
