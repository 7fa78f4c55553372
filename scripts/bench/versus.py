r"""Tokens per second of ours, a hand-written JAX step, PyTorch and rivals, interleaved on the CPU.

    python scripts/bench/versus.py --out scripts/bench/results/versus.md
    python scripts/bench/versus.py --python pytorch=/path/to/venv/bin/python \
        --rival "nanoGPT=/path/to/venv/bin/python:/path/to/nanogpt_contender.py --eager"

All train the same decoder (RMSNorm, rotary positions, causal attention, SwiGLU, untied head) on the
same batches in float32 with AdamW, at three shapes. Each runs in a separate process that stays
warm. In a round every contender runs one block of steps in turn; the next round starts with the
next contender. A ratio is the median of the ratios of the rounds, so a temporary slowdown of the
machine affects both sides of it. Contenders use as many threads as this process may use cores:
`taskset -c 0,1 python scripts/bench/versus.py` for two.

A contender that is not installed, crashes, hangs, does not learn, or whose number of parameters
differs by more than 1 % is excluded, and the page gives the reason.

A rival is a program of yours, started as `PYTHON SCRIPT.py ARGUMENTS JOB.json`, or with `-m MODULE`
for a name without `.py`:

1. It reads the job: `vocab_size`, `d_model`, `num_layers`, `num_heads`, `num_kv_heads`, `mlp_dim`,
   `seq_len`, `batch_size`, `norm_eps`, `rope_theta`, `init_std`; for AdamW with gradient clipping
   and a constant learning rate: `learning_rate`, `beta1`, `beta2`, `eps`, `weight_decay` (matrices
   only), `max_grad_norm`; `cores`, the number of threads; `batches`, each a list of rows of
   seq_len + 1 tokens: the first seq_len are the input, the last seq_len the targets. Step n trains
   on batch n modulo the number of batches.
2. When it is ready, it prints one line of JSON: `{"parameters": 10818432, "versions":
   {"torch": "2.9.0"}, "threads": 2}`.
3. For each line `{"steps": 2}` on stdin it trains that many steps, waits for the last, and prints
   `{"seconds": 2.71, "loss": 5.43}`: the time of the block, and the loss of its last step.
4. It exits when its stdin is closed. Its log is its stderr, and every line of its stdout that is
   not a JSON object.

`versus_pytorch.py` is an example; `versus_pipe.serve` implements steps 2 to 4 for Python programs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import platform
import random
import re
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from versus_pipe import Contender, LeftOut

HERE = Path(__file__).resolve().parent
OURS = "ours"
BUILT_IN = {
    OURS: ["versus_jax.py", "ours"],
    "bare": ["versus_jax.py", "bare"],
    "pytorch": ["versus_pytorch.py"],
}
"""Contender -> script in this folder, and its arguments."""

LEGEND = (
    "`ours` is the compiled step of a run, `bare` the fastest step that we wrote by hand in JAX "
    "(`bare.py`), `pytorch` eager PyTorch (`versus_pytorch.py`). Others are programs of the user."
)
NUM_BATCHES = 4
ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str((1 << 63) - 1),
}
"""Settings with which glibc keeps freed memory, as a run of jaxdist does."""
PAUSE_S = 0.3  # OpenMP threads of a finished contender spin for up to 0.2 s


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of the model and of a batch."""

    vocab_size: int
    seq_len: int
    batch_size: int
    d_model: int = 384
    num_layers: int = 6
    num_heads: int = 6
    num_kv_heads: int = 6
    mlp_dim: int = 1024

    @property
    def num_params(self) -> int:
        """Number of parameters, with separate embedding and head."""
        head_dim = self.d_model // self.num_heads
        attention = self.d_model * (2 * self.num_heads + 2 * self.num_kv_heads) * head_dim
        layer = attention + 3 * self.d_model * self.mlp_dim + 2 * self.d_model
        return self.num_layers * layer + 2 * self.vocab_size * self.d_model + self.d_model

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch_size * self.seq_len


