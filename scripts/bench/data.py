"""Measure batches per second: this loader with 0, 1 and 2 workers, an earlier one, plain grain.

    python scripts/bench/data.py                       # every case, about five minutes
    python scripts/bench/data.py --case text --rounds 9 --json results.json

Each variant is a separate process that reads a block of batches per request. A round runs all
variants in turn, so that noise of the machine affects all equally. The script reports medians over
the rounds, and the median of the ratios to the earlier loader within a round. The earlier loader is
read from git (`--old`). CPU time covers all threads of the training process, without workers; it is
the cost of a batch on a busy machine.

Cases: `text` (stream of bytes), `chat` (conversations packed by best_fit), and two grain pipelines:
`images` (two milliseconds of numpy per image), `remote` (two milliseconds of waiting per image).
Each block first reads the batches that are already prefetched.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ROWS = 64
SEQ_LEN = 512
READY = 8  # batches that may be prefetched when a block begins
VARIANTS = ("old", "0 workers", "1 worker", "2 workers", "grain by row")
CASES = {"text": 400, "chat": 60, "images": 12, "remote": 12}  # batches of a block
OWN = ("images", "remote")  # rows from a user-defined Python function

ROWS_MODULE = """
import time
import grain
import numpy as np

def row(i):
    image = np.random.default_rng(i).random((96, 96, 3), np.float32)
    for _ in range(2):  # two milliseconds of numpy, as decoding and augmenting an image take
        spectrum = np.fft.fft2(image, axes=(0, 1))
        image = np.fft.ifft2(spectrum * 0.9, axes=(0, 1)).real.astype(np.float32)
    return {"images": image, "labels": i % 10, "weights": 1}

def late_row(i):
    time.sleep(0.002)  # as a read over a network takes
    return {"images": np.full((96, 96, 3), i, np.float32), "labels": i % 10, "weights": 1}

def images(*, seq_len, seed):
    return grain.MapDataset.range(50_000).map(row)

def remote(*, seq_len, seed):
    return grain.MapDataset.range(50_000).map(late_row)
"""


def main() -> None:
    """Run the cases and print a table; `--json` also writes every number."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    parser.add_argument("--rounds", type=int, default=5, help="blocks of each variant")
    parser.add_argument("--old", default="4fb57d1", help="commit of the earlier loader")
    parser.add_argument("--json", default="", help="file to write")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(*args.measure)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_sources(folder)
        write_old(args.old, folder / "old")
        results = {case: run(case, folder, args.rounds) for case in args.case or CASES}
    report = {"conditions": conditions(args.old), "results": results}
    print(table(report))
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1))


def write_sources(folder: Path) -> None:
    """Write 20 MB of text, 20,000 conversations, and the module of the grain pipelines."""
    library = Path(os.__file__).parent
    text = b"".join(path.read_bytes() for path in sorted(library.glob("*.py")))
    (folder / "text.txt").write_bytes((text * (1 + 20_000_000 // len(text)))[:20_000_000])
    lines = []
    for number in range(20_000):
        start = number * 997 % (len(text) - 2000)
        parts = [text[start : start + 40 + number % 200], text[start + 300 :][: 60 + number % 400]]
        question, answer = (part.decode("ascii", "replace") for part in parts)
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "a" + answer},
        ]
        lines.append(json.dumps({"messages": messages}))
    (folder / "chats.jsonl").write_text("\n".join(lines))
    (folder / "bench_rows.py").write_text(ROWS_MODULE)


def write_old(commit: str, folder: Path) -> None:
    """Write the package at a commit into a folder."""
    packed = subprocess.run(
        ["git", "archive", commit, "jaxdist"], cwd=ROOT, check=True, capture_output=True
    )
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")


def run(case: str, folder: Path, rounds: int) -> dict[str, list[list[float]]]:
    """Return rows per second and CPU seconds per row of each variant, one pair per round."""
    processes = {}
    for variant in VARIANTS:
        package = folder / "old" if variant == "old" else ROOT
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": f"{package}:{folder}",
            # Each variant stores its tokens in another format.
            "JAXDIST_CACHE": str(folder / ("cache_old" if variant == "old" else "cache")),
        }
        processes[variant] = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--measure", case, variant],
            cwd=folder, env=environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        answer(processes[variant])  # started, and its first batch is ready
    rates: dict[str, list[list[float]]] = {variant: [] for variant in processes}
    for number in range(rounds):
        for variant in list(processes)[:: 1 if number % 2 else -1]:
            processes[variant].stdin.write("go\n")
            processes[variant].stdin.flush()
            rates[variant].append(answer(processes[variant]))
        print(case, number + 1, {k: round(v[-1][0]) for k, v in rates.items()}, file=sys.stderr)
    for process in processes.values():
        process.stdin.close()
        process.wait(timeout=60)
    return rates


