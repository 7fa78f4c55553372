"""Measure data on demand: waits of a streamed run, rate of tokenizing, opening a large folder.

    python scripts/bench/streaming.py --steps 320 --rounds 9 > scripts/bench/results/streaming.md

- waits: the default model trains on Python's standard library in 24 Parquet files, streamed from a
  server on this machine.
- rate: files are tokenized into a shard (read, encode, write), and the same texts in memory by the
  `tokenizers` library, in turn; each uses all cores.
- opening: a token folder of 10 billion tokens (sparse files) in 10 million documents, by packing,
  each in a process of its own; memory is the growth of its peak, mapped files included.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as parquet  # noqa: E402
from data_cases import tar_members, write_tar  # noqa: E402
from hub_server import local_hub  # noqa: E402

from jaxdist.data import DataConfig, load_tokenizer, open_datasets  # noqa: E402
from jaxdist.data.corpus import SHARD_TOKENS, Corpus, write_index, write_shard  # noqa: E402
from jaxdist.data.encoding import BATCH_CHARACTERS, make_encoder  # noqa: E402
from jaxdist.data.files import library_files  # noqa: E402
from jaxdist.run.metrics_log import read_records  # noqa: E402

COMMIT = "0" * 39 + "1"
NUM_FILES = 24
NUM_TOKENS, NUM_DOCUMENTS = 10**10, 10**7
PACKINGS = ("stream", "documents", "best_fit")


def main() -> None:
    """Run the measurements and print a page of Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=("waits", "rate", "opening"), help="default: all")
    parser.add_argument("--open", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.open:
        print(json.dumps(opened(*options.open)))
        return
    texts = [path.read_text(errors="replace") for path in library_files()]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "set").mkdir()
        for number in range(NUM_FILES):
            table = pa.table({"text": texts[number::NUM_FILES]})
            parquet.write_table(table, folder / "set" / f"train-{number:02d}.parquet")
        print("# Data on demand\n")
        command = " ".join(["python", "scripts/bench/streaming.py", *sys.argv[1:]])
        print(f"`{command}`, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {os.cpu_count()} cores.\n")
        measures = {
            "waits": lambda: measure_waits(folder, options.steps),
            "rate": lambda: measure_rates(folder, texts, options.rounds),
            "opening": lambda: measure_opening(folder, options.rounds),
        }
        for name, measure in measures.items():
            if options.only not in (None, name):
                continue
            before = os.getloadavg()[0]
            lines = list(measure())
            loads = f"Load average {before:.1f} before, {os.getloadavg()[0]:.1f} after"
            print(f"## {name.capitalize()}\n\n{loads}, its own included.\n", *lines, "", sep="\n")


def measure_waits(folder: Path, steps: int) -> Iterator[str]:
    """Train the default model on the stream; yield the share of time that it waits for data."""
    with local_hub() as hub:
        hub.store("datasets", "org/set", folder / "set", COMMIT)
        caches = {"JAXDIST_CACHE": str(folder / "cache"), "HF_HUB_CACHE": str(folder / "hub")}
        flags = ["--data.sources=hf://org/set", "--data.streaming=true", "--data.tokenizer=code"]
        flags += ["--data.streaming-buffer=2", f"--steps={steps}", f"--run-dir={folder / 'run'}"]
        subprocess.run(
            [sys.executable, "-m", "jaxdist.train", *flags, "--eval.interval_steps=0"],
            env={**os.environ, **hub.environment, **caches},
            check=True,
            stdout=subprocess.DEVNULL,
        )
        files = {sent for sent in hub.sent if sent.endswith(".parquet")}
    records = [r for r in read_records(folder / "run" / "metrics.jsonl") if r["kind"] == "train"]
    yield "| steps | data wait | of | largest |"
    yield "|---|---:|---:|---:|"
    for name, some in (("all", records), ("without the first two", records[2:])):
        wait = sum(r["data_wait_s"] for r in some)
        total = sum(r["step_time_s"] for r in some)
        largest = max(r["data_wait_s"] for r in some) * 1000
        yield f"| {name} | {100 * wait / total:.2f} % | {total:.0f} s | {largest:.1f} ms |"
    yield f"\n{len(files)} of {NUM_FILES} files were downloaded in {len(records)} steps."