SHAPES = {
    "vocab-256": Shape(256, 256, 8),
    "vocab-32k": Shape(32768, 256, 8),
    "rows-1024": Shape(256, 1024, 2),
}
TRAINING = {
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "init_std": 0.02,
    "learning_rate": 1e-3,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Number of repetitions and pauses of the measurement.

    Attributes:
        rounds: blocks of each contender.
        block_steps: steps of a block.
        warmup_steps: single steps before the first round, the first of which compiles.
        timeout_s: timeout of an answer, after which a contender counts as hung.
        pause_s: pause between two blocks.
    """

    rounds: int = 5
    block_steps: int = 2
    warmup_steps: int = 3
    timeout_s: float = 120.0
    pause_s: float = PAUSE_S


class Race:
    """The contenders of one shape.

    Attributes:
        running: measured contenders.
        left_out: excluded contenders, each with its reason.
    """

    def __init__(self, shape: Shape, settings: Settings):
        self.shape, self.settings = shape, settings
        self.running: dict[str, Contender] = {}
        self.left_out: dict[str, str] = {}

    def run(self, commands: dict[str, list[str]]) -> Race:
        """Start, warm up, measure and stop all contenders; only one works at a time."""
        limit = self.settings.timeout_s
        with tempfile.TemporaryDirectory(prefix="versus-") as folder:
            job = Path(folder) / "job.json"
            job.write_text(json.dumps(make_job(self.shape)))
            try:
                for number, (name, command) in enumerate(commands.items()):
                    self._start(name, [*command, str(job)], Path(folder) / f"{number}.log")
                    self._try(name, lambda it: it.ready(self.shape.num_params, limit))
                    for _ in range(self.settings.warmup_steps):
                        self._try(name, lambda it: it.train(1, limit))
                for number in range(self.settings.rounds):
                    for name in turns(list(self.running), number):
                        self._try(name, self._block)
                for name in list(self.running):
                    self._try(name, check_learning)
            finally:
                for contender in self.running.values():
                    contender.stop()
        return self

    def _start(self, name: str, command: list[str], log: Path) -> None:
        try:
            self.running[name] = Contender(command, environment_of(command), log)
        except OSError as error:
            self.left_out[name] = f"does not start: {error.strerror}"

    def _block(self, contender: Contender) -> None:
        time.sleep(self.settings.pause_s)
        steps = self.settings.block_steps
        before = contender.processor_s()
        contender.blocks.append(contender.train(steps, self.settings.timeout_s) / steps)
        contender.processor.append(contender.processor_s() - before)

    def _try(self, name: str, action: Callable[[Contender], object]) -> None:
        """Run an action with a contender that still runs; exclude the contender if it fails."""
        if name not in self.running:
            return
        try:
            action(self.running[name])
        except LeftOut as error:
            contender = self.running.pop(name)
            contender.stop(wait_s=0)
            self.left_out[name] = str(error)
            lines = [f"{name} is left out: {error}", *contender.last_lines()]
            print(*lines, sep="\n  ", file=sys.stderr)


def turns(names: list[str], round_number: int) -> list[str]:
    """Return the order of a round: each round starts with the next contender."""
    first = round_number % len(names) if names else 0
    return names[first:] + names[:first]


def environment_of(command: list[str]) -> dict[str, str]:
    """Return the environment of a contender; our own import this checkout of the package.

    All have the same settings of glibc's allocator.
    """
    environment = {**os.environ, **ALLOCATOR}
    if Path(command[1]).parent != HERE:
        return environment
    roots = [str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, roots))}


def check_learning(contender: Contender) -> None:
    """Raise `LeftOut` if the last loss is not below the first."""
    first, last = contender.losses[0], contender.losses[-1]
    if not last < first:
        raise LeftOut(f"does not learn: loss {first:.4g} at the first step, {last:.4g} at the last")


def make_job(shape: Shape) -> dict[str, Any]:
    """Return the training data. Low tokens are more frequent, so that the loss can fall."""
    draw = random.Random(0).random
    row = lambda: [int(shape.vocab_size * draw() ** 3) for _ in range(shape.seq_len + 1)]
    batches = [[row() for _ in range(shape.batch_size)] for _ in range(NUM_BATCHES)]
    cores = len(os.sched_getaffinity(0))
    return {**dataclasses.asdict(shape), **TRAINING, "cores": cores, "batches": batches}


def ratio_to_ours(ours: list[float], other: list[float]) -> float:
    """Return our speedup over the other contender, as the median over the rounds."""
    return statistics.median(b / a for a, b in zip(ours, other, strict=True))


def report(races: dict[str, Race], settings: Settings, machine: dict[str, str]) -> str:
    """Return the page: a summary table, all numbers, and the conditions."""
    names = list(dict.fromkeys(name for race in races.values() for name in race.running))
    lines = ["# Ours beside others on the CPU", "", "Written by `scripts/bench/versus.py`.", ""]
    lines += [LEGEND, ""]
    lines += ["Tokens/s, medians; in brackets ours ÷ it, so above 1 ours is faster.", ""]
    lines += row_of("shape", *names) + row_of("---", *("---" for _ in names))
    for shape_name, race in races.items():
        lines += row_of(shape_name, *(short_cell(race, name) for name in names))
    for shape_name, race in races.items():
        lines += ["", f"## {shape_name}", "", describe(race.shape), "", *details(race)]
    lines += ["", "## Conditions", ""]
    lines += [f"- {name}: {value}" for name, value in machine.items()]
    lines += [f"- {name}: {result}" for name, result in versions(races).items()]
    return "\n".join([*lines, *explanation(settings)]) + "\n"


def row_of(*cells: str) -> list[str]:
    """Return one row of a Markdown table."""
    return ["| " + " | ".join(cells) + " |"]


def speeds(race: Race, name: str) -> list[float]:
    """Return the tokens per second of each block."""
    return [race.shape.tokens / seconds for seconds in race.running[name].blocks]


def short_cell(race: Race, name: str) -> str:
    """Return median tokens/s and the ratio, or a note that it was excluded."""
    if name not in race.running:
        return "not measured"
    median = f"{statistics.median(speeds(race, name)):,.0f}"
    return median if name == OURS or OURS not in race.running else f"{median} ({ratio(race, name)})"


def ratio(race: Race, name: str, numbers: str = "blocks") -> str:
    """Return `ratio_to_ours` as text; a dash if ours was not measured."""
    if OURS not in race.running:
        return "–"
    ours, other = race.running[OURS], race.running[name]
    return f"{ratio_to_ours(getattr(ours, numbers), getattr(other, numbers)):.2f} ×"


def describe(shape: Shape) -> str:
    """Return the sizes in one line."""
    return (
        f"{shape.num_layers} layers of {shape.d_model}, {shape.num_heads} heads, MLP of "
        f"{shape.mlp_dim}, vocabulary of {shape.vocab_size:,}: {shape.num_params:,} parameters. "
        f"{shape.batch_size} rows of {shape.seq_len:,} tokens a step, float32, AdamW."
    )


def details(race: Race) -> list[str]:
    """Return the table of one shape."""
    columns = ("contender", "tokens/s, median", "min–max", "ours ÷ it", "by processor time")
    columns += ("parameters",)
    lines = row_of(*columns, "loss of the first steps", "of the last")
    lines += row_of(*("---" for _ in range(len(columns) + 2)))
    for name, contender in race.running.items():
        result = speeds(race, name)
        first = contender.losses[: race.settings.warmup_steps]
        lines += row_of(
            name,
            f"{statistics.median(result):,.0f}",
            f"{min(result):,.0f}–{max(result):,.0f}",
            ratio(race, name),
            ratio(race, name, "processor"),
            f"{contender.facts['parameters']:,.0f}",
            ", ".join(f"{loss:.3f}" for loss in first),
            f"{contender.losses[-1]:.3f}",
        )
    if race.left_out:
        lines += ["", *(f"- {name}: not measured: {why}" for name, why in race.left_out.items())]
    return lines


def versions(races: dict[str, Race]) -> dict[str, str]:
    """Return contender -> its reported versions and threads."""
    result = {}
    for race in races.values():
        for name, contender in race.running.items():
            facts = contender.facts
            parts = [f"{key} {value}" for key, value in facts["versions"].items()]
            parts += [f"{facts['threads']} threads"] if "threads" in facts else []
            result[name] = ", ".join(parts) or "no versions given"
    return result


def explanation(settings: Settings) -> list[str]:
    """Return the explanation of the numbers."""
    return [
        f"- {settings.rounds} rounds of one block of {settings.block_steps} steps each, after "
        f"{settings.warmup_steps} single steps. Ratios are medians of the ratios of the rounds.",
        "- All train on the same batches from initial weights of their own. The losses show that "
        "they train the same kind of model; they are not compared.",
    ]


def conditions() -> dict[str, str]:
    """Return the current conditions of the machine."""
    names = [name for name in ("XLA_FLAGS", "OMP_NUM_THREADS") if name in os.environ]
    variables = [f"{name}={os.environ[name]}" for name in names]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "environment": " ".join(variables) or "no XLA_FLAGS, no OMP_NUM_THREADS",
        "allocator of all": " ".join(f"{name}={value}" for name, value in ALLOCATOR.items()),
        "load average before": load(),
    }


def load() -> str:
    """Return the load over 1, 5 and 15 minutes."""
    return " ".join(f"{value:.1f}" for value in os.getloadavg())


def processor() -> str:
    """Return the name of the processor."""
    with contextlib.suppress(OSError):
        if match := re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text()):
            return match[1]
    return platform.processor() or platform.machine()


def commands_of(pythons: list[str], rivals: list[str]) -> dict[str, list[str]]:
    """Return contender -> command.

    Raises:
        ValueError: the errors in `--python` and `--rival`, one line each.
    """
    interpreters, problems = dict.fromkeys(BUILT_IN, sys.executable), []
    for option in pythons:
        name, _, python = option.partition("=")
        if name not in BUILT_IN or not python:
            problems.append(f"--python {option}: write NAME=PYTHON, NAME of {', '.join(BUILT_IN)}")
        elif not shutil.which(python):
            problems.append(f"--python {option}: {python} is no program")
        interpreters[name] = python
    commands = {
        name: [interpreters[name], str(HERE / script), *arguments]
        for name, (script, *arguments) in BUILT_IN.items()
    }
    for rival in rivals:
        name, python, words = read_rival(rival)
        is_script = bool(words) and words[0].endswith(".py")
        if not words:
            problems.append(f"--rival {rival}: write NAME=PYTHON:SCRIPT.py or NAME=PYTHON:MODULE")
        elif not shutil.which(python):
            problems.append(f"--rival {rival}: {python} is no program")
        elif is_script and not Path(words[0]).is_file():
            problems.append(f"--rival {rival}: there is no file {words[0]}")
        elif name in commands:
            problems.append(f"--rival {rival}: there is a contender {name}; take another name")
        else:
            commands[name] = [python, *words] if is_script else [python, "-m", *words]
    if problems:
        raise ValueError("\n".join(problems))
    return commands


def read_rival(rival: str) -> tuple[str, str, list[str]]:
    """Return name, interpreter, and program with its arguments; [] if it cannot be parsed."""
    name, _, rest = rival.partition("=")
    python, _, program = rest.partition(":")
    try:
        return name, python, shlex.split(program) if name and python else []
    except ValueError:  # an unclosed quotation
        return name, python, []


def read_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Return the parsed command line; exit with 2 if it is invalid."""
    usual = Settings()
    number = lambda kind: lambda text: positive(kind, text)
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--shape", action="append", choices=SHAPES, help="measure this one only; repeatable")
    add("--rounds", type=number(int), default=usual.rounds, help="blocks of each contender")
    add("--block-steps", type=number(int), default=usual.block_steps, help="steps of a block")
    add("--warmup-steps", type=number(int), default=usual.warmup_steps, help="before the rounds")
    add("--batch", type=number(int), default=0, help="rows of a step instead of the shape's")
    add("--timeout-s", type=number(float), default=usual.timeout_s, help="for an answer")
    add("--python", action="append", default=[], metavar="NAME=PYTHON", help="of a contender")
    rival = "NAME=PYTHON:SCRIPT.py"
    add("--rival", action="append", default=[], metavar=rival, help="see this file's docstring")
    add("--out", type=Path, help="page to write, e.g. scripts/bench/results/versus.md")
    arguments = parser.parse_args(argv)
    if arguments.out and not os.access(arguments.out.absolute().parent, os.W_OK | os.X_OK):
        parser.error(f"--out {arguments.out}: {arguments.out.parent} is no directory to write to")
    return arguments


def positive(kind: type, text: str) -> Any:
    """Parse a number above 0."""
    with contextlib.suppress(ValueError):
        if 0 < (value := kind(text)) < math.inf:
            return value
    raise argparse.ArgumentTypeError(f"{text} is not a {kind.__name__} above 0")


def main(argv: list[str] | None = None) -> int:
    """Measure every shape, print and write the page; return 1 if nothing could be measured."""
    arguments = read_arguments(argv)
    try:
        commands = commands_of(arguments.python, arguments.rival)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    settings = Settings(
        rounds=arguments.rounds,
        block_steps=arguments.block_steps,
        warmup_steps=arguments.warmup_steps,
        timeout_s=arguments.timeout_s,
    )
    machine, races = conditions(), {}
    for name in arguments.shape or SHAPES:
        shape = SHAPES[name]
        shape = dataclasses.replace(shape, batch_size=arguments.batch or shape.batch_size)
        print(f"{name}: {', '.join(commands)}", file=sys.stderr)
        races[name] = Race(shape, settings).run(commands)
    page = report(races, settings, {**machine, "load average after": load()})
    print(page)
    if not any(race.running for race in races.values()):
        return 1
    if arguments.out:
        arguments.out.write_text(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