def answer(process: subprocess.Popen) -> list[float]:
    """Return the next line of numbers that a process prints."""
    line = process.stdout.readline()
    if not line:
        sys.exit(f"a measuring process ended with code {process.wait()}")
    return [float(word) for word in line.split()]


def measure(case: str, variant: str) -> None:
    """Read a block of batches for each line of stdin; runs in a separate process."""
    import jax

    started = time.perf_counter()
    batches = open_batches(case, variant)
    next(batches)
    print(time.perf_counter() - started, flush=True)
    for _ in sys.stdin:
        for _ in range(READY):
            batch = next(batches)
        started, busy = time.perf_counter(), time.process_time()
        for _ in range(CASES[case]):
            batch = next(batches)
        jax.block_until_ready(batch)
        rows = CASES[case] * ROWS
        used = (time.process_time() - busy) / rows
        print(rows / (time.perf_counter() - started), used, flush=True)


def open_batches(case: str, variant: str) -> Iterator[Any]:
    """Return an endless iterator over the batches of one variant."""
    import jax
    import numpy as np

    from jaxdist.data import DataConfig, Loader, open_datasets

    settings: dict[str, Any] = {
        "text": {"sources": ["text.txt"]},
        "chat": {"sources": ["chats.jsonl"], "records": "chat"},
        "images": {"sources": ["bench_rows:images"]},
        "remote": {"sources": ["bench_rows:remote"]},
    }[case]
    if variant == "old" and case in OWN:
        settings["vocab_size"] = 10  # was required then
    train, _ = open_datasets(DataConfig(**settings), seq_len=SEQ_LEN)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    if variant == "grain by row":
        import grain

        rows = grain.MapDataset.source(train).seed(0).shuffle().repeat().to_iter_dataset()
        batches = rows.batch(ROWS)
        return iter(
            grain.experimental.device_put(
                batches, sharding, cpu_buffer_size=1, device_buffer_size=2
            )
        )
    workers = {"num_workers": int(variant[0])} if "worker" in variant else {}
    return Loader(train, global_batch_size=ROWS, seed=0, sharding=sharding, **workers)


def conditions(old: str) -> dict[str, Any]:
    """Return the conditions of the measurement."""
    import grain
    import jax

    return {
        "cores": os.cpu_count(),
        "load average": [round(load, 1) for load in os.getloadavg()],
        "grain": grain.__version__,
        "jax": jax.__version__,
        "python": sys.version.split()[0],
        "batch": f"{ROWS} rows; text and chat of {SEQ_LEN} tokens, images of 96 x 96",
        "earlier loader": old,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def table(report: dict[str, Any]) -> str:
    """Return Markdown: conditions, then a row per case and variant."""
    lines = [f"- {name}: {value}" for name, value in report["conditions"].items()]
    lines += ["", "| case | variant | rows/s | tokens/s | × earlier | CPU µs/row | × earlier |"]
    lines += ["|---|---|---:|---:|---:|---:|---:|"]
    for case, rates in report["results"].items():
        for variant, values in rates.items():
            rows, used = (statistics.median(column) for column in zip(*values, strict=True))
            pairs = list(zip(values, rates["old"], strict=True))
            faster, dearer = (
                statistics.median(new[at] / old[at] for new, old in pairs) for at in (0, 1)
            )
            tokens = f"{rows * SEQ_LEN:,.0f}" if case not in OWN else ""
            lines.append(
                f"| {case} | {variant} | {rows:,.0f} | {tokens} | {faster:.2f} | "
                f"{used * 1e6:,.1f} | {dearer:.2f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