def measure_rates(folder: Path, texts: list[str], rounds: int) -> Iterator[str]:
    """Yield the rates of `write_shard` and of the tokenizers library on the same texts."""
    tokenizer = load_tokenizer("code")
    encoder = make_encoder(tokenizer)
    batches: list[list[str]] = [[]]
    for text in texts:
        batches[-1].append(text)
        if sum(map(len, batches[-1])) >= BATCH_CHARACTERS:
            batches.append([])
    paths = [folder / f"all.{kind}" for kind in ("parquet", "jsonl", "tar")]
    parquet.write_table(pa.table({"text": texts}), paths[0])
    paths[1].write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    write_tar(paths[2], tar_members(texts))
    seconds: dict[str, list[float]] = {"tokenizers": [], **{path.name: [] for path in paths}}
    for number in range(rounds + 1):
        began = time.perf_counter()
        count = sum(
            len(encoding.ids)
            for batch in batches
            for encoding in tokenizer._inner.encode_batch_fast(batch, add_special_tokens=False)
        )
        seconds["tokenizers"].append(time.perf_counter() - began)
        for path in paths:
            out = folder / f"{path.name}-{number}"
            began = time.perf_counter()
            write_shard(path, out, encoder)
            seconds[path.name].append(time.perf_counter() - began)
            written = Corpus(out)
            assert written.num_tokens - written.num_documents == count
    yield f"{count / 1e6:.1f} million tokens, {rounds} rounds after one to warm up.\n"
    yield "| input | M tokens/s | × `tokenizers` | lowest and highest of a round |"
    yield "|---|---:|---:|---:|"
    for name, times in seconds.items():
        pairs = zip(seconds["tokenizers"][1:], times[1:], strict=True)
        ratios = [plain / own for plain, own in pairs]
        rate, ratio = count / statistics.median(times[1:]) / 1e6, statistics.median(ratios)
        yield f"| {name} | {rate:.2f} | {ratio:.2f} | {min(ratios):.2f}, {max(ratios):.2f} |"


def measure_opening(folder: Path, rounds: int) -> Iterator[str]:
    """Yield time and memory of opening a folder with each packing."""
    large = folder / "large"
    large.mkdir()
    shards = []
    for start in range(0, NUM_TOKENS, SHARD_TOKENS):
        count = min(SHARD_TOKENS, NUM_TOKENS - start)
        name = f"tokens-{len(shards):05d}.bin"
        with (large / name).open("wb") as file:
            file.truncate(2 * count)
        shards.append({"file": name, "num_tokens": count})
    sizes = np.random.default_rng(0).lognormal(6.2, 1.2, NUM_DOCUMENTS)  # many short, few long
    ends = np.ceil(np.cumsum(sizes) * (NUM_TOKENS / sizes.sum())).astype(np.uint64)
    ends[-1] = NUM_TOKENS
    encoder, digest = make_encoder(load_tokenizer("code")), hashlib.sha256()
    write_index(large, encoder, np.dtype("<u2"), {"tokens": shards}, ends, {"tokens": digest})
    yield f"{NUM_TOKENS:,} tokens in {NUM_DOCUMENTS:,} documents, rows of 2,048; {rounds} rounds.\n"
    yield "| packing | seconds | CPU seconds | MB | rows |"
    yield "|---|---:|---:|---:|---:|"
    for packing in PACKINGS:
        command = [sys.executable, __file__, "--open", str(large), packing]
        runs = [json.loads(subprocess.check_output(command)) for _ in range(rounds)]
        median = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        yield (
            f"| {packing} | {median['s']:.2f} | {median['cpu_s']:.2f} | {median['mb']:.0f} | "
            f"{median['rows']:,} |"
        )


def opened(folder: str, packing: str) -> dict[str, float]:
    """Open a folder and read a row; return seconds, CPU seconds, growth of the peak in MB, rows."""
    load_tokenizer("code")  # libraries are imported before
    status = Path("/proc/self/status")  # `getrusage` begins with the peak of the parent
    peak = lambda: int(re.findall(r"VmHWM:\s+(\d+)", status.read_text())[0]) * 1.024e-3
    before, began, cpu = peak(), time.perf_counter(), time.process_time()
    config = DataConfig(sources=[folder], packing=packing, tokenizer=f"{folder}/tokenizer.json")
    train, held_out = open_datasets(config, seq_len=2048)
    assert held_out is not None
    train.rows(np.array([train.num_rows // 2]))
    return {
        "s": time.perf_counter() - began,
        "cpu_s": time.process_time() - cpu,
        "mb": peak() - before,
        "rows": train.num_rows,
    }


if __name__ == "__main__":
    main()
